"""Reads the boards of this node's workers, and tells the controller of progress and of a standstill.

Invariant: it only reads, and decides nothing. It says that the node stands still only once its workers, asked
for it, have not answered that they are busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from adaptor.controller.hang_detector import HangDetector
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.protocol.messages import BoardRecord, FromAgent, NodeStalled, Progress

# How often the boards are read, for progress (TTP_OT is at least 10 s) and for hangs.
PROGRESS_S = 0.5


async def watch(
    node: int,
    hang_s: float,
    workers: Workers,
    *,
    look: Callable[[Sequence[BoardRecord]], None],
    moved: Callable[[], int],
    report: Callable[[FromAgent], None],
) -> None:
    """Watch until the boards are gone.

    Args:
        node: of this agent.
        hang_s: see `HangDetector` (TTP_HANG).
        workers: of this node.
        look: is called with the boards, each time that they are read.
        moved: returns how many bytes this agent itself has moved in the save folder.
        report: takes what the controller is told.
    """
    loop = asyncio.get_running_loop()
    last = 0
    hang_detector, is_still = HangDetector(node, hang_s), False
    while workers.boards is not None:
        await asyncio.sleep(PROGRESS_S)
        boards = workers.read()
        look(boards)
        stall_change = hang_detector.look(boards, loop.time(), traced=workers.traced)
        if isinstance(stall_change, NodeStalled) and not is_still and await workers.are_busy():
            stall_change = hang_detector.look(boards, loop.time(), traced=True)
        if stall_change is not None:
            is_still = isinstance(stall_change, NodeStalled)
            report(stall_change)
        total = sum(board.progress for board in boards) + moved()
        if total != last:
            last = total
            report(Progress(node, total))

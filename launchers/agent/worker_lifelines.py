"""Waits for the lifelines of workers: the locks that tell an agent of a death before the memory is freed.

A lifeline is a robust mutex on a rank's board (`adaptor.protocol.lifeline`); for each a thread waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable

from adaptor.launchers.agent import procfs
from adaptor.protocol.board import BoardMemory


class WorkerLifelines:
    """The lifelines of the workers of one agent, on its control thread.

    Args:
        loop: the event loop of the control thread.
        on_dying: is called there with the rank and the process of a worker that is dying, and when that was
            seen, in Unix seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_dying: Callable[[int, int, float], None]) -> None:
        self._loop = loop
        self._on_dying = on_dying
        self._boards: BoardMemory | None = None
        self._ended: dict[int, asyncio.Future[None]] = {}  # by rank; done when their threads are
        self._replaced: Counter[int] = Counter()  # how often each rank has got another process
        self.held: set[int] = set()  # ranks whose process still holds its lifeline (it has not exec-ed)

    def begin(self, boards: BoardMemory) -> None:
        """Begin a generation, with its boards."""
        self._boards = boards

    def watch(self, rank: int, pid: int) -> None:
        """Wait for the lifeline of the process `pid`, which is the worker of `rank`."""
        boards = self._boards
        assert boards is not None
        lifeline, process = boards.lifelines[rank], self._replaced[rank]

        ended_future: asyncio.Future[None] = self._loop.create_future()

        def wait() -> None:
            try:
                if not lifeline.wait(lambda: self._boards is boards and self._replaced[rank] == process):
                    return
                if procfs.is_exiting(pid):
                    self._loop.call_soon_threadsafe(self._on_dying, rank, pid, time.time())
                else:
                    self.held.discard(rank)
            finally:
                self._loop.call_soon_threadsafe(ended_future.set_result, None)

        thread = threading.Thread(target=wait, name=f"ttp-lifeline-{rank}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: its death is learnt a moment later, from its descriptor
            return
        self.held.add(rank)
        self._ended[rank] = ended_future

    async def let_go(self, rank: int) -> None:
        """Wait for no lifeline of `rank` any more: it gets another process."""
        self._replaced[rank] += 1  # the thread that waits goes, if it has not
        if rank in self._ended:
            await asyncio.shield(self._ended[rank])
        self.held.discard(rank)

    async def end(self) -> None:
        """End the generation: no thread waits any more."""
        self._boards = None
        self.held = set()
        await asyncio.gather(*self._ended.values())
        self._ended = {}
        self._replaced.clear()

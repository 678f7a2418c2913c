"""Watches the boards of workers, ends workers after a verdict, and decides where no controller does.

Invariants: reports to the controller are read from the boards alone; a node is reported to stand still only
after its workers were asked, and did not answer that they are busy; workers get time to end by themselves
before they are killed; nothing in the save folder is removed during possible work in the folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from adaptor import output
from adaptor.controller.hang_detector import HangDetector
from adaptor.errors import CheckpointError
from adaptor.launchers.agent.save_folder_tasks import SaveFolderTasks
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.protocol.messages import (
    AgentTerminationRequested,
    BoardRecord,
    ComputeTime,
    ComputeTimes,
    Died,
    Dying,
    Fault,
    FromAgent,
    Layout,
    NodeStalled,
    Progress,
    Raised,
    TerminationRequested,
    Verdict,
)

# A worker told to exit that takes longer hangs in the kernel or holds the interpreter lock.
EXIT_GRACE_S = 3.0
# The time for reports of other nodes, which end their workers in the same time.
SHUTDOWN_GRACE_S = EXIT_GRACE_S + 2.0


async def reap(workers: Workers, job_is_over: Callable[[], bool]) -> None:
    """Wait for the workers to end, end the others, then wait for the rest of the job."""
    await workers.ask_for_stacks()
    await _until(lambda: not workers.alive, EXIT_GRACE_S)
    await workers.keep_stacks()
    workers.end_the_living()
    await _until(job_is_over, SHUTDOWN_GRACE_S)


async def _until(is_done: Callable[[], bool], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not is_done() and loop.time() < deadline:
        await asyncio.sleep(0.01)


async def clean_up(
    folder_tasks: SaveFolderTasks, host: ControllerHost | None, verdict: Verdict | None, generation: str
) -> None:
    """Remove this generation's files from the save folder, on the node of the controller.

    Args:
        host: of the controller; None on other nodes.
        verdict: on the generation.
        generation: a part of folder names.
    """
    # After a time-out a thread may still write, so nothing may be removed.
    if folder_tasks.busy or host is None or verdict is None or not verdict.save_folder:
        return
    try:
        await folder_tasks.clean(Path(verdict.save_folder), host.term, generation)
    except CheckpointError as error:
        output.tell(f"[ttp] {error}")


def failure_in(message: FromAgent) -> str:
    """Return the failure in a `message` that came after the controller has left; '' without one."""
    match message:
        case Died(rank=rank, status=status) if status != 0:
            description = f"rank {rank} ended with status {status}"
        case AgentTerminationRequested(error=error) if error:
            description = f"ttprun has failed: {error},"
        case AgentTerminationRequested(signal=name):
            description = f"ttprun was told to end by {name}"
        case TerminationRequested(rank=rank, signal=name):
            description = f"rank {rank} was told to end by {name}"
        case Raised(rank=rank, error=error):
            description = f"rank {rank} raised {error}"
        case _:
            return ""
    return f"{description} after node 0 had finished"


def verdict_here(line: str, stop: str) -> Verdict:
    """Return the verdict of an agent without a controller."""
    return Verdict(
        incident=0,
        outcome="lost",
        step=-1,
        line=line,
        cause_rank=-1,
        exit_code=1,
        save_folder="",
        fault=Fault(kind="error"),
        stop=stop,
    )


# How often the boards are read, for progress (TTP_OT is at least 10 s) and for hangs.
PROGRESS_S = 0.5
# Computing times are sent again at most so often, and if one has changed by a tenth: thousands of nodes must
# not report all the time.
COMPUTE_TIMES_S = 10.0


async def watch(
    node: int,
    hang_s: float,
    workers: Workers,
    *,
    look: Callable[[Sequence[BoardRecord]], None],
    moved: Callable[[], int],
    starting: Callable[[], Sequence[FromAgent]],
    report: Callable[[FromAgent], None],
) -> None:
    """Watch the boards until they are gone.

    Args:
        hang_s: see `HangDetector` (TTP_HANG).
        look: is called with the boards after each read.
        moved: returns the number of bytes that the agent itself has moved in the save folder.
        starting: returns reports about new processes that do not train yet.
        report: sends a message to the controller.
    """
    loop = asyncio.get_running_loop()
    last = 0
    hang_detector, is_still = HangDetector(node, hang_s), False
    compute_times, reported_at = ComputeTimes(node, {}), 0.0
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
        for message in starting():
            report(message)
        times = workers.compute_times()
        has_waited = loop.time() - reported_at >= COMPUTE_TIMES_S
        is_due = has_waited and _have_changed(compute_times.times, times)
        if is_due or times.keys() - compute_times.times.keys():
            compute_times, reported_at = ComputeTimes(node, times), loop.time()
            report(compute_times)
        total = sum(board.progress for board in boards) + moved()
        if total != last:
            last = total
            report(Progress(node, total))


def _have_changed(reported: Mapping[int, ComputeTime], times: Mapping[int, ComputeTime]) -> bool:
    ranks = reported.keys() & times.keys()
    pairs = [pair for rank in ranks for pair in zip(reported[rank], times[rank], strict=True)]
    return any(abs(second - first) > first / 10 for first, second in pairs)


class WorkerNews:
    """The news of one generation of the workers of a node.

    Attributes:
        noticed: when the first fault was noticed, in Unix seconds; 0: no fault.
        training_began: the first step and the time on the monotonic clock; None: some rank does not train
            yet.
        first_raised: the rank that raised first; -1: none.
    """

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self.noticed = 0.0
        self.training_began: tuple[int, float] | None = None
        self.first_raised = -1
        self._unbegun = set(ranks)  # ranks that do not train yet

    def note(self, message: FromAgent) -> None:
        """Note a message of a worker, or the report of its death."""
        match message:
            case Layout(rank=rank, origin=origin):
                self._unbegun.discard(rank)
                if not self._unbegun and self.training_began is None:
                    self.training_began = origin, time.monotonic()
            case Dying(at=at) | Died(at=at) if not isinstance(message, Died) or message.status:
                self.noticed = self.noticed or at
            case Raised(rank=rank):
                self.note_incident()
                if self.first_raised < 0:
                    self.first_raised = rank
            case TerminationRequested():
                self.note_incident()

    def note_incident(self) -> None:
        """Note an incident of which nothing was known on the node."""
        self.noticed = self.noticed or time.time()

    def end_incident(self) -> None:
        """Note that all ranks go on after an incident."""
        self.noticed = 0.0
        self.first_raised = -1

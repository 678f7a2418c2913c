"""Ends the workers of an agent after their verdict, and makes the verdict where no controller gives one.

Invariants: workers get time to end by themselves before they are killed; nothing in the save folder is
removed while something may be at work there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from adaptor import output
from adaptor.errors import CheckpointError
from adaptor.launchers.agent.save_folder_tasks import SaveFolderTasks
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.protocol.messages import (
    AgentTerminationRequested,
    Died,
    Fault,
    FromAgent,
    Raised,
    TerminationRequested,
    Verdict,
)

# A worker that was told to exit and has not done so by then hangs in the kernel or holds the interpreter
# lock.
EXIT_GRACE_S = 3.0
# How much longer this node waits for the reports of other nodes, which end their workers in the same time.
SHUTDOWN_GRACE_S = EXIT_GRACE_S + 2.0


async def reap(workers: Workers, job_is_over: Callable[[], bool]) -> None:
    """Wait for the workers to go, and end those that do not; then wait for the rest of the job."""
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
    """Remove what this generation has left in the save folder, where the controller is here.

    `folder_tasks` are those of this agent, `host` is that of the controller.
    """
    # After a time-out a thread may still be at work there, and nothing may be removed under it.
    if folder_tasks.busy or host is None or verdict is None or not verdict.save:
        return
    try:
        await folder_tasks.clean(Path(verdict.save), host.term, generation)
    except CheckpointError as error:
        output.tell(f"[ttp] {error}")


def failure_in(message: FromAgent) -> str:
    """Return the failure that `message` tells after the controller has left; '' if it tells none."""
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
    """Return the verdict of an agent that has no controller to ask."""
    return Verdict(
        incident=0,
        outcome="lost",
        step=-1,
        line=line,
        cause_rank=-1,
        exit_code=1,
        save="",
        fault=Fault(kind="error"),
        stop=stop,
    )

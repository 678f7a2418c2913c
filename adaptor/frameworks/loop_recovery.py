"""Online recovery in a process that runs a framework's training loop: the parts shared by its patches and its
loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.distributed as dist

from adaptor import context
from adaptor.context import Context
from adaptor.frameworks.step_log import StepLog
from adaptor.online import loop, rejoin
from adaptor.replica import group


class FrameworkLoop(loop.Loop, Protocol):
    """A framework's training loop, as it was called.

    Attributes:
        everyone: the adaptor's group of all ranks
    """

    everyone: dist.ProcessGroup | None

    @property
    def log(self) -> StepLog:
        """Return its log."""

    def begin_step(self, step: int) -> None:
        """`step` begins."""

    def end_step(self) -> None:
        """A step has ended."""

    def end(self) -> None:
        """The loop is over."""


class Recovery:
    """Online recovery in this process.

    Attributes:
        loop: the training loop of the framework, once that was called
        answers: in a newcomer: what the framework would have asked other ranks at its start
    """

    def __init__(self, _context: Context) -> None:
        self.loop: FrameworkLoop | None = None
        self.answers: dict[str, dict[str, Any]] = {}


def train(
    reason: str, make: Callable[[], FrameworkLoop], begin: Callable[[], None], wrapped: Callable[[], Any]
) -> Any:
    """Call the framework's loop `wrapped`, and again after each incident from which the job goes on.

    Args:
        reason: why the job is not recovered online; empty: the job is.
        make: describes the loop and the loop's call.
        begin: describes this rank's state and lets training begin; not called in a newcomer.
        wrapped: the loop, with the arguments of its call.
    """
    worker = rejoin.of_this_process()
    assert worker is not None
    worker.set_online_support(reason)
    if reason and not worker.newcomer:
        begin()
        return wrapped()
    loop_of_job = context.part(Recovery).loop = make()
    if worker.newcomer:
        loop_of_job.everyone = group.of_everyone()  # in its place among the groups of the job
    else:
        begin()
        loop_of_job.everyone = group.of_this_job()

    def call() -> Any:
        result = wrapped()
        loop_of_job.end()
        return result

    return worker.run(loop_of_job, call)


def begin_step(step: int) -> None:
    """`step` begins in a loop that may be called again."""
    running = context.part(Recovery).loop
    if running is not None:
        running.begin_step(step)


def end_step() -> None:
    """End the current step in a recoverable loop."""
    running = context.part(Recovery).loop
    if running is not None:
        running.end_step()


def log_of_this_process() -> StepLog | None:
    """Return the log of the loop; None where none is running that may be called again."""
    running = context.part(Recovery).loop
    return None if running is None else running.log


@contextlib.contextmanager
def loads_nothing(args: Any) -> Iterator[None]:
    """Load nothing while a newcomer builds its model: no checkpoint is read, and the survivors send the
    state.

    The newcomer draws its weights all the same: without `perform_initialization` the framework leaves out the
    mark at a weight that is cut by tensor parallelism.
    """
    names = [name for name in ("load", "pretrained_checkpoint") if hasattr(args, name)]
    values_before = {name: getattr(args, name) for name in names}
    for name in names:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in values_before.items():
            setattr(args, name, value)

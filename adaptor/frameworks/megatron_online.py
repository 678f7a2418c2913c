"""Online recovery in Megatron-LM: how its training loop, and the start of a newcomer, come to it.

The loop itself is in `megatron_loop.py`; which jobs are recovered online: `megatron_online_support.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from adaptor import context
from adaptor.context import Context
from adaptor.frameworks.megatron_log import StepLog
from adaptor.frameworks.megatron_loop import MegatronLoop, call_of_train, set_args
from adaptor.frameworks.megatron_online_support import why_not
from adaptor.frameworks.mindspeed_loop import MindspeedLoop
from adaptor.online import rejoin
from adaptor.replica import group


class Recovery:
    """Online recovery in a process that runs Megatron-LM.

    Attributes:
        loop: its training loop, once that was called
        answers: in a newcomer: what the framework would have asked other ranks at its start
    """

    def __init__(self, _context: Context) -> None:
        self.loop: MegatronLoop | None = None
        self.answers: dict[str, dict[str, Any]] = {}


def train(
    wrapped: Callable[..., Any],
    args: Any,
    kwargs: Any,
    begin: Callable[[], None],
    kind: type[MegatronLoop] = MegatronLoop,
) -> Any:
    """Call the framework's loop `wrapped`, and again after each incident from which the job goes on.

    Args:
        wrapped: the loop.
        args, kwargs: the arguments of its call.
        begin: describes what this rank holds and lets training begin; not called in a newcomer.
        kind: whose loop it is.
    """
    worker = rejoin.of_this_process()
    assert worker is not None
    from megatron.training import get_args

    call = call_of_train(args, kwargs)
    reason = why_not(get_args(), call)
    worker.set_online_support(reason)
    if reason and not worker.newcomer:
        begin()
        return wrapped(*args, **kwargs)
    loop = context.part(Recovery).loop = kind(call, context.part(Recovery).answers)
    if worker.newcomer:
        loop.everyone = group.of_everyone()  # in its place among the groups of the job
    else:
        begin()
        loop.everyone = group.of_this_job()

    def train() -> Any:
        result = wrapped(*args, **kwargs)
        loop.end()
        return result

    return worker.run(loop, train)


def begin_step(step: int) -> None:
    """`step` begins in a loop that may be called again."""
    loop = context.part(Recovery).loop
    if loop is not None:
        loop.begin_step(step)


def end_step() -> None:
    """The step that was begun has ended in such a loop."""
    loop = context.part(Recovery).loop
    if loop is not None:
        loop.end_step()


def missing_operations() -> float:
    """Return, once, the floating-point operations that the loop has forgotten, as it was called again."""
    loop = context.part(Recovery).loop
    return loop.missing_operations() if isinstance(loop, MindspeedLoop) else 0


def log_of_this_process() -> StepLog | None:
    """Return the log of the loop; None where none is running that may be called again."""
    loop = context.part(Recovery).loop
    return None if loop is None else loop.log


@contextlib.contextmanager
def loads_nothing(args: Any) -> Iterator[None]:
    """While a newcomer builds its model: no checkpoint is read, its state comes from the survivors.

    It draws its weights all the same: where it does not (`perform_initialization`) the framework leaves out
    what it notes at a weight besides, that it is a part of one cut by tensor parallelism.
    """
    names = [name for name in ("load", "pretrained_checkpoint") if hasattr(args, name)]
    before = {name: getattr(args, name) for name in names}
    for name in names:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def take_place(args: Any) -> None:
    """Set a newcomer to the step of the job; model and optimizer are built, and no data is read yet."""
    worker = rejoin.of_this_process()
    assert worker is not None
    record, answers, _ = worker.ask_record()
    set_args(record.counters)
    set_args({"iteration": record.step})
    context.part(Recovery).answers.update(answers)
    if before := answers["tail"][
        "consumed_before"
    ]:  # its data begins there, with an evaluation that may come again
        set_args({"iteration": record.step - 1, "consumed_valid_samples": before["consumed_valid_samples"]})


def take_answers() -> None:
    """Set in a newcomer what the framework would have asked other ranks; data iterators are built."""
    set_args(context.part(Recovery).answers["asked"])

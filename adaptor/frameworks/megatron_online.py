"""Online recovery in Megatron-LM: the calls of its training loop and of a newcomer's start.

The loop itself is in `megatron_loop.py`; the supported jobs: `megatron_online_support.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from adaptor import context
from adaptor.checkpoint import step_record
from adaptor.frameworks import loop_recovery
from adaptor.frameworks.loop_recovery import Recovery
from adaptor.frameworks.megatron_loop import FlagscaleLoop, MegatronLoop, call_of_train
from adaptor.frameworks.megatron_online_support import why_not
from adaptor.frameworks.training_loop import set_args
from adaptor.online import rejoin


def train(
    wrapped: Callable[..., Any],
    args: Any,
    kwargs: Any,
    begin: Callable[[], None],
    kind: type[MegatronLoop] | None = None,
) -> Any:
    """Call the framework's loop `wrapped`, and again after each incident from which the job goes on.

    Args:
        wrapped: the loop.
        args, kwargs: the arguments of the loop's call.
        begin: describes this rank's state and lets training begin; not called in a newcomer.
        kind: the class of the loop; None: Megatron-LM's, or FlagScale's copy, by the module of `wrapped`.
    """
    from megatron.training import get_args

    call = call_of_train(args, kwargs)
    if kind is None:
        kind = FlagscaleLoop if wrapped.__module__ == FlagscaleLoop.module else MegatronLoop
    return loop_recovery.train(
        why_not(get_args(), call),
        lambda: kind(call, context.part(Recovery).answers),
        begin,
        lambda: wrapped(*args, **kwargs),
    )


def missing_operations() -> float:
    """Return, once, the floating-point operations that the loop has lost by being called again."""
    loop = context.part(Recovery).loop
    return loop.missing_operations() if isinstance(loop, MegatronLoop) else 0


def take_place(args: Any) -> None:
    """Set a newcomer to the step of the job; model and optimizer are built, and no data is read yet."""
    worker = rejoin.of_this_process()
    assert worker is not None
    record, answers, *_ = worker.ask_record()
    set_args(args, {**record.counters, "iteration": record.step})
    context.part(Recovery).answers.update(answers)
    if record.loaders:  # the script reads these files for its loader, by `iteration`
        step_record.write_loader_states(args.dataloader_save, record.step, record.loaders)
    if consumed_before := answers["tail"]["consumed_before"]:
        # Its data begins there, with an evaluation that may come again.
        consumed = consumed_before["consumed_valid_samples"]
        set_args(args, {"consumed_valid_samples": consumed})
        if not getattr(args, "dataloader_save", None):
            set_args(args, {"iteration": record.step - 1})


@contextlib.contextmanager
def reads_on() -> Iterator[None]:
    """Let the script of a newcomer set its data loader to the job's step, as after the load of a save."""
    from megatron.training import get_args

    args = get_args()
    load = args.load
    if getattr(args, "dataloader_save", None) and load is None:
        args.load = args.save
    try:
        yield
    finally:
        args.load = load


def take_answers() -> None:
    """Set in a newcomer what the framework would have asked other ranks; data iterators are built."""
    from megatron.training import get_args

    set_args(get_args(), context.part(Recovery).answers["asked"])

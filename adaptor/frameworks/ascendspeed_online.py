"""Online recovery in ModelLink: the supported jobs, and the calls of the loop and of a newcomer's start.

The loop itself is in `ascendspeed_loop.py`. ModelLink has no version number: the patches fit a single commit,
and stop the job if a function differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adaptor import context
from adaptor.context import Context
from adaptor.frameworks import loop_recovery
from adaptor.frameworks.ascendspeed_loop import NAMES, AscendLoop
from adaptor.frameworks.loop_recovery import Recovery
from adaptor.frameworks.megatron_online_support import of_process_groups, of_torch
from adaptor.frameworks.training_loop import set_args
from adaptor.online import rejoin
from adaptor.online.groups import Groups

# Options with which a step, or the start of a job, keeps something that cannot be put back.
_OPTIONS = (
    ("DDP_impl", "torch", "--DDP-impl torch keeps work of a step in torch's own buckets"),
    (
        "auto_recompute_device_size",
        None,
        "--auto-recompute-device-size measures the first steps of a process",
    ),
    (
        "distribute_checkpointed_activations",
        None,
        "--distribute-checkpointed-activations has a buffer of its own",
    ),
    ("optimized_pipeline", None, "--optimized-pipeline has not been tested with it"),
    ("is_instruction_dataset", None, "--is-instruction-dataset has not been tested with it"),
    ("adlr_autoresume", None, "--adlr-autoresume ends jobs in a way of its own"),
)


class NewcomerData:
    """The data of a newcomer.

    Attributes:
        is_built: it is being built, and the newcomer is alone
    """

    def __init__(self, _context: Context) -> None:
        self.is_built = False


def why_not(args: Any, call: Mapping[str, Any]) -> str:
    """Return why a job of ModelLink is not recovered online; empty: the job is.

    Args:
        args: of the framework.
        call: the arguments of the loop, by name.
    """
    return of_process_groups() or of_backends() or of_options(args) or of_data(call) or of_torch()


def of_backends() -> str:
    """Return the process-group backends that are untested with ModelLink; empty: all are tested."""
    other_backends = sorted(context.part(Groups).backends - {"gloo"})
    return f"it has not been tested with ModelLink over {', '.join(other_backends)}" if other_backends else ""


def of_options(args: Any) -> str:
    """Return the first option with state that cannot be restored; empty: none."""
    for name, value, meaning in _OPTIONS:
        option_value = getattr(args, name, None)
        if option_value == value if value is not None else option_value not in (None, False, -1):
            return meaning
    return ""


def of_data(call: Mapping[str, Any]) -> str:
    """Return why the data of a call of the training loop cannot be read once more; empty: they can."""
    train, valid = call["train_data_iterator"], call["valid_data_iterator"]
    if not isinstance(valid, list):
        return f"valid_data_iterator is a {type(valid).__name__}, and no list"
    for iterator in (train, *valid):
        if iterator is not None and not hasattr(iterator, "__next__"):
            return f"there is a {type(iterator).__name__} where an iterator of data should be"
    return ""


def train(wrapped: Callable[..., Any], args: Any, kwargs: Any, begin: Callable[[], None]) -> Any:
    """Call the framework's loop `wrapped`, and again after each incident from which the job goes on.

    Args:
        wrapped: the loop.
        args, kwargs: the arguments of the loop's call.
        begin: describes this rank's state and lets training begin; not called in a newcomer.
    """
    from ascendspeed import get_args

    call = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    return loop_recovery.train(
        why_not(get_args(), call),
        lambda: AscendLoop(call, context.part(Recovery).answers),
        begin,
        lambda: wrapped(**call),
    )


def take_place(args: Any) -> None:
    """Set a newcomer to the step of the job; model and optimizer are built, and no data is read yet."""
    worker = rejoin.of_this_process()
    assert worker is not None
    record, answers, *_ = worker.ask_record()
    context.part(Recovery).answers.update(answers)
    set_args(args, {**record.counters, "iteration": record.step})
    if consumed_before := answers["tail"]["consumed_before"]:  # an evaluation behind the step may come again
        set_args(args, {"consumed_valid_samples": consumed_before["consumed_valid_samples"]})


def build_data(build: Callable[[], tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    """Return the result of `build`, the iterators of a newcomer's data, as on the first start."""
    from ascendspeed import get_args

    args, place = get_args(), context.part(NewcomerData)
    # For what is consumed it takes a guess by the iteration where that is 0, and asserts what need not hold.
    step, args.iteration = args.iteration, 0
    place.is_built = True
    try:
        train, valid, test = build()
    finally:
        args.iteration, place.is_built = step, False
    asked_values = context.part(Recovery).answers["asked"]
    set_args(args, asked_values)
    if train is None:  # another rank of this part of the model reads the data
        valid, test = [None] * int(asked_values["do_valid"]), [None] * int(asked_values["do_test"])
    return train, valid, test

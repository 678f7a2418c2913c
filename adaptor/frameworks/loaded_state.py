"""Compares the state that Megatron-LM has loaded with the agreed state of the checkpoint (`load_check`).

A different checkpoint is refused like a damaged checkpoint: the newest checkpoint before takes its place, and
is loaded instead. If the second checkpoint differs, too, the loader is more likely to be wrong than two
checkpoints: the job ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptor import output
from adaptor.errors import ResumeError
from adaptor.protocol import naming

# The arguments that a load of Megatron-LM increases, or requires to be 0.
_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "iteration")


def load(
    load_once: Callable[[], Any],
    refuse: Callable[[int, str], None],
    model: Any,
    optimizer: Any,
    scheduler: Any,
) -> Any:
    """Load, compare with the agreed state, and after a difference load the checkpoint before. Collective.

    Args:
        load_once: the framework's load; returns the step first.
        refuse: puts another checkpoint in the place of a step's checkpoint, for a reason; raises ResumeError
            without another checkpoint.
        model, optimizer, scheduler: the targets of the load.

    Returns:
        The result of the framework's load.

    Raises:
        ResumeError: the loaded state differs from the agreed state, also after a second load.
    """
    from megatron.training import get_args

    args = get_args()
    counters = {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)}
    steps = getattr(scheduler, "num_steps", None)
    loaded = load_once()
    problem = _problem(args, loaded, model, optimizer)
    if not problem:
        return loaded
    refuse(loaded[0], problem)
    for name, value in counters.items():
        setattr(args, name, value)
    if steps is not None:
        scheduler.num_steps = steps
    loaded = load_once()
    if second := _problem(args, loaded, model, optimizer):
        raise ResumeError(
            f"{second}; so did the checkpoint that was loaded before ({problem}): the loader may be wrong"
        )
    return loaded


def _problem(args: Any, loaded: Any, model: Any, optimizer: Any) -> str:
    """Return the differences from the agreed state; "" without a difference, or without a comparison."""
    from adaptor.frameworks import megatron_lm
    from adaptor.verification import load_check

    step = loaded[0] if isinstance(loaded, tuple) else 0
    folder = Path(args.load or "") / naming.final_name(step)
    if not step or optimizer is None or getattr(args, "finetune", False):
        return ""
    agreed = load_check.agreed_of(folder)
    if agreed is None:
        return ""
    state, place = megatron_lm.described(model, optimizer)
    is_whole = not getattr(args, "no_load_optim", False) and not getattr(args, "no_save_optim", False)
    result = load_check.compare(folder, agreed, state, place.shares, has_optimizer=is_whole)
    if result.not_compared and args.rank == 0:
        output.tell(
            f"[ttp] {folder}: the loaded state is not compared with the agreed state:"
            f" {'; '.join(result.not_compared[:3])}",
            to="stdout",
        )
    return result.problem

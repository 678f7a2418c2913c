"""The record of a finished step: all but its tensors, taken on the main thread before the next step.

The main thread of a worker changes the scheduler, the loss scale, the counters and the random states long
before the next update, so a dump beside the main thread must not read them: the dump gets a `StepRecord`. The
record of step k+1 is derived from the record of step k and from the snapshot at the door, because the
framework itself moves the scheduler and the counters only after the update.

The update counts of the inner optimizers (`step` of a param group, or of a parameter's state) are not in a
record. They change inside the update window, together with the tensors, and are read with the tensors.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adaptor.errors import CheckpointError

# Per inner optimizer, per param group: every key but `params`, `step`, and classes, which never change.
Groups = tuple[tuple[Mapping[str, Any], ...], ...]


@dataclass(frozen=True)
class StepRecord:
    """A finished step, without its tensors.

    Attributes:
        counters: consumed_train_samples, skipped_train_samples, num_floating_point_operations_so_far, and all
            other counters in the framework's arguments, under their names there
        scheduler: state dict of the parameter scheduler, or None
        groups: per optimizer of the chain, per param group: its scalars
        scalers: per optimizer of the chain: state dict of its grad scaler, or None
        rng: as the framework stores random states, one entry for each data-parallel rank with states of its
            own
        buffers: copies of the model's saved buffers (`Buffers.take`)
        rerun: the stored state of the rerun state machine of some versions; empty: None is stored, None:
            nothing
        loaders: the states of a script's own data loaders (`LoaderStates.take`)
    """

    step: int
    counters: Mapping[str, int | float]
    scheduler: Mapping[str, Any] | None
    groups: Groups
    scalers: tuple[Mapping[str, Any] | None, ...]
    rng: Sequence[Mapping[str, Any]]
    buffers: tuple[torch.Tensor | None, ...] = ()
    rerun: Mapping[str, Any] | None = None
    loaders: Mapping[str, bytes] = field(default_factory=dict)


def chain(optimizer: Any) -> list[Any]:
    """Return the optimizers of the framework's chain, in its order; a bare optimizer is a chain of one."""
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])


def inner(optimizer: Any) -> list[Any]:
    """Return the torch optimizers of a chain, without optimizers that have no params on the rank."""
    inner_optimizers = (
        getattr(chained_optimizer, "optimizer", None) for chained_optimizer in chain(optimizer)
    )
    return [chained_optimizer for chained_optimizer in inner_optimizers if chained_optimizer is not None]


def take_groups(optimizer: Any) -> Groups:
    """Return the scalars of every param group of every optimizer of the chain."""
    return tuple(
        tuple(
            {
                key: value
                for key, value in group.items()
                if key not in ("params", "step") and not isinstance(value, type)
            }
            for group in inner.param_groups
        )
        for inner in chain(optimizer)
    )


def take_scalers(optimizer: Any) -> tuple[dict[str, Any] | None, ...]:
    """Return the grad scaler's state of every optimizer of the chain, tensors cloned."""
    return tuple(_cloned(getattr(inner, "grad_scaler", None)) for inner in chain(optimizer))


def _cloned(scaler: Any) -> dict[str, Any] | None:
    if not scaler:
        return None
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in scaler.state_dict().items()
    }


def take(
    step: int,
    counters: Mapping[str, int | float],
    optimizer: Any,
    scheduler: Any,
    rng: Sequence[Mapping[str, Any]],
    buffers: tuple[torch.Tensor | None, ...],
    rerun: Mapping[str, Any] | None = None,
    loaders: Mapping[str, bytes] | None = None,
) -> StepRecord:
    """Take the record of `step` between steps: after the framework moved its scheduler and its counters.

    The arguments are the fields of `StepRecord`; `optimizer` and `scheduler` are the live objects.
    """
    return StepRecord(
        step=step,
        counters=dict(counters),
        scheduler=None if scheduler is None else dict(scheduler.state_dict()),
        groups=take_groups(optimizer),
        scalers=take_scalers(optimizer),
        rng=rng,
        buffers=buffers,
        rerun=rerun,
        loaders=loaders or {},
    )


def advance(
    record: StepRecord,
    *,
    updated: bool,
    scheduler: Any,
    increment: int,
    growth: Mapping[str, int | float],
    scalers: Sequence[Mapping[str, Any] | None],
    rng: Sequence[Mapping[str, Any]],
    buffers: tuple[torch.Tensor | None, ...],
    rerun: Mapping[str, Any] | None = None,
    loaders: Mapping[str, bytes] | None = None,
    also: Mapping[str, Any] | None = None,
) -> StepRecord:
    """Derive the record of the step after `record`, as the framework will have it at the end of the step.

    Args:
        updated: False for a skipped step (overflow): the framework moves the counters, not the scheduler
        scheduler: the live scheduler; only constants are read
        increment: samples by which the framework moves the scheduler
        growth: the growth of each counter; other counters stay
        scalers, rng, buffers, rerun, loaders: taken at the door of the new step, and unchanged afterwards
        also: further arguments of the framework for the scheduler's step
    """
    counters = {name: value + growth.get(name, 0) for name, value in record.counters.items()}
    state, groups = record.scheduler, record.groups
    if updated and state is not None:
        state, groups = _scheduled(scheduler, state, groups, increment, also or {})
    taken = (tuple(scalers), rng, buffers, rerun, loaders or {})
    return StepRecord(record.step + 1, counters, state, groups, *taken)


def _scheduled(
    scheduler: Any, state: Mapping[str, Any], groups: Groups, increment: int, also: Mapping[str, Any]
) -> tuple[dict[str, Any], Groups]:
    """Let a copy of the framework's own scheduler make one step on copies of the param groups."""
    if "num_steps" not in state:
        raise CheckpointError(
            f"{type(scheduler).__name__}: its state has no num_steps; use Megatron's OptimizerParamScheduler"
        )
    stand_in = copy.copy(scheduler)
    moved = tuple(tuple(dict(group) for group in inner) for inner in groups)
    stand_in.optimizer = types.SimpleNamespace(param_groups=[group for inner in moved for group in inner])
    # The live scheduler may have moved on: its saved attributes are set back.
    vars(stand_in).update((name, value) for name, value in state.items() if name in vars(stand_in))
    stand_in.step(increment, **also)
    return dict(stand_in.state_dict()), moved

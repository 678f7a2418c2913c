"""The record of a finished step: all but its tensors, taken on the main thread before the next step.

The main thread of a worker changes the scheduler, the loss scale, the counters and the random states long
before the next update, so a dump beside the main thread must not read them: the dump gets a `StepRecord`. The
record of step k+1 is derived from the record of step k and from the snapshot at the door, because the
framework itself moves the scheduler and the counters only after the update.

The update counts of the inner optimizers (`step` of a param group, or of a parameter's state) are not in a
record. They change inside the update window, together with the tensors, and are read with the tensors.

Random states (`RandomStates`) and the states of a script's own data loaders (`LoaderStates`,
--dataloader-save) are exchanged at the door among the ranks that have states of their own, so that no death
loses a state.
"""

from __future__ import annotations

import _random
import copy
import ctypes
import io
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from numpy.random import mtrand

from adaptor.checkpoint import disk
from adaptor.errors import CheckpointError
from adaptor.replica.group import gather_values

# Per inner optimizer, per param group: every key but `params`, `step`, and classes, which never change.
Groups = tuple[tuple[Mapping[str, Any], ...], ...]

# numpy's mt19937_state: 624 words and a position. CPython's RandomObject: the position, then the words.
_WORD = 4
_MT19937_BYTES = 625 * _WORD
# A kept view: a call of `ctypes.string_at` takes 20 microseconds in the middle of a training.
_Memory = ctypes.c_char * _MT19937_BYTES


@dataclass(frozen=True)
class StepRecord:
    """A finished step, without its tensors.

    Attributes:
        counters: consumed_train_samples, skipped_train_samples, num_floating_point_operations_so_far, and all
            other counters in the framework's arguments, under their names there
        groups: per optimizer of the chain, per param group: its scalars
        scalers: per optimizer of the chain: state dict of its grad scaler, or None
        rng: as the framework stores random states, one entry for each data-parallel rank with states of its
            own (`RandomStates`)
        buffers: copies of the model's saved buffers (`Buffers.take`)
        rerun: the stored state of the rerun state machine of some versions; empty: None is stored, None:
            nothing
        loaders: the files with the states of the script's own data loaders, by name (`LoaderStates`)
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
    """Return the optimizers of the framework's chain, in its order; a bare optimizer is a chain of one.

    A chain may be a part of another chain (a layer-wise optimizer, since Megatron-core 0.18).
    """
    parts = getattr(optimizer, "chained_optimizers", None)
    return [chained for part in parts for chained in chain(part)] if parts else [optimizer]


def with_chain(optimizer: Any, stand_ins: Iterator[Any]) -> Any:
    """Return a copy of the framework's chain with `stand_ins` in place of its optimizers, in their order."""
    parts = getattr(optimizer, "chained_optimizers", None)
    if not parts:
        return next(stand_ins)
    optimizer_copy = copy.copy(optimizer)
    optimizer_copy.chained_optimizers = [with_chain(part, stand_ins) for part in parts]
    return optimizer_copy


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

    Not `updated`: the step was skipped (overflow), and the framework moves the counters, not the scheduler,
    of which only constants are read. `increment`: samples by which the framework moves the scheduler. The
    other values are taken at the door of the new step, and unchanged afterwards.
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


class LoaderStates:
    """The states of the loaders of a data-parallel group, whose ranks make this object together.

    `name`: of this rank's file below the folder of a step; `save_state` returns the state of its loader.
    Empty without arguments.
    """

    def __init__(
        self,
        name: str = "",
        save_state: Callable[[], Any] = lambda: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._name = name
        self._save_state = save_state
        self._group = group
        self._own: Any = None
        self._files: Mapping[str, bytes] = {}
        self.exchange()

    def take(self) -> Mapping[str, bytes]:
        """Return the files of the last exchange: loaders give no data between the door and the next step."""
        return self._files

    def exchange(self) -> Mapping[str, bytes]:
        """Exchange the states with the group: collective, on the main thread."""
        if self._group is not None:
            self._own = self._save_state()
            own_files = {} if self._own is None else {self._name: _encoded(self._own)}
            self._files = {
                name: file for files in gather_values(own_files, self._group) for name, file in files.items()
            }
        return self._files

    def own(self) -> Any:
        """Return the state of this rank's loader at the end of the step, also while data are replayed."""
        return self._own

    def put_back(self, files: Mapping[str, bytes]) -> None:
        """Put the states of a step in the place of the last exchange."""
        self._files = files
        if self._name in files:
            content = io.BytesIO(files[self._name])
            self._own = torch.load(content, weights_only=False)["dataloader_state_dict"]


def _encoded(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"dataloader_state_dict": state}, file)
    return file.getvalue()


def write_loader_states(root: str, step: int, files: Mapping[str, bytes]) -> None:
    """Write the files of a step, by name, below the folder of --dataloader-save. Raises CheckpointError."""
    for name, content in files.items():
        path = Path(root) / f"iter_{step:07d}" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.replace(path.parent, path.name, content)
        except OSError as error:
            raise CheckpointError(f"{path} (--dataloader-save): {error.strerror or error}") from error


class RandomStates:
    """The random states that the framework saves.

    Without a group these are the states of one rank: all data-parallel ranks have the same states. With
    `--data-parallel-random-init` each rank has its own, and the framework saves all states, in the order of
    ranks. All ranks exchange their states at the door, so that no death loses any.
    """

    def __init__(self, tracker: Any, group: dist.ProcessGroup | None = None) -> None:
        """`tracker`: the framework's CUDA RNG tracker; all ranks of `group` make this object together."""
        self._tracker = tracker
        self._group = group
        self._exchanged: list[Mapping[str, Any]] = []
        self.exchange()

    @property
    def place(self) -> int | None:
        """The place of the own states in a checkpoint; None: all data-parallel ranks load the same states."""
        return None if self._group is None or self._group.size() < 2 else self._group.rank()

    def take(self) -> list[Mapping[str, Any]]:
        """Return the current states; of other ranks the states at the last exchange."""
        own_states = self.own()
        if self._group is None:
            return [own_states]
        rank = self._group.rank()
        return [*self._exchanged[:rank], own_states, *self._exchanged[rank + 1 :]]

    def own(self) -> Mapping[str, Any]:
        """Return the current states of this rank."""
        return take_random(self._tracker)

    def exchange(self) -> list[Mapping[str, Any]]:
        """Exchange the states with the group: collective, on the main thread."""
        own_states = self.own()
        if self._group is None:
            return [own_states]
        self._exchanged = gather_values(own_states, self._group)
        return self._exchanged

    def put_back(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states that `take` returned here, or on a rank with the same part of the model."""
        own_states = states[0 if self._group is None else self._group.rank()]
        put_back_random(self._tracker, own_states)
        self._exchanged = list(states)


def take_random(tracker: Any) -> dict[str, Any]:
    """Return the random states of this process as the framework, with this CUDA RNG tracker, stores them."""
    states = {
        "random_rng_state": _python.take(),
        "np_rng_state": _numpy.take(),
        "torch_rng_state": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda_rng_state"] = torch.cuda.get_rng_state()
    states["rng_tracker_states"] = {
        # A plain state is replaced by the tracker, never changed in place; a generator lives on.
        name: state.clone_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.get_states().items()
    }
    return states


def put_back_random(tracker: Any, states: Mapping[str, Any]) -> None:
    """Set the random states of this process to the `states` that `take_random` returned."""
    random.setstate(states["random_rng_state"])
    numpy.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    if "cuda_rng_state" in states:
        torch.cuda.set_rng_state(states["cuda_rng_state"])
    tracker.set_states(
        {
            name: state.clone_state() if isinstance(state, torch.Generator) else state.clone()
            for name, state in states["rng_tracker_states"].items()
        }
    )


class _NumpyState:
    """Reads numpy's global random state, which takes 150 microseconds, only when it has changed."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None  # of the generator
        self._seen = b""
        self._taken: Any = None

    def take(self) -> Any:
        """Return what `numpy.random.get_state()` returns."""
        generator = mtrand.get_bit_generator()
        if type(generator) is not numpy.random.MT19937:
            return numpy.random.get_state()
        if generator is not self._generator:
            self._generator, self._memory = generator, _Memory.from_address(generator.ctypes.state_address)
            self._seen = b""
        raw_state = self._memory.raw
        # The compared memory lacks the spare normal deviate: making a deviate draws numbers, using it does
        # not.
        if raw_state != self._seen or self._taken[3]:
            self._seen, self._taken = raw_state, numpy.random.get_state()
        return self._taken


class _PythonState:
    """Reads the state of `random`, whose tuple of 625 numbers takes tens of microseconds, only when it has
    changed.

    Invariant: the compared memory is the generator's own. Memory is only trusted if it holds the 625 numbers
    of `getstate()`, in CPython's order; otherwise the state is read each time.
    """

    def __init__(self) -> None:
        self._generator: random.Random | None = None
        self._memory: Any = None  # None: the place is not known
        self._seen = b""
        self._taken: Any = None

    def take(self) -> Any:
        """Return what `random.getstate()` returns."""
        generator: Any = getattr(random.getstate, "__self__", None)
        if generator is not self._generator:
            self._find(generator)
        if self._memory is None:
            return random.getstate()
        raw_state = self._memory.raw
        # The compared memory lacks the spare normal deviate, which is an attribute.
        if raw_state != self._seen or self._taken[2] != generator.gauss_next:
            self._seen, self._taken = raw_state, random.getstate()
        return self._taken

    def _find(self, generator: Any) -> None:
        self._generator, self._memory, self._seen = generator, None, b""
        if type(generator) is not random.Random or sys.implementation.name != "cpython":
            return
        address = id(generator) + object.__basicsize__
        *state_words, position = random.getstate()[1]
        expected = b"".join(word.to_bytes(_WORD, sys.byteorder) for word in (position, *state_words))
        is_inside = _random.Random.__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
        if is_inside and (memory := _Memory.from_address(address)).raw == expected:
            self._memory = memory


_python = _PythonState()
_numpy = _NumpyState()

"""The random states of a step: the rank's own and, if the framework saves them, the states of other
ranks.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from numpy.random import mtrand

from adaptor.replica.group import gather_values

# numpy's mt19937_state: 624 words and a position. CPython's RandomObject: the position, then the words.
_WORD = 4
_MT19937_BYTES = 625 * _WORD
# A kept view: a call of `ctypes.string_at` takes 20 microseconds in the middle of a training.
_Memory = ctypes.c_char * _MT19937_BYTES


class RandomStates:
    """The random states that the framework saves.

    Without a group these are the states of one rank: all data-parallel ranks have the same states. With
    `--data-parallel-random-init` each rank has its own, and the framework saves all states, in the order of
    ranks. All ranks exchange their states at the door, so that no death loses any.
    """

    def __init__(self, tracker: Any, group: dist.ProcessGroup | None = None) -> None:
        """Args:
        tracker: the framework's CUDA RNG tracker.
        group: data-parallel ranks with states of their own; all make this object together.
        """
        self._tracker = tracker
        self._group = group
        self._told: list[Mapping[str, Any]] = []
        self.exchange()

    def take(self) -> list[Mapping[str, Any]]:
        """Return the current states; of other ranks the states at the last exchange."""
        own_states = take(self._tracker)
        if self._group is None:
            return [own_states]
        rank = self._group.rank()
        return [*self._told[:rank], own_states, *self._told[rank + 1 :]]

    def exchange(self) -> list[Mapping[str, Any]]:
        """Exchange the states with the group: collective, on the main thread.

        Raises what the process group raises.
        """
        own_states = take(self._tracker)
        if self._group is None:
            return [own_states]
        self._told = gather_values(own_states, self._group)
        return self._told

    def put_back(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the random states of a step, as `take` returned them here or on a rank with the same part
        of the model.
        """
        own_states = states[0 if self._group is None else self._group.rank()]
        put_back(self._tracker, own_states)
        self._told = list(states)


def take(tracker: Any) -> dict[str, Any]:
    """Return the random states of this process as the framework stores them.

    Args:
        tracker: the framework's CUDA RNG tracker.
    """
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


def put_back(tracker: Any, states: Mapping[str, Any]) -> None:
    """Set the random states of this process to what `take` returned."""
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

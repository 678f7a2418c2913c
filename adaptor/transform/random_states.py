"""The random states of the ranks of a transformed checkpoint.

Ranks draw different numbers, so random states of new ranks cannot be exact. A rank whose tensor and pipeline
ranks the source had keeps its states. The states of another rank are drawn from its place and the states of
tensor rank 0 of its stage, so the same transform gives the same states.
"""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import numpy

from adaptor.errors import UnsupportedError
from adaptor.transform.copying import Files
from adaptor.transform.records import NewTensor, StoredTensor
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.source import SourceCheckpoint

_WORDS = 624
# Of a CPU: the seed, the number of unused words, a flag, the next word; the words; the cache of normals.
_MERSENNE = struct.Struct(f"<Q2iQ{_WORDS}Q3di4xf?3x")
_PHILOX_BYTES = 16  # of CUDA and NPU: a seed and an offset
_OF_STAGE = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state")


def is_kept(source: SourceCheckpoint, rank: Rank) -> bool:
    """Return whether a rank keeps the states of a rank of the source."""
    return rank in source.bodies


def line(source: SourceCheckpoint, sizes: Sizes) -> str:
    """Return the line about exact and derived states, empty where all are exact."""
    derived = sum(not is_kept(source, rank) for rank in sizes.ranks)
    if sizes.ranks == source.sizes.ranks:
        return ""
    return (
        f"random states: kept for {len(sizes.ranks) - derived} of {len(sizes.ranks)} ranks,"
        f" derived for {derived}; ranks have other parts of the model now, so dropout is not that of a run"
        " that was not transformed"
    )


def states_of(source: SourceCheckpoint, rank: Rank, files: Files) -> list[Any]:
    """Return the random states of a target's rank, one for each data-parallel rank of the source.

    Raises:
        UnsupportedError: the states are not stored in the framework's form.
    """
    kept = is_kept(source, rank)
    origin = rank if kept else Rank(0, min(rank.pp, source.sizes.pp - 1), 0)
    states = source.bodies[origin].get("rng_state")
    if states is None:
        return []
    if not isinstance(states, list):
        raise UnsupportedError(f"rng_state of rank {origin}: is {type(states).__name__}, not a list")
    return [
        state if kept else _derived(state, rank, number, source.sizes, files)
        for number, state in enumerate(states)
    ]


def _derived(states: dict[str, Any], rank: Rank, number: int, sizes: Sizes, files: Files) -> dict[str, Any]:
    trackers = states.get("rng_tracker_states") or {}
    ground = b"".join(files.whole(state) for state in trackers.values())

    def seed(name: str, *place: int) -> int:
        text = f"{name} {place} {number}".encode()
        return int.from_bytes(hashlib.sha256(ground + text).digest()[:8], "little") >> 2

    derived_states = dict(states)
    if rank.pp >= sizes.pp:  # tensor ranks of a stage share these states
        of_stage = {name: seed(name, rank.pp) for name in _OF_STAGE}
        derived_states["random_rng_state"] = random.Random(of_stage["random_rng_state"]).getstate()
        derived_states["np_rng_state"] = numpy.random.RandomState(
            of_stage["np_rng_state"] % 2**32
        ).get_state()
        for name in ("torch_rng_state", "cuda_rng_state"):
            derived_states[name] = generator(states[name], of_stage[name])
    derived_states["rng_tracker_states"] = {
        name: state
        if name == "data-parallel-rng" and rank.pp < sizes.pp
        else generator(state, seed(name, *_place(rank)))
        for name, state in trackers.items()
    }
    return derived_states


def _place(rank: Rank) -> tuple[int, int, int]:
    return rank.tp, rank.pp, rank.ep


def generator(like: StoredTensor, seed: int) -> NewTensor:
    """Return the state of a generator of the kind of `like`, seeded with `seed`.

    Raises:
        UnsupportedError: `like` has the size of no known generator's state.
    """
    if like.numel == _PHILOX_BYTES:
        state = struct.pack("<2q", seed, 0)
    elif like.numel == _MERSENNE.size:
        state = _mersenne(seed)
    else:
        raise UnsupportedError(f"a random state of {like.numel} bytes is of no generator that is known")
    return NewTensor("uint8", (len(state),), lambda: [state])


def _mersenne(seed: int) -> bytes:
    """Return the state of torch's generator of a CPU after `manual_seed(seed)`."""
    state_words = [seed & 0xFFFFFFFF]
    for place in range(1, _WORDS):
        state_words.append((1812433253 * (state_words[-1] ^ (state_words[-1] >> 30)) + place) & 0xFFFFFFFF)
    return _MERSENNE.pack(seed, 1, 1, 0, *state_words, 0.0, 0.0, 0.0, 0, 0.0, False)

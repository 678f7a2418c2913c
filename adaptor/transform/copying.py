"""Reads parts of whole tensors from the files of one layout, in the order of another, piece by piece.

Compares main params with weights, too: the optimizer's params, rounded, are the weights bit for bit; and the
common state of ranks: counters, groups of params, whole tensors.

Ranks draw different random numbers, so random states of new ranks cannot be exact. A rank whose tensor and
pipeline ranks the source had keeps its states. The states of another rank are drawn from its place and the
states of tensor rank 0 of its stage, so the same transform gives the same states.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy

from adaptor.checkpoint.layout_file import Piece
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol.naming import MODEL_FILE
from adaptor.transform import archive as archives
from adaptor.transform.described import STATES
from adaptor.transform.model import Slot
from adaptor.transform.records import SIZES, Archive, NewTensor, ScatteredTensor, StoredTensor
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.source import WEIGHT, SourceCheckpoint, StoredPart, needed, one_of_each, pieces_of

# Elements of a piece: 1 MiB of float32 stays in the cache until the piece is hashed and written. By elements,
# because main params and weights are compared piece by piece.
_PIECE = 1 << 18
Bits = Any  # an array of numpy, of unsigned integers
# The entries of a checkpoint that are the same on all ranks.
_COMMON = ("iteration", "opt_param_scheduler", "checkpoint_version")
# Larger replicas are compared on request alone: the comparison reads as much again. In bytes.
_SMALL = 1 << 20
_WORDS = 624  # of a Mersenne twister
# The random state of a CPU: the seed, the number of unused words, a flag, the next word; the words; the cache
# of normals.
_MERSENNE = struct.Struct(f"<Q2iQ{_WORDS}Q3di4xf?3x")
_PHILOX_BYTES = 16  # of the random state of CUDA and NPU: a seed and an offset
# The random states that tensor ranks of a pipeline stage share.
_OF_STAGE = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state")


class Files:
    """The files of the source, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._begins: dict[Archive, int] = {}

    def read(self, stored: StoredTensor, offset: int, into: memoryview) -> None:
        """Read bytes of a stored tensor into memory.

        Args:
            stored: the tensor.
            offset: in the tensor, in bytes.
            into: the memory, filled whole.

        Raises:
            CheckpointError: the file ends too early, or is damaged.
        """
        if not isinstance(stored, ScatteredTensor):
            self._read(stored.path, stored.offset + offset, into)
            return
        for stretch in stored.within(offset, len(into)):
            archive = stretch.archive
            self._read(archive.path, self._begin(archive) + stretch.offset, into[: stretch.bytes])
            into = into[stretch.bytes :]

    def _begin(self, archive: Archive) -> int:
        """Return where the only tensor of an archive begins in its file."""
        begin = self._begins.get(archive)
        if begin is None:
            begin = self._begins[archive] = archives.only_tensor(archive).offset
        return begin

    def _read(self, path: Path, offset: int, into: memoryview) -> None:
        try:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while into:
                count = os.preadv(descriptor, [into[: 1 << 30]], offset)
                if not count:
                    raise CheckpointError(f"{path}: ends before byte {offset}")
                offset += count
                into = into[count:]
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def pieces(self, stored: StoredTensor) -> Iterator[memoryview]:
        """Yield the bytes of a stored tensor; each piece is valid until the next."""
        yield from self._stretch(stored, 0, stored.bytes, _PIECE * SIZES[stored.dtype])

    def _stretch(self, stored: StoredTensor, offset: int, count: int, at_once: int) -> Iterator[memoryview]:
        memory = memoryview(bytearray(min(count, at_once)))
        for start in range(0, count, at_once):
            piece = memory[: min(at_once, count - start)]
            self.read(stored, offset + start, piece)
            yield piece

    def whole(self, stored: StoredTensor) -> bytes:
        """Return the bytes of a stored tensor."""
        return b"".join(self.pieces(stored))

    def part(self, slot: Slot, parts: Sequence[StoredPart], *, moments: bool) -> Iterator[memoryview]:
        """Yield the bytes of a rank's tensor; each piece is valid until the next.

        Rows of a padded vocabulary that the source lacks take the value of its last row, as in Megatron's own
        converter; new rows of moments are zero. For each kind of tensor the pieces have the same numbers of
        elements.

        Args:
            slot: the rank's tensor.
            parts: of all ranks of the source.
            moments: the tensor is a moment of Adam.
        """
        parts = one_of_each(slot, parts)
        wanted_parts = sorted(needed(slot, parts), key=lambda wanted_part: wanted_part[2])
        shape, axis = slot.shape, slot.item.cut.axis or 0
        item = SIZES[parts[0].stored.dtype]
        inner = prod(shape[axis + 1 :]) * item
        if axis:
            yield from self._columns(shape, axis, inner, item, wanted_parts)
            return
        for part, source_begin, _, length in wanted_parts:
            yield from self._stretch(part.stored, source_begin * inner, length * inner, _PIECE * item)
        if slot.item.cut.rows:
            yield from self._new_rows(slot, parts[-1], moments)

    def _columns(
        self,
        shape: tuple[int, ...],
        axis: int,
        inner: int,
        item: int,
        wanted_parts: Sequence[tuple[StoredPart, int, int, int]],
    ) -> Iterator[memoryview]:
        outer, row = prod(shape[:axis]), shape[axis] * inner
        at_once = max(1, _PIECE * item // max(1, row))
        row_block = numpy.empty((min(at_once, outer), row), numpy.uint8)
        for start in range(0, outer, at_once):
            count = min(at_once, outer - start)
            for part, source_begin, own_begin, length in wanted_parts:
                source_row = part.stored.shape[axis] * inner
                block = numpy.empty((count, source_row), numpy.uint8)
                self.read(part.stored, start * source_row, _flat(block))
                row_block[:count, own_begin * inner : (own_begin + length) * inner] = block[
                    :, source_begin * inner : (source_begin + length) * inner
                ]
            yield _flat(row_block[:count])

    def _new_rows(self, slot: Slot, part: StoredPart, moments: bool) -> Iterator[memoryview]:
        """Yield the rows behind the last row of the source, which `part` has."""
        last = part.stored
        rows = slot.item.shape[0]
        own_pieces = pieces_of(0, slot.pieces, slot.shape)
        new = sum(min(piece.length, max(0, piece.whole + piece.length - rows)) for piece in own_pieces)
        if not new:
            return
        width = last.bytes // last.shape[0]
        row = memoryview(bytearray(width))
        if not moments:
            self.read(last, last.bytes - width, row)
        for _ in range(new):
            yield row

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _flat(array: Any) -> memoryview:
    return memoryview(array).cast("B")


def rounds_to(main: memoryview, weight: memoryview, dtype: str) -> bool:
    """Return whether main params in float32 round to weights.

    Args:
        main: the bytes of the main params.
        weight: the bytes of as many weights.
        dtype: of the weights: float32, bfloat16 or float16.
    """
    if dtype == "float32":
        return main == weight
    main_bits, weight_bits = numpy.frombuffer(main, numpy.uint32), numpy.frombuffer(weight, numpy.uint16)
    rounded = _bfloat16(main_bits) if dtype == "bfloat16" else _float16(main_bits)
    is_equal = rounded == weight_bits
    # Not a number has many forms, which are all equal here.
    return bool(is_equal.all()) or bool(
        (is_equal | (_is_nan(main_bits) & _is_nan_16(weight_bits, dtype))).all()
    )


def _bfloat16(bits: Bits) -> Bits:
    """Round to the nearest; between two equally near values to the even one."""
    rounded = bits >> numpy.uint32(16)
    rounded &= numpy.uint32(1)
    rounded += numpy.uint32(0x7FFF)
    rounded += bits
    rounded >>= numpy.uint32(16)
    return rounded.astype(numpy.uint16)


def _float16(bits: Bits) -> Bits:
    with numpy.errstate(over="ignore"):
        return bits.view(numpy.float32).astype(numpy.float16).view(numpy.uint16)


def _is_nan(bits: Bits) -> Bits:
    return numpy.isnan(bits.view(numpy.float32))


def _is_nan_16(bits: Bits, dtype: str) -> Bits:
    infinite = 0x7F80 if dtype == "bfloat16" else 0x7C00
    return (bits & 0x7FFF) > infinite


def require_common(source: SourceCheckpoint, files: Files) -> None:
    """Refuse ranks that disagree in counters, schedule, scale of the loss, groups of params or their step.

    Raises:
        CheckpointError: names the value and the ranks.
    """
    first, *other_ranks = source.sizes.ranks
    for rank in other_ranks:
        own_value, other_value = source.bodies[first], source.bodies[rank]
        for key in _COMMON:
            if _plain(own_value.get(key), files) != _plain(other_value.get(key), files):
                raise CheckpointError(f"{key}: differs on rank {first} and rank {rank} of {source.folder}")
        if _plain(_optimizers(own_value), files) != _plain(_optimizers(other_value), files):
            raise CheckpointError(
                f"optimizer: the groups of params, their step or the loss scale differ on rank {first} and"
                f" rank {rank} of {source.folder}"
            )
    for rank in source.sizes.ranks:
        body = source.bodies[rank]
        steps = {group.get("step") for _, groups in _optimizers(body) for group in groups.values()}
        if len(steps) > 1:
            raise CheckpointError(
                f"{source.file(rank, MODEL_FILE)}: groups of params have the steps {sorted(steps, key=str)}"
            )


def _plain(value: Any, files: Files) -> Any:
    """Return a value for a comparison, with the bytes of tensors in the place of the tensors."""
    if isinstance(value, StoredTensor):
        return value.dtype, value.shape, files.whole(value)
    if isinstance(value, dict):
        return {key: _plain(item, files) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, files) for item in value]
    return value


def _optimizers(body: Any) -> list[tuple[Any, dict[Any, Any]]]:
    """Return for each optimizer its saved state without the groups of params, and the groups by their key."""
    saved = body.get("optimizer", [])
    return [
        (
            {key: value for key, value in inner_state.items() if key != "optimizer"},
            {
                (
                    group["wd_mult"],
                    group["lr_mult"],
                    group.get("is_expert_parallel"),
                    group.get("is_decoupled_lr"),
                ): group
                for group in inner_state["optimizer"]["param_groups"]
            },
        )
        for inner_state in (saved if isinstance(saved, list) else [saved])
    ]


def require_replicas(source: SourceCheckpoint, files: Files, everything: bool) -> None:
    """Refuse ranks of the `source` whose replicas of a tensor differ.

    Args:
        source: the checkpoint.
        files: of the source.
        everything: compare large tensors, too (weights of other expert ranks, the embedding on the last
            stage).

    Raises:
        CheckpointError: names the tensor and the ranks.
    """
    for item in source.model.items():
        if not item.dtype:
            continue
        for kind in (WEIGHT, *STATES):
            for replica_parts in _replicas(source.parts(item.name, kind)):
                if replica_parts[0].stored.bytes <= _SMALL or everything:
                    _require_equal(item.name, kind, replica_parts, files)


def _replicas(parts: Sequence[StoredPart]) -> list[list[StoredPart]]:
    by_place: dict[tuple[Piece, ...], list[StoredPart]] = {}
    for part in parts:
        by_place.setdefault(part.pieces, []).append(part)
    return [replica_parts for replica_parts in by_place.values() if len(replica_parts) > 1]


def _require_equal(name: str, kind: str, replica_parts: Sequence[StoredPart], files: Files) -> None:
    for part in replica_parts[1:]:
        if part.stored == replica_parts[0].stored:
            continue
        pieces = zip(files.pieces(replica_parts[0].stored), files.pieces(part.stored), strict=True)
        if not all(own_piece == other_piece for own_piece, other_piece in pieces):
            description = kind if kind == WEIGHT else f"state {kind}"
            raise CheckpointError(
                f"{name}: its {description} differs on rank {replica_parts[0].rank} and rank {part.rank}"
            )


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
        else generator(state, seed(name, rank.tp, rank.pp, rank.ep))
        for name, state in trackers.items()
    }
    return derived_states


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

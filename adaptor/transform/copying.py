"""Copies parts of whole tensors from the files of one layout into the memory of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from adaptor.errors import CheckpointError
from adaptor.transform.parts import needed, one_of_each
from adaptor.transform.records import SIZES, StoredArray, StoredTensor
from adaptor.transform.rules import Cut
from adaptor.transform.source import Part

# Read at once where a tensor is not cut along its first axis; in bytes.
_PIECE = 32 << 20


class Files:
    """The files of the source, opened once each."""

    def __init__(self, progress: Callable[[int], None] = lambda count: None) -> None:
        self._open: dict[Path, int] = {}
        self._progress = progress

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Read a stretch of a file into memory. Raises CheckpointError where the file ends before."""
        try:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while into:
                count = os.preadv(descriptor, [into[: 1 << 30]], offset)
                if not count:
                    raise CheckpointError(f"{path}: ends before byte {offset}")
                self._progress(count)
                offset += count
                into = into[count:]
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def whole(self, stored: StoredTensor) -> torch.Tensor:
        """Return a stored tensor."""
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.read(stored.path, stored.offset, _bytes(tensor))
        return tensor

    def loaded(self, value: Any) -> Any:
        """Return a value with the tensors and arrays that are stored in it."""
        if isinstance(value, StoredTensor):
            return self.whole(value)
        if isinstance(value, StoredArray):
            return value.loaded()
        if isinstance(value, dict):
            return type(value)((key, self.loaded(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self.loaded(item) for item in value)
        return value

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fill(
    files: Files,
    target: torch.Tensor,
    cut: Cut,
    rank: int,
    size: int,
    parts: Sequence[Part],
    moments: bool,
) -> None:
    """Fill a tensor of tensor rank `rank` of `size` from the parts of the source.

    Rows of a padded vocabulary that the source has not take the value of its last row, as Megatron's own
    converter does; those of moments are zero.
    """
    axis = cut.axis or 0
    shape = tuple(target.shape)
    parts = one_of_each(cut, parts)
    item = SIZES[parts[0].stored.dtype]
    outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :]) * item
    memory = _bytes(target)
    row = shape[axis] * inner if shape else item
    for part, theirs, mine, length in needed(cut, shape, rank, size, parts):
        stored = part.stored
        if outer == 1:
            files.read(
                stored.path, stored.offset + theirs * inner, memory[mine * inner : (mine + length) * inner]
            )
            continue
        their_row = stored.shape[axis] * inner
        at_once = max(1, _PIECE // their_row)
        for start in range(0, outer, at_once):
            count = min(at_once, outer - start)
            piece = torch.empty((count, their_row), dtype=torch.uint8)
            files.read(stored.path, stored.offset + start * their_row, _bytes(piece))
            place = target.view(torch.uint8).reshape(outer, row)[start : start + count]
            place[:, mine * inner : (mine + length) * inner] = piece[
                :, theirs * inner : (theirs + length) * inner
            ]
    if cut.rows:
        _fill_new_rows(files, target, rank, size, parts, moments)


def _fill_new_rows(
    files: Files, target: torch.Tensor, rank: int, size: int, parts: Sequence[Part], moments: bool
) -> None:
    there = parts[0].stored.shape[0] * len(parts)
    each = target.shape[0]
    new = min(each, max(0, (rank + 1) * each - there))
    if not new:
        return
    if moments:
        target[each - new :] = 0
        return
    last = parts[-1].stored
    width = last.bytes // last.shape[0]
    row = torch.empty(last.shape[1:], dtype=target.dtype)
    files.read(last.path, last.offset + last.bytes - width, _bytes(row))
    target[each - new :] = row


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)

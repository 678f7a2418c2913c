"""Stand-ins for the gathered state of a distributed optimizer, which is on no rank as a whole.

A stand-in has the dtype, the shape and a storage of its own as the gathered tensor would have, but nobody
writes or reads its memory, so it takes none. What a checkpoint has in its place is known: a range of a world
tensor (`shards`), which the holders of the shards write into the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adaptor.checkpoint import finite, shards


@dataclass(frozen=True)
class Source:
    """The content of a tensor: elements [`begin`, `end`) of a world tensor, as numbers of `dtype`.

    Attributes:
        position: of the optimizer in the chain
        number: of its buffer
        key: of `shards.KEYS`
    """

    position: int
    number: int
    key: str
    begin: int
    end: int
    dtype: torch.dtype


class CannotBePlanned(Exception):
    """A file cannot be laid out before its tensors have arrived: they have to be gathered."""


class PlannedTensors:
    """Makes stand-ins, and recognises them by their storage.

    Args:
        device: `cpu`, where a stand-in can be pickled as the tensor would be; `meta`, where no code of others
            can read a stand-in as if it were one.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._made: dict[int, tuple[Source, torch.UntypedStorage]] = {}

    def state_of(self, optimizer: Any, position: int) -> dict[Any, Any]:
        """Return what `shard_exchange.gather` returns of the optimizer at `position` of the chain."""
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(optimizer.buffers):
            numel = shards.numel_of(buffer)
            world: dict[str, Any] = {
                key: self._make(Source(position, number, key, 0, numel, torch.float32)) for key in shards.KEYS
            }
            state[number] = {(buffer.param_dtype, buffer.grad_dtype): {**world, "numel_unpadded": numel}}
        return state

    def source_of(self, storage: torch.UntypedStorage) -> Source | None:
        """Return what a storage stands for, None if it is not one of these."""
        source, _ = self._made.get(storage._cdata, (None, None))
        return source

    def range_of(self, tensor: torch.Tensor) -> Source | None:
        """Return the range that a tensor spans, None if it is no view of a stand-in."""
        source = self.source_of(tensor.untyped_storage())
        if source is None:
            return None
        begin = source.begin + int(tensor.storage_offset())
        span = int(sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
        end = begin + span + 1 if tensor.numel() else begin
        return Source(source.position, source.number, source.key, begin, end, source.dtype)

    def to_host(self, tensor: torch.Tensor, bring: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return `bring(tensor)`; a stand-in is returned unchanged."""
        return bring(tensor) if self.source_of(tensor.untyped_storage()) is None else tensor

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `tensor.to(dtype)`, of a contiguous view of a stand-in as another one."""
        known = self.range_of(tensor)
        if known is None or known.dtype == dtype:
            return tensor.to(dtype)
        place = Source(known.position, known.number, known.key, known.begin, known.end, dtype)
        return self._make(place).view(tensor.shape)

    def is_finite(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is finite; of a stand-in nothing is known yet, and it counts as such."""
        return self.source_of(tensor.untyped_storage()) is not None or finite.is_finite(tensor)

    def _make(self, source: Source) -> torch.Tensor:
        numel = source.end - source.begin
        # Not torch.empty, which fills its memory where a job is deterministic.
        make: Any = torch.UntypedStorage
        storage = make(numel * source.dtype.itemsize, device=self._device)
        self._made[storage._cdata] = source, storage
        return torch.empty(0, dtype=source.dtype, device=self._device).set_(storage, 0, (numel,), (1,))

"""Stand-ins for the gathered state of a distributed optimizer, which no rank has as a whole.

A stand-in has the dtype, the shape and a storage of its own like the gathered tensor, but its memory is
neither written nor read, so the stand-in takes no memory. The content in its place is known: a range of a
world tensor (`shards`), which the holders of the shards write into the file. While copies are followed, the
content of a copy of a view, such as a transposed weight, is known as well.

A framework may save a weight transposed (`Source.view`). The elements of one rank are adjacent in the world
tensor; in the file they are many short runs (`StridedView`), unless they are whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaptor.checkpoint import shards


@dataclass(frozen=True)
class Source:
    """The content of a tensor: elements [`begin`, `end`) of a world tensor, as numbers of `dtype`.

    Attributes:
        position: of the optimizer in the chain
        number: of its buffer
        key: of `shards.KEYS`
        view: size and step of each dimension in the world tensor, if the elements stand in another order,
            from `begin` on; empty if they are adjacent
    """

    position: int
    number: int
    key: str
    begin: int
    end: int
    dtype: torch.dtype
    view: tuple[tuple[int, int], ...] = ()

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(size for size, _ in self.view) if self.view else self.end - self.begin


class CannotBePlanned(Exception):
    """A file cannot be laid out before its tensors have arrived: the shards have to be gathered."""


class PlannedTensors:
    """Makes stand-ins, and recognises stand-ins by their storage.

    `device`: `cpu`, where a stand-in can be pickled like the tensor; `meta`, where no foreign code can read a
    stand-in.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._made: dict[int, _KeptStandIn] = {}

    def state_of(self, optimizer: Any, position: int) -> dict[Any, Any]:
        """Return the stand-in for `shards.gather` of the optimizer at `position` of the chain."""
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(optimizer.buffers):
            numel = shards.numel_of(buffer)
            world: dict[str, Any] = {
                key: self._make(Source(position, number, key, 0, numel, torch.float32)) for key in shards.KEYS
            }
            state[number] = {(buffer.param_dtype, buffer.grad_dtype): {**world, "numel_unpadded": numel}}
        return state

    def source_of(self, storage: torch.UntypedStorage) -> Source | None:
        """Return the source of a storage; None for other storages. Raises CannotBePlanned."""
        source_record = self._made.get(storage._cdata)
        if source_record is None:
            return None
        if (source := source_record.current()) is None:
            raise CannotBePlanned("a stand-in that has changed")
        return source

    def range_of(self, tensor: torch.Tensor) -> Source | None:
        """Return the range that a tensor spans; None if it is no view of a stand-in, or not known."""
        source_record = self._made.get(tensor.untyped_storage()._cdata)
        source = source_record.current() if source_record is not None else None
        if source is None or source.dtype != tensor.dtype:  # bits of another dtype
            return None
        offset = int(tensor.storage_offset())
        if source.view:
            return _slab(source, offset, tensor.numel()) if tensor.is_contiguous() else None
        begin = source.begin + offset
        return replace(source, begin=begin, end=begin + _span(_dimensions(tensor)))

    def follow_copies(self) -> TorchDispatchMode:
        """Return a context that records the content of copies of stand-ins, for this thread alone.

        The content of a stand-in that is changed in the context is unknown afterwards.
        """
        return _Copies(self._note_copy, self._forget)

    def stands_for_state(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is a stand-in, or a view of a stand-in."""
        return tensor.untyped_storage()._cdata in self._made

    def to_host(self, tensor: torch.Tensor, bring: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return `bring(tensor)`; a stand-in is returned unchanged."""
        return tensor if self.stands_for_state(tensor) else bring(tensor)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `tensor.to(dtype)`, for a contiguous view of a stand-in as a new stand-in."""
        planned_range = self.range_of(tensor)
        if planned_range is None or planned_range.dtype == dtype or not tensor.is_contiguous():
            return tensor.to(dtype)
        if planned_range.dtype != torch.float32:  # a number would be rounded twice
            return tensor.to(dtype)
        return self._make(replace(planned_range, dtype=dtype)).view(tensor.shape)

    def requantize(self, main: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Refuse to plan a quantized weight. Raises CannotBePlanned: its scales depend on its numbers."""
        raise CannotBePlanned("a quantized weight")

    def is_finite(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is finite, or a stand-in, whose content is not known yet."""
        return self.stands_for_state(tensor) or shards.is_finite(tensor)

    def _note_copy(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        planned_range, storage = self.range_of(tensor), copy.untyped_storage()
        if (
            planned_range is None
            or not copy.is_contiguous()
            or storage.nbytes() != copy.nbytes
            or not copy.numel()
        ):
            return
        # otherwise a number would be rounded twice
        if planned_range.dtype not in (copy.dtype, torch.float32):
            return
        if not tensor.is_contiguous():
            if min(tensor.stride()) < 1:  # an element is repeated
                return
            planned_range = _viewed(planned_range, _dimensions(tensor))
        self._made[storage._cdata] = _KeptStandIn(replace(planned_range, dtype=copy.dtype), copy)

    def _forget(self, tensor: torch.Tensor) -> None:
        source_record = self._made.get(tensor.untyped_storage()._cdata)
        if source_record is not None:
            source_record.source = None

    def _make(self, source: Source) -> torch.Tensor:
        numel = source.numel
        # Not torch.empty, which fills its memory in a deterministic job.
        make: Any = torch.UntypedStorage
        storage = make(numel * source.dtype.itemsize, device=self._device)
        planned_tensor = torch.empty(0, dtype=source.dtype, device=self._device).set_(
            storage, 0, (numel,), (1,)
        )
        self._made[storage._cdata] = _KeptStandIn(source, planned_tensor)
        return planned_tensor


class _KeptStandIn:
    """A stand-in or a copy of one; kept, because otherwise the number of its storage could be used again.

    `source` is set to None when `tensor`, with the whole storage, changes.
    """

    def __init__(self, source: Source, tensor: torch.Tensor) -> None:
        self.source: Source | None = source
        self._tensor = tensor
        self._version = tensor._version

    def current(self) -> Source | None:
        """Return the content; None if the tensor was changed, through a view as well."""
        return self.source if self._tensor._version == self._version else None


_COPYING = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `copied` with each copied tensor and its copy, and `changed` before a tensor changes."""

    def __init__(
        self,
        copied: Callable[[torch.Tensor, torch.Tensor], None],
        changed: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copied, self._changed = copied, changed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call_kwargs = dict(kwargs or {})
        if func._schema.is_mutable:
            named = {
                schema_argument.name: value
                for schema_argument, value in zip(func._schema.arguments, args, strict=False)
            }
            named |= call_kwargs  # such as `out`
            for argument in func._schema.arguments:
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = named.get(argument.name)
                for tensor_argument in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor_argument, torch.Tensor):
                        self._changed(tensor_argument)
        copied = func(*args, **call_kwargs)
        if func in _COPYING:
            self._copied(args[0], copied)
        return copied


# Size and step of each dimension of a tensor.
_Dimensions = tuple[tuple[int, int], ...]


def _dimensions(tensor: torch.Tensor) -> _Dimensions:
    return tuple(zip(tensor.shape, tensor.stride(), strict=True))


def _span(dimensions: _Dimensions) -> int:
    """Return the number of elements from the first element of such a tensor to the last in memory."""
    if not all(size for size, _ in dimensions):
        return 0
    return 1 + sum((size - 1) * step for size, step in dimensions)


def _viewed(source: Source, dimensions: _Dimensions) -> Source:
    """Return `source` with the elements of such a view, from its begin on."""
    view = tuple((size, step) for size, step in dimensions if size != 1)
    following = 1
    for size, step in reversed(view):
        if step != following:
            break
        following *= size
    else:
        view = ()
    return replace(source, end=source.begin + _span(dimensions), view=view)


def _slab(source: Source, offset: int, numel: int) -> Source | None:
    """Return the source of elements [`offset`, `offset` + `numel`) of a view; None if they are no view."""
    begin, inner = source.begin, source.numel
    for number, (size, step) in enumerate(source.view):
        inner //= size
        first, offset = divmod(offset, inner)
        begin += first * step
        if numel >= inner:
            count, remainder = divmod(numel, inner)
            if offset or remainder or first + count > size:
                return None
            return _viewed(replace(source, begin=begin), ((count, step), *source.view[number + 1 :]))
    return None


# Of all ranks of a group: each run takes some 60 µs, and a few bytes of a message.
_MOST_RUNS = 100_000


class StridedView:
    """A view of a world tensor from element `begin` on, with size and step (1 or more) of each dimension."""

    def __init__(self, begin: int, view: Sequence[tuple[int, int]]) -> None:
        *outer, (self._length, self._step) = view
        self._in_matrix = outer[-1][0] if outer else 1  # rows
        self._rows = torch.full((1,), begin, dtype=torch.int64, device="cpu")
        for size, step in outer:
            places = torch.arange(size, dtype=torch.int64, device="cpu") * step
            self._rows = (self._rows[:, None] + places).view(-1)

    def runs(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each run of its elements in [`low`, `high`) of the world tensor."""
        firsts, lasts = self._within(low, high)
        starts, ends = firsts.tolist(), lasts.tolist()
        if not starts:
            return
        start, end = starts[0], ends[0]
        for first, last in zip(starts[1:], ends[1:], strict=True):
            if first != end:
                yield start, end
                start = first
            end = last
        yield start, end

    def count_runs(self, low: int, high: int) -> int:
        """Return the number of runs."""
        firsts, lasts = self._within(low, high)
        return len(firsts) - int((firsts[1:] == lasts[:-1]).sum())

    def places(self, first: int, last: int) -> torch.Tensor:
        """Return the places of the elements [`first`, `last`) of the view in the world tensor."""
        numbers = torch.arange(first, last, dtype=torch.int64, device="cpu")
        rows = numbers.div(self._length, rounding_mode="floor")
        return self._rows[rows] + (numbers - rows * self._length) * self._step

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """Return the part of the world tensor with all matrices that have some of [`first`, `last`)."""
        size = self._length * self._in_matrix
        rows = self._rows[first // size * self._in_matrix : ((last - 1) // size + 1) * self._in_matrix]
        return int(rows.min()), int(rows.max()) + (self._length - 1) * self._step + 1

    def _within(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return begins and ends of the elements in the range, for each row that has some."""
        first, last = (
            (edge - self._rows + self._step - 1).div(self._step, rounding_mode="floor").clamp(0, self._length)
            for edge in (low, high)
        )
        some = (first < last).nonzero().view(-1)
        filler_before = some * self._length
        return filler_before + first[some], filler_before + last[some]


def require_few_runs(sources: Sequence[Source], optimizers: Sequence[Any]) -> None:
    """Raise CannotBePlanned for sources that a group would have to write in too many short runs."""
    count = 0
    for source in sources:
        if not source.view:
            continue
        view = StridedView(source.begin, source.view)
        optimizer = optimizers[source.position]
        _, ranks = shards.shard_of(optimizer)
        for bucket in shards.buckets_of(optimizer, optimizer.buffers[source.number]):
            for index in range(ranks):
                low, high = bucket.extent(index)
                if max(low, source.begin) < min(high, source.end):
                    count += view.count_runs(low, high)
        if count > _MOST_RUNS:
            raise CannotBePlanned(f"{count} runs of tensors that are turned round")

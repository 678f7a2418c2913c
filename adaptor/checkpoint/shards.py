"""The shards of Megatron's distributed optimizer: their places and tensors, the search for NaNs, and the
transport.

A distributed optimizer keeps params in buffers, a buffer consists of buckets, and a bucket is padded to equal
shards, one for each rank of the data-parallel group. A *world tensor* is one whole buffer without the padding
of buckets, as `get_parameter_state_dp_zero` builds it. Numbers that are not finite are signs of diverging
training or of a failing device.

Shards go to the rank that writes them point to point over gloo, in a group that is made for the dump; no
process group of the framework is used. The writer receives each buffer as a whole (`gather`), unless the
holders write their shards into its files (`in_place`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch

from adaptor.checkpoint import step_record
from adaptor.devices.device import HOST, Device
from adaptor.errors import CheckpointError
from adaptor.replica import optimizer_state
from adaptor.replica.mirror import Mirror, ParamPiece

KEYS = ("param", "exp_avg", "exp_avg_sq")
# Elements per message: progress is seen, and a dump abandoned, at least every 32 MiB.
_MESSAGE = 1 << 23
_MOST_NAMED = 3  # of the shards that are not finite, in a line


@dataclass(frozen=True)
class Bucket:
    """A bucket of a buffer; all in elements.

    Attributes:
        offset: its start in the buffer
        world: its start in the world tensor
        unpadded: its size in the world tensor
        shard: the size of each of its shards, the last of which may be padding, in part or in whole
    """

    index: int
    offset: int
    world: int
    unpadded: int
    shard: int

    def extent(self, index: int) -> tuple[int, int]:
        """Return start and end of shard `index` in the world tensor; an empty range for padding alone."""
        start = min(index * self.shard, self.unpadded)
        return self.world + start, self.world + min(start + self.shard, self.unpadded)


def is_stub(optimizer: Any) -> bool:
    """Return True for an optimizer without params on the rank, which Megatron-core has from 0.11 on."""
    return getattr(optimizer, "is_stub_optimizer", False)


def is_sharded(optimizer: Any) -> bool:
    """Return True if an optimizer of the chain is a distributed optimizer with params on the rank."""
    return hasattr(optimizer, "buffers") and not is_stub(optimizer)


def shard_of(optimizer: Any) -> tuple[int, int]:
    """Return the index of the shard of an optimizer on the rank, and the number of shards; else (0, 1)."""
    if not is_sharded(optimizer):
        return 0, 1
    group = optimizer.data_parallel_group
    return group.rank(), group.size()


@dataclass(frozen=True)
class HeldShard:
    """A shard of this rank: its `index` in its group (`Share.index`), its torch optimizer with params and
    state.

    `is_copy`: whether it is a mirror's copy of another rank's shard.
    """

    index: int
    is_copy: bool
    optimizer: torch.optim.Optimizer


def held_shards(optimizer: Any, mirrors: Sequence[Mirror | None] = ()) -> list[HeldShard]:
    """Return the shards that this rank holds, its own and its copies (`mirrors`).

    The shards of a group are the shards of the first optimizer of the chain, then of the second, ...
    """
    shards_held, offset = [], 0
    for number, chained_optimizer in enumerate(step_record.chain(optimizer)):
        index, count = shard_of(chained_optimizer)
        if getattr(chained_optimizer, "optimizer", None) is not None:
            shards_held.append(HeldShard(offset + index, False, chained_optimizer.optimizer))
        mirror = mirrors[number] if number < len(mirrors) else None
        if mirror is not None:
            shards_held.append(HeldShard(offset + mirror.index, True, mirror.optimizer))
        offset += count
    return shards_held


def buckets_of(optimizer: Any, buffer: Any) -> list[Bucket]:
    """Return the buckets of one buffer of a distributed optimizer. Raises CheckpointError."""
    count = shard_of(optimizer)[1]
    buckets, world = [], 0
    for index, bucket in enumerate(buffer.buckets):
        numel = bucket.grad_data.numel()
        if numel % count:
            raise CheckpointError(f"bucket {index} has {numel} elements, which {count} shards cannot share")
        buckets.append(Bucket(index, bucket.offset, world, bucket.numel_unpadded, numel // count))
        world += bucket.numel_unpadded
    return buckets


def numel_of(buffer: Any) -> int:
    """Return the elements of a buffer without the padding of its buckets."""
    if hasattr(buffer, "numel_unpadded"):
        return int(buffer.numel_unpadded)
    return sum(bucket.numel_unpadded for bucket in buffer.buckets)


# A shard's part of a bucket: for each param start and end in the shard, and its tensors by key.
Part = Iterator[tuple[int, int, Mapping[str, torch.Tensor]]]


def part_of(optimizer: Any, number: int, bucket: int) -> Part:
    """Return the rank's part of bucket `bucket` of buffer `number` of a distributed optimizer."""
    (ranges,) = optimizer.gbuf_ranges[number].values()
    for param, param_range in ranges[bucket]["param_map"].items():
        local = param_range["gbuf_local"]
        yield local.start, local.end, _tensors(optimizer, param)


def _tensors(optimizer: Any, param: Any) -> Mapping[str, torch.Tensor]:
    """Return the rank's part of a model's param and of its state, by key."""
    storage = optimizer_state.storage_of(optimizer)
    if storage is not None:
        group, order = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        return {"param": storage.param(main), **storage.state(main)}
    if hasattr(optimizer, "_get_main_param_and_optimizer_states"):
        named: Mapping[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(param)
        return named
    # Up to Megatron-core 0.10 this is part of a longer function.
    group, order = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    return {"param": main, **optimizer.optimizer.state[main]}


def places(optimizer: Any) -> list[ParamPiece]:
    """Return the place of each param of the inner optimizer, in the order of its param groups."""
    pieces_by_order = {}
    for number, buffers in enumerate(optimizer.gbuf_ranges):
        (ranges,) = buffers.values()
        for index, bucket in enumerate(ranges):
            for param, param_range in bucket["param_map"].items():
                local = param_range["gbuf_local"]
                order = tuple(optimizer.model_param_group_index_map[param])
                pieces_by_order[order] = ParamPiece(number, index, local.start, local.end)
    return [pieces_by_order[order] for order in sorted(pieces_by_order)]


def tensor_of(tensors: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    """Return the tensor of a part under `key`. Raises CheckpointError before the first update."""
    if key not in tensors:
        raise CheckpointError(f"the optimizer has no {key} yet: no update has been made")
    return tensors[key]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is nan or infinite; reads the tensor once and allocates nothing."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(math.isfinite(bound) for bound in torch.stack(torch.aminmax(tensor.detach())).tolist())


def all_finite(value: Any) -> bool:
    """Return True if all tensors of a nested state are finite."""
    return all(map(is_finite, _nested_tensors(value)))


def _nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nested_tensors(item)


def bad_shards(optimizer: Any, state: Mapping[Any, Any]) -> dict[int, list[str]]:
    """Return the non-finite shards of a distributed optimizer's gathered state, with the bad keys of each.

    Each world tensor is read once; only a non-finite tensor is examined shard by shard.
    """
    keys_by_shard: dict[int, list[str]] = {}
    for number, buffer in enumerate(optimizer.buffers):
        (world,) = state[number].values()
        for key in KEYS:
            if is_finite(world[key]):
                continue
            for bucket in buckets_of(optimizer, buffer):
                for index in range(shard_of(optimizer)[1]):
                    keys = keys_by_shard.setdefault(index, [])
                    if key not in keys and not is_finite(world[key][slice(*bucket.extent(index))]):
                        keys.append(key)
    return {index: keys for index, keys in sorted(keys_by_shard.items()) if keys}


def not_finite_words(things: list[str]) -> str:
    """Return a sentence about bad things, some by name: "a, b, c and 4 more are not finite"; "" for none."""
    if not things:
        return ""
    omitted = len(things) - _MOST_NAMED
    shown = ", ".join(things[:_MOST_NAMED]) + (f" and {omitted} more" if omitted > 0 else "")
    return f"{shown} {'is' if len(things) == 1 else 'are'} not finite"


class DumpCancelled(CheckpointError):
    """The dump was abandoned by its controller."""


class Observer(Protocol):
    """Compares the bytes that a rank writes in place with the state that it gives."""

    def see(self, region: Any, begin: int, data: memoryview) -> None:
        """Note the bytes of elements of a region (`file_parts.Region`) from `begin` on."""

    def require_written(self) -> None:
        """Compare when all is written. Raises CheckpointError."""


@dataclass(frozen=True)
class Exchange:
    """An attempt to write a checkpoint, seen from one rank of the process group for the attempt.

    Attributes:
        group: `torch.distributed.ProcessGroup` of CPU tensors; None if the rank has everything
        sources: per optimizer of the chain, per shard: the rank of the chosen holder (one entry without
            shards)
        mirrors: per optimizer of the chain: the copy of another shard, or None; or empty
        progress: is called with the number of sent, received or written bytes
        cancelled: is called between tensors
        on_not_finite: is called before any file is complete, if some shards are not finite: with a
            description and the givers (ranks of `group`); an exception ends the dump
        folder: the temporary folder as the rank sees it, where holders may write in place; None: the shards
            are gathered
        observer: sees the bytes that this rank writes in place
    """

    group: torch.distributed.ProcessGroup | None
    rank: int
    sources: Sequence[Sequence[int]]
    mirrors: Sequence[Mirror | None] = ()
    tag: int = 0
    progress: Callable[[int], None] = field(default=lambda count: None)
    cancelled: Callable[[], bool] = field(default=lambda: False)
    device: Device = HOST
    on_not_finite: Callable[[str, Sequence[int]], None] = field(default=lambda subject, ranks: None)
    folder: Path | None = None
    observer: Observer | None = None

    def check(self) -> None:
        """Raise DumpCancelled if the dump was abandoned."""
        if self.cancelled():
            raise DumpCancelled("the dump was abandoned")

    def advanced(self, count: int) -> None:
        """Report `count` bytes of progress; raise DumpCancelled like `check`."""
        self.progress(count)
        self.check()


def send_shards(optimizers: Sequence[Any], writer: int, exchange: Exchange) -> None:
    """Send the shards chosen for the rank; return when the rank `writer` has all.

    Raises CheckpointError (no optimizer state yet), DumpCancelled, RuntimeError (a peer is gone).
    """
    chosen = False
    for position, (optimizer, sources) in enumerate(zip(optimizers, exchange.sources, strict=True)):
        if not is_sharded(optimizer) or exchange.rank not in sources:
            continue
        own_readers = own_shards(optimizer, position, exchange)
        chosen = True
        for number, buffer in enumerate(optimizer.buffers):
            for bucket in buckets_of(optimizer, buffer):
                parts = []
                for index, shard in own_readers.items():
                    start, end = bucket.extent(index)
                    part = {key: torch.zeros(end - start, dtype=torch.float32, device="cpu") for key in KEYS}
                    _copy_own(shard(number, bucket.index), part, exchange)
                    parts.append(part)
                for key in KEYS:  # in the order of `_receive`
                    for row in zip_longest(*(_messages(part[key]) for part in parts)):
                        for piece in filter(_is_there, row):
                            group_of(exchange).send([piece], writer, exchange.tag).wait()
                            exchange.advanced(4 * piece.numel())
    if chosen:
        # A message counts as sent while still in a socket: a group that is dropped now would lose the
        # message.
        group_of(exchange).recv([torch.empty(1)], writer, exchange.tag).wait()


def acknowledge(optimizers: Sequence[Any], position: int, exchange: Exchange) -> None:
    """Acknowledge the shards of the senders whose last optimizer is at `position`; others need not wait."""
    last = {
        source: number
        for number, (optimizer, sources) in enumerate(zip(optimizers, exchange.sources, strict=True))
        if is_sharded(optimizer)
        for source in sources
    }
    for source in sorted(last.keys() - {exchange.rank}):
        if last[source] == position:
            group_of(exchange).send([torch.zeros(1)], source, exchange.tag).wait()


def gather(optimizer: Any, position: int, exchange: Exchange) -> dict[Any, Any]:
    """Gather the whole state of the distributed optimizer at `position` of the chain.

    Own shards are copied, the others are received in place. Returns the same as the optimizer's
    `get_parameter_state_dp_zero`: per buffer one float32 tensor on the CPU for each of `KEYS`, of
    `numel_of(buffer)` elements. Raises CheckpointError, DumpCancelled, RuntimeError (a peer is gone).
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    own_readers = own_shards(optimizer, position, exchange)
    for number, buffer in enumerate(optimizer.buffers):
        numel = numel_of(buffer)
        world = {key: torch.zeros((numel,), dtype=torch.float32, device="cpu") for key in KEYS}
        for bucket in buckets_of(optimizer, buffer):
            for index, shard in own_readers.items():
                start, end = bucket.extent(index)
                part = {key: world[key][start:end] for key in KEYS}
                _copy_own(shard(number, bucket.index), part, exchange)
            for key in KEYS:
                _receive(world[key], bucket, exchange.sources[position], exchange)
        dtypes = (buffer.param_dtype, buffer.grad_dtype)
        state[number] = {dtypes: {**world, "numel_unpadded": numel}}
    return state


def own_shards(optimizer: Any, position: int, exchange: Exchange) -> dict[int, Callable[[int, int], Part]]:
    """Return readers of the shards chosen for the rank, its own or its copy, by index.

    A reader is called with the numbers of a buffer and of a bucket. Raises CheckpointError if the sources do
    not fit the shards of the rank, which would leave a hole.
    """
    sources = exchange.sources[position]
    index, count = shard_of(optimizer)
    readers_by_shard = {index: lambda buffer, bucket: part_of(optimizer, buffer, bucket)}
    mirror = exchange.mirrors[position] if exchange.mirrors else None
    if mirror is not None:
        readers_by_shard[mirror.index] = mirror.shard
    requested_shards = [shard for shard, source in enumerate(sources) if source == exchange.rank]
    if len(sources) != count or not readers_by_shard.keys() >= set(requested_shards):
        raise CheckpointError(
            f"rank {exchange.rank} of the dump holds shard {' and '.join(map(str, readers_by_shard))} of "
            f"{count}; "
            f"sources: {list(sources)}"
        )
    return {shard: readers_by_shard[shard] for shard in requested_shards}


def _receive(world: torch.Tensor, bucket: Bucket, sources: Sequence[int], exchange: Exchange) -> None:
    """Receive a bucket's shards, one message of each in turn, so that no sender waits for the others."""
    other_shards = [
        [(source, piece) for piece in _messages(world[slice(*bucket.extent(index))])]
        for index, source in enumerate(sources)
        if source != exchange.rank
    ]
    for row in zip_longest(*other_shards):
        works = [
            (group_of(exchange).recv([piece], source, exchange.tag), piece)
            for source, piece in filter(None, row)
        ]
        for work, piece in works:
            work.wait()
            exchange.advanced(4 * piece.numel())


def _copy_own(part: Part, targets: Mapping[str, torch.Tensor], exchange: Exchange) -> None:
    """Copy a shard's part of a bucket into `targets`, which begin at the begin of the shard."""
    for start, end, tensors in part:
        exchange.check()
        for key, target in targets.items():
            exchange.device.copy(target[start:end], tensor_of(tensors, key))


def _is_there(piece: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return piece is not None


def _messages(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, tensor.numel(), _MESSAGE):
        yield tensor[start : start + _MESSAGE]


def group_of(exchange: Exchange) -> Any:
    """Return the process group of the dump. Raises CheckpointError without a group."""
    if exchange.group is None:
        raise CheckpointError("a shard lies on another rank, but the dump has no process group")
    return exchange.group

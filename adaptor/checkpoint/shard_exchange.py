"""Moves shards of Megatron's distributed optimizer to the rank that writes them: point to point over gloo.

The group is made for the dump; no process group of the framework is used. The writer receives each buffer as
a whole (`gather`), unless the holders write their shards into its files (`in_place.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch

from adaptor.checkpoint import shards
from adaptor.devices.device import HOST, Device
from adaptor.errors import CheckpointError
from adaptor.replica.mirror import Mirror

# Elements per message: progress is seen, and a dump abandoned, at least every 32 MiB.
_MESSAGE = 1 << 23


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
        rank: the number of the rank in the group
        sources: per optimizer of the chain, per shard: the rank of the chosen holder (one entry without
            shards)
        mirrors: per optimizer of the chain: the copy of another shard, or None; or empty
        tag: of all messages
        progress: is called with the number of sent, received or written bytes
        cancelled: is called between tensors
        device: of the framework's tensors
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


def send(optimizers: Sequence[Any], writer: int, exchange: Exchange) -> None:
    """Send the shards chosen for the rank; return when the rank `writer` has all.

    `optimizers` are the optimizers of the chain.

    Raises:
        CheckpointError: no optimizer state exists yet; DumpCancelled.
        RuntimeError: from the process group, when a peer is gone.
    """
    chosen = False
    for position, (optimizer, sources) in enumerate(zip(optimizers, exchange.sources, strict=True)):
        if not shards.is_sharded(optimizer) or exchange.rank not in sources:
            continue
        own_readers = own_shards(optimizer, position, exchange)
        chosen = True
        for number, buffer in enumerate(optimizer.buffers):
            for bucket in shards.buckets_of(optimizer, buffer):
                parts = []
                for index, shard in own_readers.items():
                    start, end = bucket.extent(index)
                    part = {
                        key: torch.zeros(end - start, dtype=torch.float32, device="cpu")
                        for key in shards.KEYS
                    }
                    _copy_own(shard(number, bucket.index), part, exchange)
                    parts.append(part)
                for key in shards.KEYS:  # in the order of `_receive`
                    for row in zip_longest(*(_messages(part[key]) for part in parts)):
                        for piece in filter(_is_there, row):
                            group_of(exchange).send([piece], writer, exchange.tag).wait()
                            exchange.advanced(4 * piece.numel())
    if chosen:
        # A message counts as sent while still in a socket: a group that is dropped now would lose the
        # message.
        group_of(exchange).recv([torch.empty(1)], writer, exchange.tag).wait()


def acknowledge(optimizers: Sequence[Any], position: int, exchange: Exchange) -> None:
    """Acknowledge the shards of all senders whose shards have arrived completely.

    The senders do not wait for the shards of others, of which an optimizer for experts may have many.

    Args:
        optimizers: of the chain.
        position: of the optimizer whose shards have arrived last.
        exchange: the senders of all shards.
    """
    last = {
        source: number
        for number, (optimizer, sources) in enumerate(zip(optimizers, exchange.sources, strict=True))
        if shards.is_sharded(optimizer)
        for source in sources
    }
    for source in sorted(last.keys() - {exchange.rank}):
        if last[source] == position:
            group_of(exchange).send([torch.zeros(1)], source, exchange.tag).wait()


def gather(optimizer: Any, position: int, exchange: Exchange) -> dict[Any, Any]:
    """Gather the whole state of the distributed optimizer at `position` of the chain.

    Own shards are copied, the others are received in place from their sources.

    Returns:
        The same as the optimizer's `get_parameter_state_dp_zero`: per buffer one float32 tensor on the CPU
        for each of `shards.KEYS`, of `shards.numel_of(buffer)` elements.

    Raises:
        CheckpointError: a shard is missing, or the dump was abandoned (DumpCancelled).
        RuntimeError: from the process group, when a peer is gone.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    own_readers = own_shards(optimizer, position, exchange)
    for number, buffer in enumerate(optimizer.buffers):
        numel = shards.numel_of(buffer)
        world = {key: torch.zeros((numel,), dtype=torch.float32, device="cpu") for key in shards.KEYS}
        for bucket in shards.buckets_of(optimizer, buffer):
            for index, shard in own_readers.items():
                start, end = bucket.extent(index)
                part = {key: world[key][start:end] for key in shards.KEYS}
                _copy_own(shard(number, bucket.index), part, exchange)
            for key in shards.KEYS:
                _receive(world[key], bucket, exchange.sources[position], exchange)
        dtypes = (buffer.param_dtype, buffer.grad_dtype)
        state[number] = {dtypes: {**world, "numel_unpadded": numel}}
    return state


def own_shards(
    optimizer: Any, position: int, exchange: Exchange
) -> dict[int, Callable[[int, int], shards.Part]]:
    """Return readers of the shards chosen for the rank: its own, or its copy of another.

    A reader is called with the numbers of a buffer and of a bucket.

    Args:
        optimizer: a distributed optimizer.
        position: its place in the chain.
        exchange: the providers of all shards.

    Raises:
        CheckpointError: the sources do not fit the shards of the rank, which would leave a hole.
    """
    sources = exchange.sources[position]
    index, count = shards.shard_of(optimizer)
    readers_by_shard = {index: lambda buffer, bucket: shards.part_of(optimizer, buffer, bucket)}
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


def _receive(world: torch.Tensor, bucket: shards.Bucket, sources: Sequence[int], exchange: Exchange) -> None:
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


def _copy_own(part: shards.Part, targets: Mapping[str, torch.Tensor], exchange: Exchange) -> None:
    """Copy a shard's part of a bucket into `targets`, which begin at the begin of the shard."""
    for start, end, tensors in part:
        exchange.check()
        for key, target in targets.items():
            exchange.device.copy(target[start:end], shards.tensor_of(tensors, key))


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

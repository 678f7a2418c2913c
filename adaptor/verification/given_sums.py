"""The agreed state of last words: each holder takes the sums of the shards that it gives, from its memory.

The holder sends the sums to the writer before any shard. What is written is compared with them: in place by
the holder itself, block by block, otherwise by the writer, with the gathered state. The writer leaves the
sums in a part, `.state.GROUP`, and the agent that publishes joins the parts to the field of the manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from adaptor.checkpoint import in_place_holder, shard_exchange, shards
from adaptor.checkpoint.file_parts import Region
from adaptor.checkpoint.shard_exchange import Exchange
from adaptor.checkpoint.training_state import TrainingState
from adaptor.errors import CheckpointError
from adaptor.verification import state_sums
from adaptor.verification.agreed_parts import AgreedPart
from adaptor.verification.agreed_state import MASK, AgreedGroup, AgreedShard, hexadecimal
from adaptor.verification.state_sums import Places, Sums


class _Message(msgspec.Struct):
    """The sums of the shards of a holder, by their number in the group; `problem`: why there are none."""

    shards: dict[int, dict[str, str]] = {}
    problem: str = ""


class GivenSums:
    """The sums of the shards that this rank gives in a dump, and of what is written of them in place.

    Args:
        state: of the rank.
        exchange: names the shards.
        rank: of the job.
    """

    def __init__(self, state: TrainingState, exchange: Exchange, rank: int) -> None:
        self._state = state
        self._exchange = exchange
        self._rank = rank
        self._given: dict[int, Sums] = {}  # by position
        self._elements: dict[int, int] = {}
        self._written: dict[tuple[int, str], int] = defaultdict(int)
        self._seen: dict[tuple[int, str], int] = defaultdict(int)
        self._places: dict[tuple[int, int], Places] = {}
        self._message = _Message()
        try:
            with torch.no_grad():
                self._message = _Message(self._take())
        except Exception as error:  # the writer waits for the message; an abandoned dump ends behind it
            self._message = _Message(problem=f"{type(error).__name__}: {error}")

    def _take(self) -> dict[int, dict[str, str]]:
        has_weights = state_sums.is_plain(self._state)
        names, taken, offset = state_sums.names_of(self._state), dict[int, dict[str, str]](), 0
        for position, (optimizer, live, _) in enumerate(self._state.chained):
            count = shards.shard_of(optimizer)[1]
            if shards.is_sharded(optimizer):
                self._given[position], self._elements[position] = {}, 0
                readers: Mapping[int, Any] = {}
                if self._exchange.rank in self._exchange.sources[position]:
                    readers = shard_exchange.own_shards(optimizer, position, self._exchange)
                for index, reader in readers.items():
                    weight = state_sums.rounding_of(optimizer) if has_weights else None
                    read = self._with_progress(reader)
                    sums = state_sums.sums_of_shard(optimizer, index, read, names, weight)
                    taken[offset + index] = hexadecimal(sums)
                    for key, value in sums.items():
                        self._given[position][key] = self._given[position].get(key, 0) + value & MASK
                    self._exchange.check()
                    for number, buffer in enumerate(optimizer.buffers):
                        self._places[position, number] = state_sums.places_of(optimizer, number, names)
                        for bucket in shards.buckets_of(optimizer, buffer):
                            begin, end = bucket.extent(index)
                            self._elements[position] += end - begin
            elif not shards.is_stub(optimizer) and self._exchange.rank in self._exchange.sources[position]:
                sums = state_sums.sums_of_whole(optimizer, live, names, is_rounded=True)
                taken[offset] = hexadecimal(sums)
            else:
                taken[offset] = {}
            offset += count
        return taken

    def _with_progress(self, reader: Any) -> Callable[[int, int], shards.Part]:
        """Return a reader that shows progress: a dump in which nothing moves is given to other ranks."""

        def read(number: int, bucket: int) -> shards.Part:
            for piece in reader(number, bucket):
                self._exchange.advanced(1)
                yield piece

        return read

    def send(self, writer: int) -> None:
        """Send the sums to rank `writer` of the exchange."""
        in_place_holder.send(self._message, writer, self._exchange)

    def agreed(self, ranks: Sequence[int]) -> AgreedGroup | None:
        """Return the sums of all holders, on the writer; None if a holder has none.

        Args:
            ranks: of the job, by their number in the exchange.
        """
        others = sorted({rank for sources in self._exchange.sources for rank in sources})
        messages = {self._exchange.rank: self._message}
        for rank in others:
            if rank != self._exchange.rank:
                messages[rank] = in_place_holder.receive(_Message, rank, self._exchange)
        if any(message.problem for message in messages.values()):
            return None
        holders = [rank for sources in self._exchange.sources for rank in sources]
        agreed = [
            AgreedShard(messages[rank].shards.get(number, {}), (ranks[rank],))
            for number, rank in enumerate(holders)
        ]
        updates = state_sums.updates_of(self._state.optimizer)
        return AgreedGroup(state_sums.layout_of(self._state), agreed, updates)

    def see(self, region: Region, begin: int, data: memoryview) -> None:
        """Note bytes that this rank writes in place.

        Args:
            region: of the file.
            begin: the first element, in its world tensor.
            data: the bytes.
        """
        place = region.position, region.number
        if region.dtype != "float32" or place not in self._places:
            return
        elements = torch.frombuffer(data, dtype=torch.float32)
        key = region.position, region.key
        self._written[key] += state_sums.sum_between(elements, begin, self._places[place])
        self._seen[key] += elements.numel()

    def require_written(self) -> None:
        """Compare what this rank has written in place with what it has given.

        State that is written in another form, or in another order, is not compared.

        Raises:
            CheckpointError: it differs.
        """
        for (position, key), total in self._written.items():
            given = self._given[position].get(key)
            is_whole = self._seen[position, key] == self._elements[position]
            if is_whole and not self._message.problem and given != total & MASK:
                raise _differs(key, self._state.folder, self._rank)


def _differs(key: str, group: str, rank: int) -> CheckpointError:
    return CheckpointError(
        f"rank {rank}: {key} of {group} was to be written with other bits than those in the memory of its"
        " holders (stale, damaged or misplaced)"
    )


def require_gathered(
    state: TrainingState, agreed: AgreedGroup | None, gathered: Sequence[Any], exchange: Exchange
) -> None:
    """Compare the gathered state with the sums that the holders have sent.

    Raises:
        CheckpointError: it differs.
    """
    if agreed is None:
        return
    names, offset = state_sums.names_of(state), 0
    for world, (optimizer, _, _) in zip(gathered, state.chained, strict=True):
        count = shards.shard_of(optimizer)[1]
        if world is not None:
            for key, found in state_sums.sums_of_world(optimizer, world, names).items():
                if found != agreed.total(key, offset, count):
                    raise _differs(key, state.folder, exchange.rank)
        offset += count


def part_of(state: TrainingState, agreed: AgreedGroup | None) -> dict[str, bytes]:
    """Return the part of this group, by its name: none without sums."""
    if agreed is None:
        return {}
    part = AgreedPart(state.folder, agreed)
    return {part.name: msgspec.json.encode(part)}

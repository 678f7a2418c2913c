"""The agreed state of last words: sums of the shards, taken from memory. Drills (TTP_DRILL_EVERY).

The holder sends the sums to the writer before any shard. The written bytes are compared with the sums: in
place by the holder itself, block by block, otherwise by the writer, with the gathered state. The writer
leaves the sums in a part, `.state.GROUP`, and the publishing agent joins the parts to the field of the
manifest.

A drill in the running job (`hold`): could the state be saved now without some rank, bit for bit? Between two
steps a rank counts as lost. The controller's own function plans last words without the rank, and the shards
of the planned holders are compared, by their sums, with the shards in the memory of the lost rank. The sums
are taken by the functions that read shards for last words, so a gathered state would prove no more about bits
(docs/drills.md): in a folder that all nodes see no shard travels at all. The connections and the disk of a
dump are not tried.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from adaptor.checkpoint import in_place_holder, shards
from adaptor.checkpoint.file_parts import Region
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.training_state import TrainingState
from adaptor.controller.plan import NoPlan, groups_of, plan
from adaptor.errors import CheckpointError
from adaptor.protocol.messages import BoardRecord, Drilled, Share
from adaptor.replica import group
from adaptor.verification import state_sums
from adaptor.verification.agreed_state import (
    MASK,
    AgreedGroup,
    AgreedPart,
    AgreedShard,
    HeldState,
    hexadecimal,
)
from adaptor.verification.state_sums import Places, Sums


class _Message(msgspec.Struct):
    """The sums of the shards of a holder, by the number of the shard in the group; `problem`: why no sums
    could be taken.
    """

    shards: dict[int, dict[str, str]] = {}
    problem: str = ""


class GivenSums:
    """The sums of the shards given by a rank in a dump, and of the bytes written in place by the rank.

    Args:
        state: of the rank.
        exchange: names the shards.
        rank: of the job.
    """

    def __init__(self, state: TrainingState, exchange: Exchange, rank: int) -> None:
        self._state = state
        self._exchange = exchange
        self._rank = rank
        self._totals: dict[int, Sums] = {}  # over the shards of this rank, by position in the chain
        self._elements: dict[int, int] = {}  # of the shards of this rank, by position in the chain
        self._places: dict[tuple[int, int], Places] = {}  # by position in the chain, and buffer
        self._written: dict[tuple[int, str], int] = defaultdict(int)  # sums, by position and key
        self._written_elements: dict[tuple[int, str], int] = defaultdict(int)
        self._message = _Message()
        try:
            with torch.no_grad():
                self._message = _Message(self._take())
        except Exception as error:  # the writer waits for the message; an abandoned dump ends after it
            self._message = _Message(problem=f"{type(error).__name__}: {error}")

    def _take(self) -> dict[int, dict[str, str]]:
        """Return the sums of the shards of this rank, by the number of the shard in the group."""
        names, taken, offset = state_sums.names_of(self._state), dict[int, dict[str, str]](), 0
        for position, (optimizer, live, _) in enumerate(self._state.chained):
            by_index: dict[int, Sums] = {}
            if self._exchange.rank in self._exchange.sources[position]:
                if shards.is_sharded(optimizer):
                    by_index = self._take_shards(position, optimizer, names)
                elif not shards.is_stub(optimizer):
                    by_index[0] = state_sums.sums_of_whole(optimizer, live, names, is_rounded=True)
            taken |= {offset + index: hexadecimal(sums) for index, sums in by_index.items()}
            offset += len(self._exchange.sources[position])
        return taken

    def _take_shards(self, position: int, optimizer: Any, names: Mapping[int, str]) -> dict[int, Sums]:
        weight = state_sums.rounding_of(optimizer) if state_sums.is_plain(self._state) else None
        by_index: dict[int, Sums] = {}
        for index, reader in shards.own_shards(optimizer, position, self._exchange).items():
            read = self._with_progress(reader)
            by_index[index] = state_sums.sums_of_shard(optimizer, index, read, names, weight)
            self._exchange.check()
        totals = self._totals.setdefault(position, {})
        for sums in by_index.values():
            for key, value in sums.items():
                totals[key] = totals.get(key, 0) + value & MASK
        self._elements[position] = 0
        for number, buffer in enumerate(optimizer.buffers):
            self._places[position, number] = state_sums.places_of(optimizer, number, names)
            for bucket in shards.buckets_of(optimizer, buffer):
                extents = [bucket.extent(index) for index in by_index]
                self._elements[position] += sum(end - begin for begin, end in extents)
        return by_index

    def _with_progress(self, reader: Any) -> Callable[[int, int], shards.Part]:
        """Return a reader that reports progress: a dump without progress is given to other ranks."""

        def read(number: int, bucket: int) -> shards.Part:
            for piece in reader(number, bucket):
                self._exchange.advanced(1)
                yield piece

        return read

    def send(self, writer: int) -> None:
        """Send the sums to rank `writer` of the exchange."""
        in_place_holder.send(self._message, writer, self._exchange)

    def agreed(self, ranks: Sequence[int], random: Sequence[Mapping[str, Any]] = ()) -> AgreedGroup | None:
        """Return the sums of all holders, on the writer; None if a holder has no sums.

        Args:
            ranks: of the job, by their number in the exchange.
            random: the random states of the step, as they are saved.
        """
        holders = [rank for sources in self._exchange.sources for rank in sources]
        messages = {self._exchange.rank: self._message}
        for rank in sorted({*holders} - {self._exchange.rank}):
            messages[rank] = in_place_holder.receive(_Message, rank, self._exchange)
        if any(message.problem for message in messages.values()):
            return None
        agreed = [
            AgreedShard(messages[rank].shards.get(number, {}), (ranks[rank],))
            for number, rank in enumerate(holders)
        ]
        updates = state_sums.updates_of(self._state.optimizer)
        keys = state_sums.random_keys(random)
        return AgreedGroup(state_sums.layout_of(self._state), agreed, updates, keys)

    def see(self, region: Region, begin: int, data: memoryview) -> None:
        """Note bytes that this rank writes in place.

        Args:
            region: of the file.
            begin: the first element, in the world tensor.
            data: the bytes.
        """
        place = region.position, region.number
        if region.dtype != "float32" or place not in self._places:
            return
        elements = torch.frombuffer(data, dtype=torch.float32)
        key = region.position, region.key
        self._written[key] += state_sums.sum_between(elements, begin, self._places[place])
        self._written_elements[key] += elements.numel()

    def require_written(self) -> None:
        """Compare the bytes written in place by this rank with the sums of its shards.

        State in another form, or in another order, is not compared.

        Raises:
            CheckpointError: the sums differ.
        """
        if self._message.problem:
            return
        for (position, key), total in self._written.items():
            is_whole = self._written_elements[position, key] == self._elements[position]
            if is_whole and self._totals[position].get(key) != total & MASK:
                raise _differs(key, self._state.folder, self._rank)


def _differs(key: str, group: str, rank: int) -> CheckpointError:
    return CheckpointError(
        f"rank {rank}: {key} of {group} was to be written with other bits than those in the memory of its"
        " holders (stale, damaged or misplaced)"
    )


def require_gathered(
    state: TrainingState, agreed: AgreedGroup | None, gathered: Sequence[Any], exchange: Exchange
) -> None:
    """Compare the gathered state with the sums of the holders.

    Raises:
        CheckpointError: the sums differ.
    """
    if agreed is None:
        return
    names, offset = state_sums.names_of(state), 0
    for world, sources, (optimizer, _, _) in zip(gathered, exchange.sources, state.chained, strict=True):
        count = len(sources)
        if world is not None:
            for key, total in state_sums.sums_of_world(optimizer, world, names).items():
                if total != agreed.total(key, offset, count):
                    raise _differs(key, state.folder, exchange.rank)
        offset += count


def part_of(state: TrainingState, agreed: AgreedGroup | None) -> dict[str, bytes]:
    """Return the part of the group, by name; empty without sums."""
    if agreed is None:
        return {}
    part = AgreedPart(state.folder, agreed)
    return {part.name: msgspec.json.encode(part)}


def hold(step: int, trainee: Any, record: BoardRecord, everyone: dist.ProcessGroup) -> Drilled | None:
    """Hold a drill after `step`; return the result on rank 0, or None after a step without an update.

    Collective.

    Args:
        step: the newest step, finished on all ranks.
        trainee: of the rank (`MegatronTrainee`).
        record: the board of the rank.
        everyone: all ranks.

    Raises:
        RuntimeError: a rank is gone.
    """
    own_state = state_sums.held_by(trainee.state, trainee.mirrors, trainee.shares)
    gathered = group.gather_all((record, trainee.shares, own_state), everyone)
    if dist.get_rank(everyone):
        return None
    if any(board.finished != step for board, _, _ in gathered):
        return None
    lost = random.Random(step).randrange(len(gathered))
    boards = {rank: board for rank, (board, _, _) in enumerate(gathered)}
    shares = {rank: rank_shares for rank, (_, rank_shares, _) in enumerate(gathered)}
    states = [state for _, _, state in gathered]
    try:
        reason = problem(step, lost, boards, shares, states)
    except Exception as error:  # training goes on without the result of a drill
        reason = f"the drill has failed: {type(error).__name__}: {error}"
    return Drilled(0, step, lost, reason)


def problem(
    step: int,
    lost: int,
    boards: Mapping[int, BoardRecord],
    shares: Mapping[int, Sequence[Share]],
    states: Sequence[HeldState],
) -> str:
    """Return why `step` could not be saved bit for bit without rank `lost`; "": no problem.

    Args:
        step: the newest step, finished on all ranks.
        lost: the rank that counts as lost.
        boards, shares, states: of all ranks, by rank.
    """
    for state in states:
        if state.problem:
            return state.problem
    survivors = {rank: board for rank, board in boards.items() if rank != lost}
    chosen = plan(groups_of(shares), survivors, only=step)
    if isinstance(chosen, NoPlan):
        return chosen.reason
    sums = {
        (rank, name, shard.index): shard.sums
        for rank, state in enumerate(states)
        for shard in state.shards
        for name in shard.groups
    }
    for order in chosen.groups:
        for index, holder in enumerate(order.holders):
            saved, lost_sums = sums[holder, order.group, index], sums.get((lost, order.group, index), {})
            for key in sorted(saved.keys() & lost_sums.keys()):
                if saved[key] != lost_sums[key]:
                    shard_name = f"shard {index} of {order.group}"
                    return f"ranks {holder} and {lost} hold different bits of {key} of {shard_name}"
    return ""

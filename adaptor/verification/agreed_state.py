"""The sums of the state of a step on which the holders of each shard agreed: a field of the manifest.

The sums are taken from the memory of the holders, never from a file (`state_sums`). A job that loads the
checkpoint compares the sums of the loaded state. The sum of a group does not depend on the number of shards,
so a job with another data-parallel size compares the same sums.

Last words have the sums in parts (`AgreedPart`), and the agent joins the parts to the field of the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from adaptor.errors import CheckpointError
from adaptor.protocol.naming import FileEntry

MASK = (1 << 64) - 1
# Keys of sums: the model's weights, and the main params of the optimizer. All other keys are its moments.
WEIGHT, PARAM = "weight", "param"
_MOST_DIFFERENCES = 3  # in a line
_MOST_RANKS = 8  # in a line
# The words for a checkpoint without an agreed state.
NONE = "no agreed sums: saved without TTP_VERIFY_SAVES, so the saved state itself cannot be checked"


class AgreedShard(msgspec.Struct, frozen=True):
    """A shard of a group: the sum of each key in hexadecimal, and the holders that agreed, by rank."""

    sums: dict[str, str]
    holders: tuple[int, ...]


class AgreedGroup(msgspec.Struct, frozen=True):
    """The state of the ranks with one part of the model.

    Attributes:
        layout: a hash of the names, shapes and dtypes of the params; another layout cannot be compared
        shards: in the order of the controller's shards
        updates: the count of updates of the optimizer; None: the optimizer counts none
        random: the sums of the random states of its ranks (`state_sums.random_key`); empty: not saved
    """

    layout: str
    shards: list[AgreedShard]
    updates: int | None = None
    random: tuple[str, ...] = ()

    def total(self, key: str, first: int = 0, count: int | None = None) -> int | None:
        """Return the sum of a key over `count` shards from `first` on; None if no shard has the key."""
        sums = [shard.sums[key] for shard in self.shards[first:][:count] if key in shard.sums]
        return sum(int(text, 16) for text in sums) & MASK if sums else None

    @property
    def keys(self) -> set[str]:
        """The keys of all shards."""
        return {key for shard in self.shards for key in shard.sums}


class AgreedState(msgspec.Struct, frozen=True):
    """The agreed sums of a step, by group; `not_compared`: parts that were not compared during the save."""

    step: int
    groups: dict[str, AgreedGroup]
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardSums:
    """The sums of a shard in the memory of a rank.

    Attributes:
        groups: the groups with the shard
        index: the number of the shard in its groups
        count: the number of shards of a group
        sums: by key
    """

    groups: tuple[str, ...]
    index: int
    count: int
    sums: Mapping[str, int]


@dataclass(frozen=True)
class HeldState:
    """The sums of the state in the memory of a rank.

    Attributes:
        group: of the ranks with the same part of the model
        layout, updates: see `AgreedGroup`
        shards: own shards first
        problem: why no sums could be taken; "": no problem
        weights: the sum of all weights that the optimizers of the rank train; None: not taken
        random: the sum of the random states (`state_sums.random_key`); "": not taken
        peers: the ranks of which the rank may load random states
    """

    group: str
    layout: str = ""
    updates: int | None = None
    shards: tuple[ShardSums, ...] = ()
    problem: str = ""
    weights: int | None = None
    random: str = ""
    peers: tuple[int, ...] = ()


def hexadecimal(sums: Mapping[str, int]) -> dict[str, str]:
    """Return sums in the form of the manifest."""
    return {key: f"{value:016x}" for key, value in sums.items()}


def agree(step: int, states: Sequence[HeldState]) -> AgreedState:
    """Return the sums on which all holders of each shard agree.

    Args:
        step: of the state.
        states: by rank.

    Raises:
        CheckpointError: holders differ, or no rank has some shard.
    """
    holders: dict[tuple[str, int], list[tuple[int, Mapping[str, int]]]] = {}
    counts: dict[str, int] = {}
    for rank, state in enumerate(states):
        for shard in state.shards:
            for group in shard.groups:
                holders.setdefault((group, shard.index), []).append((rank, shard.sums))
                counts[group] = shard.count
    groups: dict[str, AgreedGroup] = {}
    for rank, state in enumerate(states):
        if state.group in groups:
            first = groups[state.group]
            if (first.layout, first.updates) != (state.layout, state.updates):
                raise CheckpointError(
                    f"the state of step {step} is not agreed: rank {rank} has made {state.updates} updates of"
                    f" {state.group}, another rank {first.updates}"
                )
            continue
        agreed = [
            _agreed(step, state.group, index, holders.get((state.group, index), []))
            for index in range(counts.get(state.group, 0))
        ]
        random = {member.random for member in states if member.group == state.group and member.random}
        groups[state.group] = AgreedGroup(state.layout, agreed, state.updates, tuple(sorted(random)))
    return AgreedState(step, groups)


def _agreed(
    step: int, group: str, index: int, holders: Sequence[tuple[int, Mapping[str, int]]]
) -> AgreedShard:
    if not holders:
        raise CheckpointError(f"no rank holds shard {index} of {group} of step {step}")
    sums: dict[str, int] = {}
    for _, holder_sums in holders:
        for key, value in holder_sums.items():
            if sums.setdefault(key, value) != value:
                raise CheckpointError(
                    f"the state of step {step} is not agreed: ranks"
                    f" {' and '.join(str(holder) for holder, _ in holders)} hold different bits of {key} of"
                    f" shard {index} of {group}"
                )
    return AgreedShard(hexadecimal(sums), tuple(rank for rank, _ in holders))


def differences(agreed: AgreedState, states: Sequence[HeldState], *, has_optimizer: bool) -> list[str]:
    """Compare the loaded state of all ranks with the agreed state; return a line for each difference.

    Groups of another layout are not compared (`other_layouts`).

    Args:
        agreed: of the checkpoint.
        states: by rank, after the load.
        has_optimizer: whether the optimizer's state was to be loaded, too.
    """
    lines = []
    for name, group in agreed.groups.items():
        members = [(rank, state) for rank, state in enumerate(states) if state.group == name]
        if not members or members[0][1].layout != group.layout or members[0][1].problem:
            continue
        shards: dict[int, list[tuple[int, ShardSums]]] = {}
        for rank, state in enumerate(states):
            for shard in state.shards:
                if name in shard.groups:
                    shards.setdefault(shard.index, []).append((rank, shard))
        for key in _keys(group, shards.values(), has_optimizer=has_optimizer):
            lines += _of_key(name, group, key, shards)
        weights = group.total(WEIGHT)
        lines += [
            f"{WEIGHT} of {name} on rank {rank}"
            for rank, state in members
            if None not in (weights, state.weights) and state.weights != weights
        ]
        if has_optimizer and group.updates is not None:
            lines += [
                f"count of updates of {name} on rank {rank} ({state.updates}, saved: {group.updates})"
                for rank, state in members
                if state.updates is not None and state.updates != group.updates
            ]
    return list(dict.fromkeys(lines))


def ranks_with_other_random_states(agreed: AgreedState, states: Sequence[HeldState]) -> list[int]:
    """Return the ranks that have loaded other random states than a rank of the checkpoint had."""
    return [rank for rank, state in enumerate(states) if not _has_saved_random_states(agreed, state, states)]


def _has_saved_random_states(agreed: AgreedState, state: HeldState, states: Sequence[HeldState]) -> bool:
    """Return whether the random states of a rank are in the checkpoint, or cannot be compared.

    A format may have the states once for all ranks with the same dense model, also where experts differ.
    """
    groups = {states[rank].group for rank in state.peers} | {state.group}
    saved = {key for name in groups & agreed.groups.keys() for key in agreed.groups[name].random}
    is_alike = {is_of_a_place(key) for key in saved} == {is_of_a_place(state.random)}
    return not state.random or not is_alike or state.random in saved


def is_of_a_place(random_key: str) -> bool:
    """Return whether each data-parallel rank has random states of its own (`state_sums.random_key`)."""
    return ":" in random_key


def _keys(
    group: AgreedGroup, shards: Iterable[Sequence[tuple[int, ShardSums]]], *, has_optimizer: bool
) -> list[str]:
    """Return the keys to compare; keys of another kind of optimizer are left out."""
    loaded = {key for holders in shards for _, shard in holders for key in shard.sums}
    if not has_optimizer:
        return [key for key in (WEIGHT,) if key in group.keys & loaded]
    kept = loaded - {WEIGHT, PARAM}
    moments = group.keys - {WEIGHT, PARAM}
    is_other_kind = bool(kept) and not kept & moments
    keys = group.keys - moments if is_other_kind else group.keys
    return sorted(keys if WEIGHT in loaded else keys - {WEIGHT})  # the sums of weights may not be taken


def _of_key(
    name: str, group: AgreedGroup, key: str, shards: Mapping[int, Sequence[tuple[int, ShardSums]]]
) -> list[str]:
    """Return the differences of a key: with shards and ranks if the job has the saved number of shards."""
    counts = {shard.count for holders in shards.values() for _, shard in holders}
    wrong = [
        f"{key} of shard {index} of {name} on rank {rank}"
        for index, holders in sorted(shards.items())
        for rank, shard in holders
        if index < len(group.shards) and hexadecimal(shard.sums).get(key) != group.shards[index].sums.get(key)
    ]
    sums = [{shard.sums[key] for _, shard in holders if key in shard.sums} for holders in shards.values()]
    is_alike = all(len(values) < 2 for values in sums)
    loaded = sum(value for values in sums for value in values) & MASK if any(sums) else None
    if is_alike and loaded == group.total(key):
        return []  # the same state, also with another number of shards
    return wrong if counts == {len(group.shards)} and wrong else [f"{key} of {name}"]


def other_layouts(agreed: AgreedState, states: Sequence[HeldState]) -> list[str]:
    """Return the groups of this job that cannot be compared with a checkpoint, with the reason."""
    reasons = {}
    for state in states:
        saved = agreed.groups.get(state.group)
        if state.problem:
            reasons[state.group] = state.problem
        elif saved is None or saved.layout != state.layout:
            reasons[state.group] = "it has other params than the checkpoint's"
        elif {*agreed.groups} != {any_state.group for any_state in states}:
            reasons[state.group] = "the checkpoint has other groups"
    return [f"{group} ({reason})" for group, reason in sorted(reasons.items())]


def in_words(differences: Sequence[str]) -> str:
    """Return differences in a line."""
    omitted = len(differences) - _MOST_DIFFERENCES
    return ", ".join(differences[:_MOST_DIFFERENCES]) + (f" and {omitted} more" if omitted > 0 else "")


def described(agreed: AgreedState | None) -> str:
    """Return a line about the agreement of the holders on the state of a checkpoint."""
    if agreed is None:
        return NONE
    holders = [shard.holders for group in agreed.groups.values() for shard in group.shards]
    alone = [ranks for ranks in holders if len(ranks) < 2]
    ranks = sorted({rank for ranks in alone or holders for rank in ranks})
    fewest = min(map(len, holders), default=0)
    shards = f"{len(holders)} shard{'s' if len(holders) != 1 else ''}"
    names = ", ".join(map(str, ranks[:_MOST_RANKS])) + (" ..." if len(ranks) > _MOST_RANKS else "")
    text = (
        f"step {agreed.step}, {len(alone)} of {shards} not confirmed by a second holder"
        if alone
        else f"as trained: step {agreed.step}, {shards}, each agreed by {fewest} or more holders"
    )
    omitted = f"; not compared when it was written: {', '.join(agreed.not_compared)}"
    return f"{text} (ranks {names}){omitted if agreed.not_compared else ''}"


_PART = ".state."


class AgreedPart(msgspec.Struct, frozen=True):
    """The agreed sums of one group."""

    group: str
    agreed: AgreedGroup

    @property
    def name(self) -> str:
        """The name of the file, below the checkpoint."""
        return f"{_PART}{self.group}"


def join(
    folder: Path, step: int, entries: Sequence[FileEntry]
) -> tuple[tuple[FileEntry, ...], AgreedState | None]:
    """Return the files of the checkpoint without the parts, and the agreed state.

    The state is None without parts, or if a call before a crash has removed a part.

    Args:
        folder: of the checkpoint; files may have the names of drafts.
        step: of the checkpoint.
        entries: of all groups.
    """
    files = tuple(entry for entry in entries if not entry.path.startswith(_PART))
    try:
        parts = [
            msgspec.json.decode((folder / entry.draft).read_bytes(), type=AgreedPart)
            for entry in entries
            if entry.path.startswith(_PART)
        ]
    except (OSError, msgspec.MsgspecError):
        return files, None
    return files, AgreedState(step, {part.group: part.agreed for part in parts}) if parts else None

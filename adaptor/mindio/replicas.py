"""The copies of shards, in the terms of the interface; pure.

`replica_cnt` copies of an optimizer state among the ranks of `rank_list`: the ranks are cut into as many runs
of the same length, and the i-th ranks of all runs hold the same shard. If every rank has the whole state, the
runs have length one. The interface has no terms for an optimizer that mirrors: each rank has its own shard,
and a copy of the shard of the rank `apart` places before.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adaptor.errors import ConfigError
from adaptor.protocol.messages import Share

# By the place in the list: the interface has no other name of an optimizer.
_KINDS = ("attention", "moe")
# The number of copies of a shard with an optimizer that mirrors.
_MIRRORED = 2


@dataclass(frozen=True)
class StateCopies:
    """The copies of an optimizer's state: `ranks` hold `shards` different shards.

    Attributes:
        apart: the distance from a rank to the rank with the only copy of its shard; 0: runs, as above
    """

    kind: int
    ranks: tuple[int, ...]
    shards: int
    apart: int = 0

    @property
    def group(self) -> str:
        """Return a name that is the same on all ranks of the group, and different for other groups."""
        return f"{_KINDS[self.kind]}-of-rank-{min(self.ranks)}"

    def shares(self, rank: int) -> tuple[Share, ...]:
        """Return the shards that `rank` holds."""
        place = self.ranks.index(rank)
        held_shards = {place % self.shards, (place - self.apart) % self.shards}
        return tuple(Share(self.group, index, self.shards) for index in sorted(held_shards))

    def givers(self, among: Container[int]) -> list[int]:
        """Return, for each shard, its giver among the ranks: the owner before the holder of a copy.

        Every rank with the same `among` gets the same result.
        """
        return [next(rank for rank in self._holders(index) if rank in among) for index in range(self.shards)]

    def _holders(self, index: int) -> Sequence[int]:
        if self.apart:
            return self.ranks[index], self.ranks[(index + self.apart) % self.shards]
        return self.ranks[index :: self.shards]


def of_newer(rank: int, infos: Any) -> tuple[StateCopies, ...]:
    """Return the replicas of the argument of `tft_set_optimizer_replica`.

    Raises:
        ConfigError: the argument does not describe copies to choose from.
    """
    call = "tft_set_optimizer_replica"
    dicts = isinstance(infos, list) and all(isinstance(info, dict) for info in infos)
    if not dicts or not 1 <= len(infos) <= len(_KINDS):
        raise ConfigError(f"{call}: replica_info is {infos!r}: a list of one or two dicts, attention and moe")
    replica_sets = []
    for kind, info in enumerate(infos):
        ranks, count, shift = (info.get(key) for key in ("rank_list", "replica_cnt", "replica_shift"))
        replica_set = _checked(call, rank, kind, ranks, "replica_cnt", count)
        if shift not in (0, replica_set.shards):
            raise ConfigError(
                f"{call}: replica_shift is {shift!r}: copies are {replica_set.shards} places apart, so it "
                "must be 0 "
                f"or {replica_set.shards}"
            )
        replica_sets.append(replica_set)
    return tuple(replica_sets)


def of_older(rank: int, ranks: Any, size: Any, replica: Any, apart: int = 0) -> tuple[StateCopies, ...]:
    """Return the replicas of the arguments of `ttp_init_processor`.

    Args:
        ranks: of the data-parallel group.
        replica: the distance of the two copies, in places of `ranks`; with `apart`, the number of copies.
        apart: the distance of the two copies of an optimizer that mirrors; 0 for others.

    Raises:
        ConfigError: the arguments do not describe copies to choose from.
    """
    call = "ttp_init_processor"
    if not isinstance(ranks, Sequence):
        raise ConfigError(f"{call}: dp_ranks is {ranks!r}: it must be a list of ranks")
    if size != len(ranks):
        raise ConfigError(f"{call}: dp_size is {size!r}, but dp_ranks are {list(ranks)}")
    if apart:
        if replica != _MIRRORED:
            raise ConfigError(
                f"{call}: replica is {replica!r}: with TTPOddReplicaOptimizer each shard has {_MIRRORED} "
                f"copies, so it must be {_MIRRORED}"
            )
        return (replace(_checked(call, rank, 0, list(ranks), "replica", 1), apart=apart),)
    if not isinstance(replica, int) or replica < 1 or size % replica:
        raise ConfigError(
            f"{call}: replica is {replica!r}: with dp_size {size} it must divide {size}, as dp_size//2 does "
            "where that is even; for odd sizes take TTPOddReplicaOptimizer, and replica 2"
        )
    return (_checked(call, rank, 0, list(ranks), "dp_size//replica", size // replica),)


def _checked(call: str, rank: int, kind: int, ranks: Any, name: str, count: Any) -> StateCopies:
    if not isinstance(ranks, list) or not all(
        type(rank_number) is int and rank_number >= 0 for rank_number in ranks
    ):
        raise ConfigError(f"{call}: rank_list is {ranks!r}: it must be a list of ranks")
    if rank not in ranks or len(set(ranks)) < len(ranks):
        raise ConfigError(f"{call}: rank_list is {ranks}: it must have rank {rank} in it, and each rank once")
    if type(count) is not int or count < 1 or len(ranks) % count:
        raise ConfigError(
            f"{call}: {name} is {count!r}: it must divide the {len(ranks)} ranks {_short(ranks)}, or a shard "
            "would have no place"
        )
    return StateCopies(kind, tuple(ranks), len(ranks) // count)


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")

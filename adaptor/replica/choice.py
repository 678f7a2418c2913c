"""Chooses the replicas of a job, from its layout and the user's setting.

`split`   the data-parallel group is cut in two, and each half holds the whole optimizer state: Megatron's own
          `num_distributed_optimizer_instances`, unless these compute wrong results (`cannot_split`)
`mirror`  each rank keeps a copy of its neighbour's shard; the groups of the framework stay unchanged
`none`    nothing is added
"""

from __future__ import annotations

from adaptor.context import Context
from adaptor.errors import UnsupportedError
from adaptor.replica import tolerance

# Why no second copies are made.
LONE_EXPERTS = "no two ranks share experts"
LONE_MATRICES = "the layer-wise optimizer keeps each matrix and its state on one rank alone"


class ReplicaChoice:
    """The choice of this job, a part of its context."""

    def __init__(self, context: Context) -> None:
        self._setting = context.settings.replica
        # Megatron-LM's arguments say before anything is built whether the optimizer is distributed; None:
        # nobody said.
        self._distributed_optimizer: bool | None = None
        # Why the optimizer instances of the framework found are no way to have replicas; '' if they are one.
        self._no_split = ""
        self._has_lone_parts = False

    @property
    def is_decided(self) -> bool:
        """Return whether the framework's arguments were taken (`decide`)."""
        return self._distributed_optimizer is not None

    def replica(self, size: int, experts: int = 0) -> str:
        """Return `split`, `mirror` or `none`.

        Args:
            size: of the data-parallel group, context parallel included.
            experts: number of ranks with the same experts, if different from `size`.

        Raises:
            UnsupportedError: the size, or the framework, does not allow the setting.
        """
        setting = self._setting
        if setting == "none" or (setting == "auto" and (size == 1 or self._has_lone_parts)):
            return "none"
        if size == 1:
            raise UnsupportedError(
                f"TTP_REPLICA is {setting}, but the data-parallel size is 1: there is no second rank for a "
                "replica; use auto or none to survive exceptions alone"
            )
        if setting == "auto":
            return "mirror" if size % 2 or experts % 2 or self._no_split else "split"
        if setting == "split" and self._no_split:
            raise UnsupportedError(
                f"TTP_REPLICA is split, but {self._no_split}: use auto or mirror, which any size from 2"
                " allows"
            )
        if setting == "split" and size % 2:
            raise UnsupportedError(
                f"TTP_REPLICA is split, but the data-parallel size is {size}, which is odd: "
                "use auto or mirror, which any size from 2 allows"
            )
        if setting == "split" and experts % 2:
            raise UnsupportedError(
                f"TTP_REPLICA is split, but {experts} ranks have the same experts, which is odd: "
                "use auto or mirror"
            )
        return setting

    def require_none(self, reason: str) -> None:
        """Refuse a setting that asks for second copies where none can be made, for `reason`.

        Raises:
            UnsupportedError: names the setting.
        """
        if self._setting not in ("auto", "none"):
            raise UnsupportedError(
                f"TTP_REPLICA is {self._setting}, but {reason}: use auto or none, and TTP_HOST_COPY to"
                " survive the death of a process"
            )

    def cannot_split(self, reason: str) -> None:
        """Record why `split` cannot be used in this job; empty: `split` can be used."""
        self._no_split = reason

    def has_lone_parts(self, alone: bool) -> None:
        """Record whether every rank has experts, or matrices with their state, that no other rank has.

        Any death then loses these, so `auto` makes no second copies of the rest.
        """
        self._has_lone_parts = alone

    def decide(self, distributed_optimizer: bool, size: int, experts: int = 0) -> None:
        """Take the framework's arguments before anything is built. Raises UnsupportedError."""
        self._distributed_optimizer = distributed_optimizer
        if distributed_optimizer:
            self.replica(size, experts)

    def instances(self, size: int, requested_instances: int, experts: int = 0) -> int:
        """Return how many optimizer instances a data-parallel group of `size` has.

        Args:
            size: context parallel included.
            requested_instances: the number in the framework's arguments; a number above 1 is kept.
            experts: number of ranks with the same experts, if different from `size`.

        Raises:
            UnsupportedError: the size cannot be split.
        """
        if requested_instances > 1 or self._distributed_optimizer is False:
            return requested_instances
        if self._distributed_optimizer is None and self._setting == "split" and (size % 2 or self._no_split):
            return 1  # a library user, who may not distribute the optimizer: `require_instances` will know
        return 2 if self.replica(size, experts) == "split" else 1

    def require_instances(self, size: int, instances: int) -> None:
        """Check the `instances` optimizer instances of a data-parallel group of `size` against the setting.

        Raises:
            UnsupportedError: `split` is set, and the group has a single instance.
        """
        if instances == 1:
            self.replica(size)

    def wants_mirrors(self, size: int, instances: int, experts: int = 0) -> bool:
        """Tell whether a group of `size` with `instances` optimizer instances needs `mirror` replicas.

        `experts`: number of ranks with the same experts.
        """
        return instances == 1 and self.replica(size, experts) == "mirror"


def describe(
    size: int,
    instances: int,
    sharded: bool,
    elements: int,
    mirrored: int,
    lone: str = "",
    host_copy: int | None = 0,
) -> str:
    """Return the line about replicas that `ttprun` prints at the start.

    Args:
        elements: number of main-param elements that rank 0 updates.
        mirrored: bytes of the rank's mirrors.
        lone: why a part has no second copy; empty: all parts have.
        host_copy: after how many steps copies in host memory are made; 0: never; None: auto; another line
            reports the decision.
    """
    fate = "" if host_copy is None else f": {tolerance.alone(host_copy)}"
    if size == 1:
        return f"no second copies of the optimizer state, the data-parallel size is 1{fate}"
    if not sharded:
        return "every data-parallel rank has the whole optimizer state: nothing is added"
    if instances > 1:
        further_bytes = 12 * elements * (instances - 1) // instances
        return (
            f"second copies of optimizer shards by split, {instances} instances: {_mib(further_bytes)} "
            "more on rank 0"
        )
    if mirrored:
        only = f", but none of experts, which no two ranks share{fate}" if lone else ""
        return f"second copies of optimizer shards by mirror: {_mib(mirrored)} more on rank 0{only}"
    return f"no second copies of optimizer shards ({lone or 'TTP_REPLICA=none'}){fate}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"

"""Which replicas a job has: what its layout allows, and what the user asked for.

`split`   the data-parallel group is cut in two, and each half holds the whole optimizer state: Megatron's own
          `num_distributed_optimizer_instances`, where these are right (`cannot_split`)
`mirror`  each rank keeps a copy of its neighbour's shard; the groups of the framework stay what they are
`none`    nothing is added
"""

from __future__ import annotations

from adaptor import config
from adaptor.errors import LayoutError

# Megatron-LM's arguments say before anything is built whether the optimizer is distributed; None: nobody
# said.
_distributed_optimizer: bool | None = None

# Why the optimizer instances of the framework found are no way to have replicas; empty where they are one.
_no_split = ""


def replica(size: int, setting: str, experts: int = 0) -> str:
    """`split`, `mirror` or `none`.

    Args:
        size: of the data-parallel group, context parallel included.
        setting: TTP_REPLICA.
        experts: ranks that have the same experts, where that is another number.

    Raises:
        LayoutError: the size, or the framework, does not allow what was asked for.
    """
    if setting == "none" or (size == 1 and setting == "auto"):
        return "none"
    if size == 1:
        raise LayoutError(
            f"TTP_REPLICA is {setting}, but the data-parallel size is 1: there is no second rank for a "
            "replica; use auto or none to survive exceptions alone"
        )
    if setting == "auto":
        return "mirror" if size % 2 or experts % 2 or _no_split else "split"
    if setting == "split" and _no_split:
        raise LayoutError(
            f"TTP_REPLICA is split, but {_no_split}: use auto or mirror, which any size from 2 allows"
        )
    if setting == "split" and size % 2:
        raise LayoutError(
            f"TTP_REPLICA is split, but the data-parallel size is {size}, which is odd: "
            "use auto or mirror, which any size from 2 allows"
        )
    if setting == "split" and experts % 2:
        raise LayoutError(
            f"TTP_REPLICA is split, but {experts} ranks have the same experts, which is odd: "
            "use auto or mirror"
        )
    return setting


def cannot_split(why: str) -> None:
    """The framework found has no optimizer instances that could be used, `why` says so; empty: it has."""
    global _no_split
    _no_split = why


def decide(distributed_optimizer: bool, size: int, experts: int = 0) -> None:
    """What the framework's arguments say, before anything is built. Raises LayoutError like `replica`."""
    global _distributed_optimizer
    _distributed_optimizer = distributed_optimizer
    if distributed_optimizer:
        replica(size, config.load().replica, experts)


def instances(size: int, asked: int, experts: int = 0) -> int:
    """How many optimizer instances to make for a data-parallel group of `size` (context parallel included).

    Args:
        experts: ranks that have the same experts, where that is another number.
        asked: what the user asked the framework for; more than one is left as it is.

    Raises:
        LayoutError: the size cannot be split.
    """
    if asked > 1 or _distributed_optimizer is False:
        return asked
    setting = config.load().replica
    if _distributed_optimizer is None and setting == "split" and (size % 2 or _no_split):
        return 1  # a library user, who may not distribute the optimizer: `require_instances` will know
    return 2 if replica(size, setting, experts) == "split" else 1


def require_instances(size: int, made: int) -> None:
    """A distributed optimizer is built on `made` instances of a data-parallel group of `size`.

    Raises:
        LayoutError: one instance alone, where `split` was asked for.
    """
    if made == 1:
        replica(size, config.load().replica)


def wants_mirrors(size: int, made: int, experts: int = 0) -> bool:
    """Whether `mirror` replicas are to be made where the group of `size` has `made` optimizer instances."""
    return made == 1 and replica(size, config.load().replica, experts) == "mirror"


def words(size: int, made: int, sharded: bool, elements: int, mirrored: int, alone: bool = False) -> str:
    """What a user is told at the start, in one line.

    Args:
        made: optimizer instances.
        sharded: whether the optimizer is distributed.
        elements: of the main params that rank 0 updates.
        mirrored: bytes that its mirrors take.
        alone: whether experts have no second copy, because no other rank has the same.
    """
    if size == 1:
        return (
            "no second copies of the optimizer state, the data-parallel size is 1: "
            "exceptions are survived, the death of a process is not"
        )
    if not sharded:
        return "every data-parallel rank has the whole optimizer state: nothing is added"
    if made > 1:
        more = 12 * elements * (made - 1) // made
        return f"second copies of optimizer shards by split, {made} instances: {_mib(more)} more on rank 0"
    if mirrored:
        only = ", but none of experts, which no two ranks share: a death loses those" if alone else ""
        return f"second copies of optimizer shards by mirror: {_mib(mirrored)} more on rank 0{only}"
    return (
        "no second copies of optimizer shards (TTP_REPLICA=none): "
        "exceptions are survived, the death of a process is not"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"

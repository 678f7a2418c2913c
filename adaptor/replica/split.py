"""`split` replicas: the data-parallel group is cut in two, and each half holds the whole optimizer state.

That is Megatron's own `num_distributed_optimizer_instances`, which is correct since Megatron-core 0.13 (0.10
to 0.12 compute the gradient norm too large by the square root of the number of instances).
"""

from __future__ import annotations

from adaptor import config
from adaptor.replica.layout import split_instances

# Megatron-LM's arguments say before anything is built whether the optimizer is distributed; None: nobody
# said.
_distributed_optimizer: bool | None = None


def decide(distributed_optimizer: bool) -> None:
    """What the framework's arguments say."""
    global _distributed_optimizer
    _distributed_optimizer = distributed_optimizer


def instances(size: int, asked: int) -> int:
    """How many optimizer instances to make for a data-parallel group of `size` (context parallel included).

    Args:
        asked: what the user asked the framework for; more than one is left as it is.

    Raises:
        LayoutError: the size cannot be split.
    """
    if asked > 1 or _distributed_optimizer is False:
        return asked
    if _distributed_optimizer is None and size % 2:
        return 1  # a library user, who may not distribute the optimizer: `require_instances` will know
    return split_instances(size, config.load().replica)


def require_instances(size: int, made: int) -> None:
    """A distributed optimizer is built on `made` instances of a data-parallel group of `size`.

    Raises:
        LayoutError: one instance alone, where replicas were wanted.
    """
    if made == 1:
        split_instances(size, config.load().replica)

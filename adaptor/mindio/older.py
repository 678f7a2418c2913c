"""The older form of the interface (`ttp_*`), as the guide for ModelLink uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adaptor.mindio import job, replicas
from adaptor.mindio.handlers import Handler


def ttp_init_controller(
    rank: int, world_size: int, replica: int = 2, enable_local_copy: bool = False
) -> None:
    """The controller is in ttprun's agent; the arguments are checked."""
    job.get().join("ttp_init_controller", rank, world_size, enable_local_copy)


def ttp_start_controller(ip: str, port: int) -> None:
    """Do nothing: the controller runs already, and listens at TTP_PORT where that is needed."""


def ttp_init_processor(
    rank: int,
    dp_ranks: Any,
    dp_size: int,
    world_size: int,
    replica: int = 2,
    enable_local_copy: bool = False,
) -> None:
    """Set rank, world size and the ranks with copies: `replica` is the distance between two copies.

    With TTPOddReplicaOptimizer it is how many copies a shard has; where they are the optimizer has said.
    """
    job.get().join("ttp_init_processor", rank, world_size, enable_local_copy)
    job.get().replicas = replicas.of_older(rank, dp_ranks, dp_size, replica, job.get().apart)


def ttp_start_processor(ip: str, port: int) -> None:
    """Do nothing: the process has been connected to its agent from the start."""


def ttp_register_save_ckpt_handler(func: Callable[[int, int, list[int], Any], Any]) -> None:
    """`func(save_rank, step, rank_list, args)` saves this rank's part; what it raises is a failure."""
    job.get().handlers.save = _handler("ttp_register_save_ckpt_handler", func)
    job.get().handlers.older = True


def ttp_register_rename_handler(func: Callable[[Any], Any]) -> None:
    """`func(args)` names what was saved, on one rank, once; it returns 0 where it could."""
    job.get().handlers.rename = _handler("ttp_register_rename_handler", func)


def ttp_set_ckpt_args(args: Any) -> None:
    """Set the arguments of the handlers; the first of them is the iteration that has ended."""
    job.get().handlers.args = args
    if isinstance(args, tuple | list) and args and type(args[0]) is int:
        job.get().reached(args[0])


def ttp_to_persist(train: Callable[..., Any]) -> Callable[..., Any]:
    """`train`, whose exceptions do not end the process before others have saved."""
    return job.get().guard(train)


def _handler(call: str, func: Any) -> Handler:
    if not callable(func):
        raise TypeError(f"{call}: func is {func!r}, it must be callable")
    return Handler(func)

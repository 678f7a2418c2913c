"""The adaptor's own process group of all ranks: gloo, whatever backend the framework uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adaptor import context
from adaptor.waits import Waits

T = TypeVar("T")

_everyone: dist.ProcessGroup | None = None


def of_everyone() -> dist.ProcessGroup:
    """Make the group. Collective: every rank calls."""
    global _everyone
    # By its place, not by its name: with MindSpeed's --disable-gloo-group, with which the framework is to
    # have no gloo groups of its own, nothing is made for `backend="gloo"`.
    gloo_group: dist.ProcessGroup = dist.new_group(None, None, "gloo")
    _everyone = gloo_group
    return gloo_group


def of_this_job() -> dist.ProcessGroup | None:
    """Return the newest group."""
    return _everyone


def barrier(everyone: dist.ProcessGroup) -> None:
    """Wait at a barrier of the group of all ranks; another thread can end the wait.

    A rank may die between its barrier and the barrier of the others, and gloo forgets a message that is being
    sent to the dead rank. Without an end the others would wait until the save has no time left.

    Raises:
        RuntimeError: the barrier is broken.
    """
    work = dist.barrier(group=everyone, async_op=True)
    context.part(Waits).wait(work, work.wait)


def smallest(everyone: dist.ProcessGroup, numbers: Sequence[int]) -> list[int]:
    """Return the smallest value of all ranks, number by number; another thread can end the wait.

    Raises:
        RuntimeError: a rank is gone.
    """
    minimum = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    work = dist.all_reduce(minimum, dist.ReduceOp.MIN, group=everyone, async_op=True)
    context.part(Waits).wait(work, work.wait)
    return [int(number) for number in minimum]


def gather_values(value: T, members: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank, by rank; collective.

    Args:
        value: the value of this rank; picklable.
        members: the ranks; None: all ranks, by the framework's default group.
    """
    values: list[Any] = [None] * dist.get_world_size(members)
    dist.all_gather_object(values, value, group=members)
    return values

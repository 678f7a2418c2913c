"""The adaptor's own process group of all ranks: gloo, whatever backend the framework uses."""

from __future__ import annotations

import pickle
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


def of_training_job() -> dist.ProcessGroup:
    """Return the newest group, in a job whose training has begun."""
    everyone = of_this_job()
    assert everyone is not None
    return everyone


def barrier(everyone: dist.ProcessGroup) -> None:
    """Wait at a barrier of the group of all ranks; another thread can end the wait.

    A rank may die between its barrier and the barrier of the others, and gloo forgets a message that is being
    sent to the dead rank. Without an end the others would wait until the save has no time left.

    Raises:
        RuntimeError: the barrier is broken.
    """
    _wait(dist.barrier(group=everyone, async_op=True))


def smallest(everyone: dist.ProcessGroup, numbers: Sequence[int]) -> list[int]:
    """Return the smallest value of all ranks, number by number; another thread can end the wait.

    Raises:
        RuntimeError: a rank is gone.
    """
    minimum = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    _wait(dist.all_reduce(minimum, dist.ReduceOp.MIN, group=everyone, async_op=True))
    return [int(number) for number in minimum]


def total(everyone: dist.ProcessGroup, number: int) -> int:
    """Return the sum of the numbers of all ranks, modulo 2**64; another thread can end the wait.

    Raises:
        RuntimeError: a rank is gone.
    """
    # In two halves: a sum of signed integers that overflows is undefined.
    halves = torch.tensor([number & 0xFFFFFFFF, number >> 32], dtype=torch.int64, device="cpu")
    _wait(dist.all_reduce(halves, dist.ReduceOp.SUM, group=everyone, async_op=True))
    low, high = halves.tolist()
    return int(low + (high << 32)) & ((1 << 64) - 1)


def gather_bytes(everyone: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """Return the bytes of each rank, by rank; another thread can end the wait.

    Raises:
        RuntimeError: a rank is gone.
    """
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(everyone.size())]
    _wait(dist.all_gather(sizes, torch.tensor([len(data)]), group=everyone, async_op=True))
    counts = [int(size) for size in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(counts), b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in counts]
    _wait(dist.all_gather(gathered, padded, group=everyone, async_op=True))
    return [part[:count].numpy().tobytes() for part, count in zip(gathered, counts, strict=True)]


def pass_on(everyone: dist.ProcessGroup, data: bytes, to: int, source: int) -> bytes:
    """Send bytes to one rank and return the bytes of another rank; another thread can end the wait.

    Args:
        everyone: the group of all ranks; each rank sends to one rank, and gets from one.
        data: the bytes to send.
        to: the receiver.
        source: the sender of the returned bytes.

    Raises:
        RuntimeError: a rank is gone.
    """

    def swap(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        works = [dist.irecv(received, source, everyone), dist.isend(own, to, everyone)]
        for work in works:
            assert work is not None
            context.part(Waits).wait(work, work.wait, message=True)
        return received

    size = swap(torch.tensor([len(data)]), torch.zeros(1, dtype=torch.int64))
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return swap(own, torch.empty(int(size), dtype=torch.uint8)).numpy().tobytes()


def _wait(work: Any) -> None:
    context.part(Waits).wait(work, work.wait)


def gather_values(value: T, members: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank, by rank; collective.

    Args:
        value: the value of this rank; picklable.
        members: the ranks; None: all ranks, by the framework's default group.
    """
    values: list[Any] = [None] * dist.get_world_size(members)
    dist.all_gather_object(values, value, group=members)
    return values


def gather_all(value: T, everyone: dist.ProcessGroup) -> list[T]:
    """Return the value of each rank, by rank; collective, and another thread can end the wait.

    Args:
        value: of this rank; it can be pickled.

    Raises:
        RuntimeError: a rank is gone.
    """
    return [pickle.loads(data) for data in gather_bytes(everyone, pickle.dumps(value))]

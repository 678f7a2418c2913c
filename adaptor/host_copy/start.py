"""Lets a worker make host copies: its copier, and the memory for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from adaptor import context, output
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.errors import UnsupportedError
from adaptor.host_copy import content, room
from adaptor.host_copy.copier import Copier
from adaptor.protocol.copy_file import FILES, HEADER_BYTES, CopyFile
from adaptor.protocol.environment import Generation, HeldCopies, Place
from adaptor.protocol.state_provider import StateCopier
from adaptor.replica import group
from adaptor.worker.session import Session


def attach(session: Session, on_whole: Callable[[int], None]) -> None:
    """Give `session` the copier of this rank, which begins with its files as they are.

    Args:
        session: of this process.
        on_whole: is called with the step of each new copy, on the copier's thread.

    Raises:
        OSError: the agent's files cannot be opened.
        UnsupportedError: this process was started only to write copies.
    """
    require_training()
    every, place = context.get().settings.host_copy, context.part(Place)
    paths = context.part(HeldCopies).paths.get(place.rank, ())
    if not every or not paths:
        return

    def smallest(numbers: Sequence[int]) -> list[int]:
        everyone = group.of_this_job()
        assert everyone is not None
        return group.smallest(everyone, numbers)

    session.copier = Copier(
        every,
        place.rank,
        dist.get_world_size(),
        context.part(Generation).name,
        [CopyFile(path) for path in paths[:FILES]],
        context.part(HeldCopies).has_keeper,
        on_whole,
        smallest,
    )


def require_training() -> None:
    """End this process, where it was started only to write host copies; that is done, or cannot be.

    Raises:
        UnsupportedError: it was.
    """
    if context.part(HeldCopies).only:
        raise UnsupportedError("no restart is left")


def reserve(copier: StateCopier | None, trainee: MegatronTrainee) -> None:
    """Take the memory for the copies of this rank, before its first step; collective.

    Args:
        copier: of this rank; None: it makes no copies.
        trainee: its state.

    Raises:
        UnsupportedError: a node has not so much memory, or something in the state cannot be copied.
    """
    if copier is None:
        return
    assert isinstance(copier, Copier)
    everyone = group.of_this_job()
    assert everyone is not None
    try:
        size = content.most_bytes(trainee)
    except TypeError as error:
        raise UnsupportedError(f"TTP_HOST_COPY is set, and this state cannot be copied: {error}") from None
    place = context.part(Place)
    copier.forget_all()  # what an earlier start has left is on disk, or was given up
    dist.barrier(group=everyone)
    of_the_node = room.require(place, copier.count * (HEADER_BYTES + size), everyone)
    try:
        copier.reserve(size)
    except OSError as error:
        raise UnsupportedError(
            f"TTP_HOST_COPY is set: no memory for {copier.count} copies of {size} bytes of rank"
            f" {place.rank} ({error.strerror}): leave it out, or give node {place.node} more memory"
        ) from None
    survives = (
        "and the loss of any node: the next node keeps them, too"
        if context.part(HeldCopies).has_keeper
        else "not that of ttprun or of the node: there is no other node"
    )
    if place.rank == 0 and not context.part(Generation).is_restart:
        output.tell(
            f"[ttp] copies in host memory every {context.get().settings.host_copy} steps:"
            f" {of_the_node / 2**20:.1f} MiB on node 0; they survive the death of all workers, {survives}",
            to="stdout",
        )

"""Takes the memory for host copies before the first step, or says why the copies do not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from adaptor import context, output
from adaptor.checkpoint import save_folder_claim
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.errors import UnsupportedError
from adaptor.host_copy import content
from adaptor.host_copy.copier import Copier
from adaptor.host_memory import FOR_COPIES, available
from adaptor.protocol.copy_file import HEADER_BYTES
from adaptor.protocol.environment import Generation, HeldCopies, WorkerPlace
from adaptor.replica import group, tolerance
from adaptor.replica.group import gather_values
from adaptor.worker.session import Session


class Need(NamedTuple):
    """The memory needed for the copies of a rank.

    Attributes:
        size: bytes of the rank's copies, all files together.
        available: free bytes on the node.
    """

    node: int
    size: int
    available: int


def bytes_on(needs: Sequence[Need]) -> Mapping[int, int]:
    """Return the bytes of copies on each node, of its own ranks and of the previous node's ranks."""
    nodes = sorted({need.node for need in needs})
    own = {node: sum(need.size for need in needs if need.node == node) for node in nodes}
    return {node: own[node] + (own[nodes[at - 1]] if len(nodes) > 1 else 0) for at, node in enumerate(nodes)}


def shortage(needs: Sequence[Need], usable: float = 1.0) -> str:
    """Return why copies do not fit into the memory of a node, in words; empty: the copies fit.

    Args:
        needs: of all ranks, before any rank takes memory for copies.
        usable: the usable part of the free memory.
    """
    part = "" if usable == 1.0 else f", of which copies take {usable:.0%} at most"
    for node, size in bytes_on(needs).items():
        free = min(need.available for need in needs if need.node == node)
        if size > free * usable:
            return (
                f"the copies of node {node} take {size} bytes of its memory, and {free} bytes are free"
                f" (limits of its control group included){part}"
            )
    return ""


def reserve(session: Session, trainee: MegatronTrainee) -> MegatronTrainee:
    """Take the memory for the copies of this rank, before its first step; collective.

    With TTP_HOST_COPY=auto no copies are made where each shard has a second holder, or where a node lacks the
    memory; a line says the latter.

    Args:
        session: of this process; the session loses its copier if no copies are made.

    Returns:
        `trainee`, with the losses that the job may have.

    Raises:
        UnsupportedError: with TTP_HOST_COPY=K a node has not so much memory, or something in the state cannot
            be copied.
    """
    copier, everyone = session.copier, group.of_this_job()
    if copier is None:
        return trainee
    assert isinstance(copier, Copier)
    assert everyone is not None
    if copier.is_auto and tolerance.spare(
        dict(enumerate(gather_values(trainee.shares, everyone))), lambda rank: rank
    ):
        session.copier = None
        return trainee
    copier.forget_all()  # what an earlier start has left is on disk, or was given up
    problem, needs = _take(copier, trainee, everyone)
    place = context.part(WorkerPlace)
    if problem and not copier.is_auto:
        raise UnsupportedError(f"TTP_HOST_COPY is set: {problem}: leave it out, or give the node more memory")
    if problem:
        copier.forget_all()
        session.copier = None
        if place.rank == 0:
            output.tell(f"[ttp] no copies in host memory (TTP_HOST_COPY=auto): {problem}", to="stdout")
        kind = trainee.survives.partition(";")[0]
        return replace(trainee, survives=f"{kind}; {tolerance.exceptions_alone(has_remedy=False)}")
    survives = (
        "and the loss of any node: the next node keeps them, too"
        if context.part(HeldCopies).has_keeper
        else "not that of ttprun or of the node: there is no other node"
    )
    if place.rank == 0 and not context.part(Generation).is_restart:
        least = "at least " if copier.is_auto else ""
        output.tell(
            f"[ttp] copies in host memory {least}every {copier.steps_between} steps:"
            f" {bytes_on(needs)[place.node] / 2**20:.1f} MiB on node 0; they survive the death of all"
            f" workers, {survives}",
            to="stdout",
        )
    return trainee


def _take(
    copier: Copier, trainee: MegatronTrainee, everyone: dist.ProcessGroup
) -> tuple[str, Sequence[Need]]:
    """Take the memory for the copies of this rank; return the error, and the needs; collective."""
    place, size, problem = context.part(WorkerPlace), 0, ""
    try:
        size = content.most_bytes(trainee)
    except TypeError as error:
        problem = f"this state cannot be copied: {error}"
    # A restart writes the copies as one checkpoint, which all nodes load.
    if copier.is_auto and place.node and not save_folder_claim.is_folder_shared(Path(trainee.save_folder)):
        problem = f"node {place.node} does not share the --save folder of node 0"
    needed_bytes = copier.count * (HEADER_BYTES + size)
    dist.barrier(group=everyone)  # every rank has given up what an earlier start has left
    needs = gather_values(Need(place.node, needed_bytes, available() + _kept_bytes()), everyone)
    problem = next(filter(None, gather_values(problem, everyone)), "")
    problem = problem or shortage(needs, FOR_COPIES if copier.is_auto else 1.0)
    if problem:
        return problem, needs
    try:
        copier.reserve(size)
    except OSError as error:
        problem = (
            f"no memory for {needed_bytes} bytes of rank {place.rank} on node {place.node} ({error.strerror})"
        )
    return next(filter(None, gather_values(problem, everyone)), ""), needs


def _kept_bytes() -> int:
    """Return the size of the copies, of another node's ranks, that this node keeps from an earlier start."""
    kept = 0
    for path in (path for paths in context.part(HeldCopies).paths.values() for path in paths):
        with contextlib.suppress(OSError):
            kept += Path(path).stat().st_blocks * 512
    return kept

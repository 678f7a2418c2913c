"""Compares the loaded state of all ranks with the agreed state of the checkpoint.

The check notices a loader that leaves state out, or loads the state of another rank or step, also with intact
files. State is not compared if the user has chosen not to load the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from adaptor.checkpoint import manifest
from adaptor.checkpoint.training_state import TrainingState
from adaptor.errors import CheckpointError
from adaptor.protocol.messages import Share
from adaptor.replica.group import gather_values
from adaptor.verification import state_sums
from adaptor.verification.agreed_state import AgreedState, differences, in_words, other_layouts


@dataclass(frozen=True)
class LoadResult:
    """The result of a comparison, equal on all ranks.

    Attributes:
        problem: the differences, in a line; "": none
        not_compared: the groups that could not be compared, with the reason
    """

    problem: str = ""
    not_compared: tuple[str, ...] = ()


def agreed_of(folder: Path) -> AgreedState | None:
    """Return the agreed state of the checkpoint in `folder`, as rank 0 reads the manifest; None: no agreed
    state. Collective.
    """
    agreed: list[AgreedState | None] = [None]
    if dist.get_rank() == 0:
        with contextlib.suppress(CheckpointError):  # the check before the load has reported the problem
            agreed = [manifest.read(folder).state]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def compare(
    folder: Path,
    agreed: AgreedState,
    state: TrainingState,
    shares: Sequence[Share],
    *,
    has_optimizer: bool,
) -> LoadResult:
    """Compare the memory of all ranks with the agreed state of a checkpoint. Collective.

    Args:
        folder: of the checkpoint.
        agreed: the agreed state of the checkpoint.
        state: of the rank, loaded.
        shares: of the rank.
        has_optimizer: whether the state of the optimizer was to be loaded, too.
    """
    gathered = gather_values(state_sums.held_by(state, (), shares, whole_weights=True))
    omitted = other_layouts(agreed, gathered)
    different = [] if omitted else differences(agreed, gathered, has_optimizer=has_optimizer)
    problem = (
        f"{folder}: the ranks have loaded another state than that on which the holders of step {agreed.step}"
        f" agreed: {in_words(different)}"
        if different
        else ""
    )
    return LoadResult(problem, tuple(omitted))

"""Compares what all ranks have loaded with the agreed state of the checkpoint.

A loader that leaves something out, or loads that of another rank or step, is found, whatever the files have.
State that the user has asked not to load is not compared.
"""

from __future__ import annotations

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
        problem: what differs, in a line; "" if nothing differs
        not_compared: the groups that could not be compared, with the reason
    """

    problem: str = ""
    not_compared: tuple[str, ...] = ()


def agreed_of(folder: Path) -> AgreedState | None:
    """Return the agreed state of the checkpoint in `folder`, as rank 0 sees it; None: it has none.

    Collective.
    """
    told: list[AgreedState | None] = [None]
    if dist.get_rank() == 0:
        try:
            told = [manifest.read(folder).state]
        except CheckpointError:  # the check before the load has told the problem
            pass
    dist.broadcast_object_list(told, src=0)
    return told[0]


def compare(
    folder: Path,
    agreed: AgreedState,
    state: TrainingState,
    shares: Sequence[Share],
    *,
    has_optimizer: bool,
) -> LoadResult:
    """Compare what all ranks have in memory with the agreed state of a checkpoint. Collective.

    Args:
        folder: of the checkpoint.
        agreed: its state.
        state: of the rank, loaded.
        shares: of the rank.
        has_optimizer: whether the state of the optimizer was to be loaded, too.
    """
    gathered = gather_values(state_sums.held_by(state, (), shares, whole_weights=True))
    omitted = other_layouts(agreed, gathered)
    found = [] if omitted else differences(agreed, gathered, has_optimizer=has_optimizer)
    problem = (
        f"{folder}: the ranks have loaded another state than that on which the holders of step {agreed.step}"
        f" agreed: {in_words(found)}"
        if found
        else ""
    )
    return LoadResult(problem, tuple(omitted))

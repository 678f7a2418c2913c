"""A drill in the running job: could the state be saved now without some rank, bit for bit?

Between two steps a rank counts as lost. The controller's own function plans last words without the rank, and
the shards of the planned holders are compared, by their sums, with the shards in the memory of the lost rank.
Nothing is written, and no tensor is sent: the connections and the disk of a dump are not tried.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from adaptor.controller.plan import NoPlan, groups_of, plan
from adaptor.protocol.messages import BoardRecord, Drilled, Share
from adaptor.replica import group
from adaptor.verification import state_sums
from adaptor.verification.agreed_state import HeldState


def hold(step: int, trainee: Any, record: BoardRecord, everyone: dist.ProcessGroup) -> Drilled | None:
    """Hold a drill behind `step`; return the result on rank 0, or None after a step without an update.

    Collective.

    Args:
        step: the newest step, finished on all ranks.
        trainee: of the rank (`MegatronTrainee`).
        record: the board of the rank.
        everyone: all ranks.

    Raises:
        RuntimeError: a rank is gone.
    """
    own_state = state_sums.held_by(trainee.state, trainee.mirrors, trainee.shares)
    gathered = group.gather_all((record, trainee.shares, own_state), everyone)
    if dist.get_rank(everyone):
        return None
    if any(board.finished != step for board, _, _ in gathered):
        return None
    lost = random.Random(step).randrange(len(gathered))
    boards = {rank: board for rank, (board, _, _) in enumerate(gathered)}
    shares = {rank: rank_shares for rank, (_, rank_shares, _) in enumerate(gathered)}
    states = [state for _, _, state in gathered]
    return Drilled(0, step, lost, problem(step, lost, boards, shares, states))


def problem(
    step: int,
    lost: int,
    boards: Mapping[int, BoardRecord],
    shares: Mapping[int, Sequence[Share]],
    states: Sequence[HeldState],
) -> str:
    """Return why `step` could not be saved bit for bit without rank `lost`; "": no problem.

    Args:
        step: the newest step, finished on all ranks.
        lost: the rank that counts as lost.
        boards, shares, states: of all ranks, by rank.
    """
    for state in states:
        if state.problem:
            return state.problem
    survivors = {rank: board for rank, board in boards.items() if rank != lost}
    chosen = plan(groups_of(shares), survivors, only=step)
    if isinstance(chosen, NoPlan):
        return chosen.reason
    sums = {
        (rank, name, shard.index): shard.sums
        for rank, state in enumerate(states)
        for shard in state.shards
        for name in shard.groups
    }
    for order in chosen.groups:
        for index, holder in enumerate(order.holders):
            saved, lost_sums = sums[holder, order.group, index], sums.get((lost, order.group, index), {})
            for key in sorted(saved.keys() & lost_sums.keys()):
                if saved[key] != lost_sums[key]:
                    shard_name = f"shard {index} of {order.group}"
                    return f"ranks {holder} and {lost} hold different bits of {key} of {shard_name}"
    return ""

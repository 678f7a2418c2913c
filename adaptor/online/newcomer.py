"""Fetches from survivors the record of the step and the shards of a process that takes another's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from adaptor.checkpoint.step_record import StepRecord
from adaptor.online import state, transfer
from adaptor.online.loop import Loop
from adaptor.online.transfer import TransferChannel
from adaptor.protocol.messages import Regroup, Replacement
from adaptor.worker.pace import Measures


class TwinAnswer(NamedTuple):
    """The data received by a newcomer from its twin.

    Attributes:
        record: of the step
        answers: the answers to a newcomer's start-up questions
        measures: durations of steps and phases (`Pace.measures`)
        is_copied: whether all ranks make copies in host memory
    """

    record: StepRecord
    answers: Mapping[str, Any]
    measures: Measures
    is_copied: bool


def ask_record(order: Regroup, rank: int, line_to: Callable[[int], TransferChannel]) -> TwinAnswer:
    """Ask the twin of `rank` where the job is.

    Args:
        order: names the sources.
        rank: this rank.
        line_to: connects to a survivor.
    """
    answer = transfer.ask_record(line_to(_replacement(order, rank).twin))
    return TwinAnswer(state.record_of(answer), answer["answers"], answer["measures"], answer["is_copied"])


def fetch(order: Regroup, rank: int, line_to: Callable[[int], TransferChannel], loop: Loop) -> None:
    """Receive the shards updated by this rank, and the untrained weights.

    Args:
        order: the order to join.
        rank: this rank.
        line_to: connects to another rank.
        loop: the training loop, which holds the state.

    Raises:
        TransferError: no rank gives a shard, or the shard does not fit.
        CannotRejoinError: the received state is not finite.
    """
    own_replacement = _replacement(order, rank)
    givers = {(source.group, source.index): source.source for source in own_replacement.sources}
    own_shards_by_index = state.own_shards(loop.optimizer())
    for index, optimizer in own_shards_by_index:
        giver = givers.get((loop.group(), index))
        if giver is None:
            raise transfer.TransferError(f"no survivor sends shard {index}")
        transfer.ask_shard(line_to(giver), index, optimizer)
    weights = state.frozen(loop.model())
    if weights:
        transfer.ask_frozen(line_to(own_replacement.twin), weights)
    for source in {own_replacement.twin, *givers.values()}:
        transfer.end(line_to(source))
    state.require_finite(optimizer for _, optimizer in own_shards_by_index)


def _replacement(order: Regroup, rank: int) -> Replacement:
    return next(replacement for replacement in order.replaced if replacement.rank == rank)

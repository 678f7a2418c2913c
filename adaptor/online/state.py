"""The state of a step: what a newcomer asks for and a survivor gives; how a survivor goes back to the step.

`Loop` is the interface of a framework's training loop for online recovery: the loop can be called again from
the end of a step.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from adaptor.checkpoint import shards, step_record
from adaptor.checkpoint.shards import all_finite
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee, ProtectedState
from adaptor.devices.device import Device
from adaptor.online import transfer
from adaptor.online.transfer import TransferChannel, TransferError
from adaptor.protocol.messages import Regroup, Replacement
from adaptor.replica import optimizer_state
from adaptor.worker.pace import Measures
from adaptor.worker.processor import CannotRejoinError


class Loop(Protocol):
    """A framework's training loop, which can be called again. All on the main thread.

    Attributes:
        protected: the state that the loop trains
    """

    protected: ProtectedState

    def answers(self, step: int) -> Mapping[str, Any]:
        """Return what a newcomer, which joins at `step`, would have asked of other ranks at its start."""

    def settle(self, step: int) -> None:
        """Forget what an exception has left half done; the data since `step` will be given again."""

    def agree(self, step: int) -> None:
        """Learn whether a rank has left what comes after `step`: collective, over the new groups."""

    def put_back(self, record: StepRecord) -> None:
        """Set the framework's counters to the values of the step, as the loop reads them when called."""

    def finish_step(self) -> None:
        """Finish the work after the step (evaluation, a save) where a rank has not finished."""

    def gather_weights(self) -> None:
        """Make the model's weights from main params: collective, over the new groups."""

    def copied_steps(self) -> tuple[int, ...]:
        """Return the steps of this rank's copies in host memory to which the loop can go back; any thread."""
        return ()

    def put_back_copy(self, step: int) -> StepRecord:
        """Give the optimizer the state of `step` from this rank's copy in host memory; return the record."""
        raise CannotRejoinError("its loop does not go back to copies in host memory")


def own_shards(optimizer: Any) -> list[tuple[int, torch.optim.Optimizer]]:
    """Return the index and optimizer of each shard updated here, without copies of others' shards."""
    return [(shard.index, shard.optimizer) for shard in shards.held_shards(optimizer)]


class Given:
    """The state of a step as given by a survivor.

    Args:
        record: None: the newcomer has its own, from a copy in host memory.
        past: the step is before the last update, and so in the local copy.
        answers: returns the answers to a newcomer's start-up questions.
        is_copied: whether this rank, and so every rank, makes copies in host memory.
    """

    def __init__(
        self,
        trainee: MegatronTrainee,
        record: StepRecord | None,
        past: bool,
        answers: Callable[[], Mapping[str, Any]],
        measures: Measures,
        is_copied: bool,
    ) -> None:
        self.device: Device = trainee.device
        self._trainee = trainee
        self._record = record
        self._answers = answers
        self._measures = measures
        self._is_copied = is_copied
        self._optimizer, self._mirrors = trainee.state.optimizer, trainee.mirrors
        if past:
            assert trainee.local_copy is not None
            self._optimizer, self._mirrors = trainee.local_copy.optimizer, trainee.local_copy.mirrors

    def record(self) -> Any:
        return {
            "record": self._record and dict(vars(self._record)),
            "answers": dict(self._answers()),
            "measures": self._measures,
            "is_copied": self._is_copied,
        }

    def shard(self, index: int) -> torch.optim.Optimizer:
        for shard in shards.held_shards(self._optimizer, self._mirrors):
            if shard.index == index:
                return shard.optimizer
        raise TransferError(f"shard {index} is not here")

    def frozen(self) -> Sequence[torch.Tensor]:
        return frozen(self._trainee.state.model)


def frozen(model: Sequence[Any]) -> list[torch.Tensor]:
    """Return the untrained weights, which no optimizer gives."""
    return [param for chunk in model for param in chunk.parameters() if not param.requires_grad]


def record_of(answer: Mapping[str, Any]) -> StepRecord:
    """Return the record that `Given.record` has put into words."""
    fields = dict(answer["record"])
    for name in ("groups", "scalers", "buffers"):
        fields[name] = tuple(fields[name])
    return StepRecord(**fields)


def digest(record: StepRecord, count: int) -> str:
    """Return a checksum of the values that are equal on all ranks: step, counters, schedule, and the number
    of groups made by the job (torch derives the next group's name from the number).
    """
    schedule = dict(record.scheduler or {})
    digest_fields = (record.step, sorted(record.counters.items()), sorted(schedule.items()), count)
    return hashlib.sha256(repr(digest_fields).encode()).hexdigest()[:16]


def restore(trainee: MegatronTrainee, record: StepRecord) -> None:
    """Give the live objects what belongs to the step of `record` besides shards, weights, counters and
    random states."""
    state = trainee.state
    if record.scheduler is not None and state.scheduler is not None:
        schedule_values = vars(state.scheduler)
        schedule_values.update(
            {name: value for name, value in record.scheduler.items() if name in schedule_values}
        )
    chain = step_record.chain(state.optimizer)
    for chained_optimizer, groups, scaler in zip(chain, record.groups, record.scalers, strict=True):
        for group, scalars in zip(chained_optimizer.param_groups, groups, strict=True):
            group.update(scalars)
        if scaler is not None:
            chained_optimizer.grad_scaler.load_state_dict(dict(scaler))
    state.buffers.put_back(record.buffers)


def require_finite(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Last words replace a shard that is not finite by another copy; going on would spread the shard to all
    ranks.

    Raises:
        CannotRejoinError: the optimizer state of this rank is not finite.
    """
    for optimizer in optimizers:
        values = itertools.chain(optimizer_state.values_of(optimizer), optimizer_state.tensors_of(optimizer))
        if not all(map(all_finite, values)):
            raise CannotRejoinError("its optimizer state is not finite")


class TwinAnswer(NamedTuple):
    """The data received by a newcomer from its twin.

    Attributes:
        answers: the answers to a newcomer's start-up questions
        measures: durations of steps and phases (`Pace.measures`)
        is_copied: whether all ranks make copies in host memory
    """

    record: StepRecord
    answers: Mapping[str, Any]
    measures: Measures
    is_copied: bool


def ask_twin(
    order: Regroup, rank: int, line_to: Callable[[int], TransferChannel], own: StepRecord | None = None
) -> TwinAnswer:
    """Ask the twin of `rank` where the job is; `own`: the record, where this process has it from a copy."""
    answer = transfer.ask_record(line_to(_replacement(order, rank).twin))
    record = record_of(answer) if own is None else own
    return TwinAnswer(record, answer["answers"], answer["measures"], answer["is_copied"])


def end_talk(order: Regroup, rank: int, line_to: Callable[[int], TransferChannel]) -> None:
    """Tell the twin of `rank` that nothing more is needed."""
    transfer.end(line_to(_replacement(order, rank).twin))


def fetch_shards(order: Regroup, rank: int, line_to: Callable[[int], TransferChannel], loop: Loop) -> None:
    """Receive the shards updated by this rank, and the untrained weights.

    Raises:
        TransferError: no rank gives a shard, or the shard does not fit.
        CannotRejoinError: the received state is not finite.
    """
    own_replacement, protected = _replacement(order, rank), loop.protected
    givers = {(source.group, source.index): source.source for source in own_replacement.sources}
    own_shards_by_index = own_shards(protected.optimizer)
    for index, optimizer in own_shards_by_index:
        giver = givers.get((protected.group, index))
        if giver is None:
            raise transfer.TransferError(f"no survivor sends shard {index}")
        transfer.ask_shard(line_to(giver), index, optimizer)
    weights = frozen(protected.model)
    if weights:
        transfer.ask_frozen(line_to(own_replacement.twin), weights)
    for source in {own_replacement.twin, *givers.values()}:
        transfer.end(line_to(source))
    require_finite(optimizer for _, optimizer in own_shards_by_index)


def _replacement(order: Regroup, rank: int) -> Replacement:
    return next(replacement for replacement in order.replaced if replacement.rank == rank)

"""Megatron's training state, as the worker's session needs it (`protocol.state_provider.Trainee`)."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptor import context, devices, output
from adaptor.checkpoint import disk, layer_wise, shards, state_writer, step_record
from adaptor.checkpoint.format_torch_dist import Sharding
from adaptor.checkpoint.local_copy import LocalCopy, local_copy_of
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.step_record import LoaderStates, RandomStates, StepRecord
from adaptor.checkpoint.training_state import (
    CheckpointContents,
    CheckpointPlacement,
    FormatFactory,
    TrainingState,
    place_of,
    unwrapped,
)
from adaptor.devices.device import Device
from adaptor.errors import CheckpointError, StepError, UnsupportedError
from adaptor.protocol import naming
from adaptor.protocol.environment import WorkerPlace
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.state_provider import DumpRun, NotFiniteError
from adaptor.replica import choice, optimizer_state, twin
from adaptor.replica.choice import ReplicaChoice
from adaptor.replica.group import barrier
from adaptor.replica.mirror import Mirror
from adaptor.replica.ring import Ring, stride
from adaptor.verification.given_sums import GivenSums


@dataclass(frozen=True)
class _PreUpdateSnapshot:
    """The changes of a step at the door, and the amounts by which the framework moves the rest later."""

    scalers: tuple[Mapping[str, Any] | None, ...]
    rng: Sequence[Mapping[str, Any]]
    buffers: tuple[torch.Tensor | None, ...]
    rerun: Mapping[str, Any] | None
    loaders: Mapping[str, bytes]
    growth: Mapping[str, int | float]
    increment: int
    also: Mapping[str, Any]


def device_of(model: Sequence[Any], optimizer: Any) -> Device:
    """Return the device that has the main params of `optimizer` and the weights of the chunks of `model`."""
    mains = (
        param for inner_optimizer in step_record.inner(optimizer) for param in twin.params(inner_optimizer)
    )
    weights = (param for chunk in model for param in chunk.parameters())
    return devices.of(chain(mains, weights), context.get().settings.device)


@dataclass(frozen=True)
class MegatronTrainee:
    """The training state of a rank of a Megatron job: the `Trainee` that a dump reads.

    Attributes:
        counters: the current counters, under the framework's names
        growth: the amount by which the current step moves each counter
        increment: the number of samples by which the step moves the scheduler
        mirrors: per optimizer of the chain: the copy of a neighbour's shard, or None
        local_copy: of the state before an update; None: with the barrier no rank has to go back
        also: further keywords of the framework when it moves the scheduler
        shares_by_rank: the shards of all ranks, with TTP_VERIFY_EVERY
        survives: the possible losses that the job survives, in words; on rank 0
    """

    state: TrainingState
    save_folder: str
    shares: tuple[Share, ...]
    random: RandomStates
    counters: Callable[[], Mapping[str, int | float]]
    growth: Callable[[], Mapping[str, int | float]]
    increment: Callable[[], int]
    barrier: Callable[[], None]
    mirrors: tuple[Mirror | None, ...] = ()
    rerun: Callable[[], Mapping[str, Any] | None] = lambda: None
    local_copy: LocalCopy | None = None
    also: Callable[[], Mapping[str, Any]] = dict
    survives: str = ""
    shares_by_rank: Sequence[tuple[Share, ...]] = ()
    loaders: LoaderStates = field(default_factory=LoaderStates)

    @property
    def in_parts(self) -> bool:
        return isinstance(self.state.format, Sharding)

    @property
    def has_local_copy(self) -> bool:
        return self.local_copy is not None

    @cached_property
    def device(self) -> Device:
        """First asked for on the main thread, when training begins."""
        return device_of(self.state.model, self.state.optimizer)

    def copy_state(self) -> None:
        assert self.local_copy is not None
        self.local_copy.take()

    def exchange(self) -> None:
        for mirror in filter(None, self.mirrors):
            mirror.exchange()
        self.device.catch_up()

    def update_replicas(self) -> None:
        for mirror in filter(None, self.mirrors):
            mirror.update()

    def after_evaluation(self) -> None:
        self.state.buffers.histories.after_evaluation()

    def take_record(self, step: int) -> StepRecord:
        state = self.state
        return step_record.take(
            step,
            self.counters(),
            state.optimizer,
            state.scheduler,
            self.random.take(),
            state.buffers.take(between_steps=True),
            self.rerun(),
            self.loaders.take(),
        )

    def snapshot_before_update(self) -> _PreUpdateSnapshot:
        return _PreUpdateSnapshot(
            step_record.take_scalers(self.state.optimizer),
            self.random.exchange(),
            self.state.buffers.take(),
            self.rerun(),
            self.loaders.exchange(),
            dict(self.growth()),
            self.increment(),
            dict(self.also()),
        )

    def derive(self, record: StepRecord, door: _PreUpdateSnapshot, updated: bool) -> StepRecord:
        return step_record.advance(
            record,
            updated=updated,
            scheduler=self.state.scheduler,
            increment=door.increment,
            growth=door.growth,
            scalers=door.scalers,
            rng=door.rng,
            buffers=door.buffers,
            rerun=door.rerun,
            loaders=door.loaders,
            also=door.also,
        )

    def require_as_derived(self, taken: StepRecord, derived: StepRecord) -> None:
        if taken.scheduler is None or derived.scheduler is None:
            return
        samples, expected = taken.scheduler["num_steps"], derived.scheduler["num_steps"]
        if samples != expected:
            raise StepError(
                f"after step {taken.step} the scheduler is at {samples} samples, and not at {expected}:"
                " samples_per_step of adaptor.protect must be the increment of scheduler.step, which is"
                " called once after each update, and not after a step that fp16 has skipped"
            )

    def has_state(self) -> bool:
        # Other optimizers save their state as it is: plain SGD has nothing besides the params.
        sharded = [
            sharded_optimizer
            for sharded_optimizer in step_record.chain(self.state.optimizer)
            if shards.is_sharded(sharded_optimizer)
        ]
        return not sharded or any(sharded_optimizer.optimizer.state for sharded_optimizer in sharded)

    def dump(self, record: StepRecord, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        folder = Path(run.folder)
        if not (naming.is_temporary(folder.name) and disk.is_same(folder.parent, Path(self.save_folder))):
            raise CheckpointError(
                f"{folder}: is no folder for last words in {self.save_folder}, where this job saves"
            )
        if run.rank == order.writer and not disk.is_folder(folder):
            raise CheckpointError(
                f"{folder}: is not there on node {context.part(WorkerPlace).node} ({platform.node()}): last"
                " words of several nodes need a --save folder that they share"
            )
        state, mirrors = self.state, self.mirrors
        if run.past:
            assert self.local_copy is not None
            state = replace(state, optimizer=self.local_copy.optimizer, live=state.optimizer)
            mirrors = self.local_copy.mirrors
        return write_group(state, mirrors, self.device, record, order, run)


@dataclass(frozen=True, kw_only=True)
class ProtectedState:
    """The state of a job on this rank, as a script or the adapter of its framework describes it.

    Attributes:
        model: its chunks
        save: the folder of the checkpoints
        group: a name for the ranks with the model of this rank: the folder of their files in a checkpoint
        make_format: makes the format of last words
        increment: see `MegatronTrainee`
        random: makes the random states; collective
        sizes: returns the size of the data-parallel group, context parallel included, and the number of ranks
            with the same experts
        may_copy: whether the job may have copies in host memory (TTP_HOST_COPY)
        args, extra, beside: see `TrainingState`; `args` as on the rank that may write
        on_top: returns further files of the checkpoint, in every format; collective
        further_fields: returns further fields of `MegatronTrainee`; collective
    """

    model: Sequence[Any]
    optimizer: Any
    scheduler: Any
    save: str | Path
    group: str
    make_format: FormatFactory
    contents: CheckpointContents
    increment: Callable[[], int]
    random: Callable[[], RandomStates]
    sizes: Callable[[], tuple[int, int]]
    may_copy: bool = True
    args: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)
    on_top: Callable[[TrainingState, CheckpointPlacement, dist.ProcessGroup], Mapping[str, bytes]] = (
        lambda *_: {}
    )
    further_fields: Callable[[dist.ProcessGroup], Mapping[str, Any]] = lambda _everyone: {}

    def at(self, place: CheckpointPlacement) -> TrainingState:
        """Return this rank's part of a checkpoint, but for its format and the files on top."""
        local_rank = place.first % context.part(WorkerPlace).local_size
        return TrainingState(
            model=[unwrapped(chunk) for chunk in self.model],
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            folder=place.group,
            args=self.args,
            args_overrides={"rank": place.first, "local_rank": local_rank},
            extra=self.extra,
            stored=place.stored,
            beside=self.beside,
            contents=self.contents,
            writes_common=place.first == 0,
        )

    def place(
        self, everyone: dist.ProcessGroup, mirrors: Sequence[Mirror | None] = ()
    ) -> CheckpointPlacement:
        """Find this rank's place in checkpoints: collective."""
        mirrors = mirrors or (None,) * len(step_record.chain(self.optimizer))
        return place_of(self.optimizer, mirrors, self.group, everyone, copies=self.may_copy)

    def placed(
        self, everyone: dist.ProcessGroup, mirrors: Sequence[Mirror | None] = ()
    ) -> tuple[TrainingState, CheckpointPlacement]:
        """Return this rank's part of a checkpoint, and its place there: collective."""
        place = self.place(everyone, mirrors)
        state = self.at(place)
        state = replace(state, on_top=self.on_top(state, place, everyone))
        state = replace(state, format=self.make_format(state, place.first))
        if layer_wise.has_owners(self.optimizer) and not isinstance(state.format, Sharding):
            raise UnsupportedError(layer_wise.IN_TORCH)
        return state, place

    def trainee(self, everyone: dist.ProcessGroup, is_repeated: bool) -> MegatronTrainee:
        """Return the training state of this rank: collective.

        Args:
            everyone: the adaptor's group of all ranks.
            is_repeated: the user has been told of replicas and copies.
        """
        mirrors = replicas_of(self.optimizer, *self.sizes(), is_repeated)
        state, place = self.placed(everyone, mirrors)
        return MegatronTrainee(
            state=state,
            save_folder=str(Path(self.save).resolve()),
            shares=place.shares,
            random=self.random(),
            counters=self.contents.counters,
            growth=self.contents.growth,
            increment=self.increment,
            barrier=lambda: barrier(everyone),
            mirrors=mirrors,
            local_copy=local_copy_of(self.optimizer, mirrors, is_repeated),
            survives=place.survives,
            shares_by_rank=place.shares_by_rank,
            **self.further_fields(everyone),
        )


def write_group(
    state: TrainingState,
    mirrors: Sequence[Mirror | None],
    device: Device,
    record: StepRecord,
    order: GroupOrder,
    run: DumpRun,
) -> tuple[FileEntry, ...]:
    """Do a rank's part of saving a group, as `Trainee.dump` describes it."""
    ranks = order.ranks
    holders = iter([ranks.index(holder) for holder in order.holders])
    inner = step_record.chain(state.optimizer)
    counts = [shards.shard_of(inner_optimizer)[1] for inner_optimizer in inner]
    if len(order.holders) < sum(counts):  # a group of a layer-wise optimizer that needs no shards
        counts = [int(not shards.is_sharded(inner_optimizer)) for inner_optimizer in inner]

    def on_not_finite(subject: str, places: Sequence[int]) -> None:
        if not run.as_is:
            raise NotFiniteError(subject, tuple(sorted({ranks[place] for place in places})))

    exchange = Exchange(
        group=run.connect(ranks) if len(ranks) > 1 else None,
        rank=ranks.index(run.rank),
        sources=[list(islice(holders, count)) for count in counts],
        mirrors=mirrors,
        device=device,
        progress=run.progress,
        cancelled=run.cancelled,
        on_not_finite=on_not_finite,
        folder=Path(run.folder) if run.in_place else None,
    )
    with device.beside():
        given = None
        if context.get().settings.verify_saves:
            given = GivenSums(state, exchange, run.rank)
            exchange = replace(exchange, observer=given)
        if run.rank != order.writer:
            if given is not None:
                given.send(ranks.index(order.writer))
            state_writer.send_shards(state, ranks.index(order.writer), exchange)
            return ()
        agreed = None if given is None else given.agreed(ranks, record.rng)
        written = state_writer.write_files(state, record, exchange, Path(run.folder), run.attempt, agreed)
        if state.writes_common:
            step_record.write_loader_states(
                getattr(state.args, "dataloader_save", ""), record.step, record.loaders
            )
    run.remark(written.not_finite)
    return written.files


def replicas_of(
    optimizer: Any, size: int, experts: int, is_repeated: bool = False
) -> tuple[Mirror | None, ...]:
    """Make the copies of neighbours' shards, one per optimizer of the chain, None where no copy is needed.

    Collective, after the state is loaded. Rank 0 prints the replicas of the job, unless `is_repeated`.
    `size`: of the data-parallel group, context parallel included; `experts`: ranks with the same experts.
    Raises UnsupportedError.
    """
    for torchs in step_record.inner(optimizer):
        optimizer_state.require_protected(torchs)
    inner = step_record.chain(optimizer)
    sharded = [inner_optimizer for inner_optimizer in inner if shards.is_sharded(inner_optimizer)]
    shard_count = size // sharded[0].data_parallel_group.size() if sharded else 1
    sizes = [inner_optimizer.data_parallel_group.size() for inner_optimizer in sharded]
    has_owners, replica_choice = layer_wise.has_owners(optimizer), context.part(ReplicaChoice)
    if has_owners:
        replica_choice.require_none(choice.LONE_MATRICES)
    if sharded and not has_owners and replica_choice.wants_mirrors(size, shard_count, experts):
        mirrors = tuple(
            mirror_of(inner_optimizer)
            if inner_optimizer in sharded and inner_optimizer.data_parallel_group.size() > 1
            else None
            for inner_optimizer in inner
        )
    else:
        mirrors = (None,) * len(inner)
    if dist.get_rank() == 0 and not is_repeated:
        elements = sum(
            param.numel()
            for inner_optimizer in sharded
            for group in inner_optimizer.optimizer.param_groups
            for param in group["params"]
        )
        taken = sum(mirror.nbytes for mirror in mirrors if mirror is not None)
        every = context.get().settings.host_copy
        lone = choice.LONE_EXPERTS if 1 in sizes else ""
        description = choice.describe(
            size,
            shard_count,
            has_owners or bool(sharded),
            elements,
            taken,
            choice.LONE_MATRICES if has_owners else lone,
            every,
        )
        output.tell(f"[ttp] {description}", to="stdout")
    return mirrors


def mirror_of(optimizer: Any) -> Mirror:
    """Make the copy of the neighbour's shard of a distributed optimizer: collective in its group."""
    storage = optimizer_state.storage_of(optimizer)
    is_on_host = storage is not None and storage.is_on_host
    return Mirror(
        optimizer.optimizer,
        shards.places(optimizer),
        Ring(optimizer.data_parallel_group, apart(optimizer)),
        torch.device("cpu") if is_on_host else optimizer.buffers[0].grad_data.device,
    )


def apart(optimizer: Any) -> int:
    """Return the distance in its group between a rank and the rank with the copy of its shard."""
    local = context.part(WorkerPlace).local_size
    return stride([rank // local for rank in dist.get_process_group_ranks(optimizer.data_parallel_group)])

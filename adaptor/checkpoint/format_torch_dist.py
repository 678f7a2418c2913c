"""Megatron's sharded format `torch_dist`, written by one rank of each group, without a collective.

What is saved is built by the framework's own `sharded_state_dict`s. They are asked in the place of the first
rank of the group, which the framework would have let write: only its replica ids differ, which the ranks told
each other when training began. And stand-ins for the distributed optimizers are asked: with the whole state,
in a data-parallel group of one rank, an optimizer gathers nothing. How a checkpoint is cut does not matter to
who loads it, so whatever layout could load the framework's can load ours.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from adaptor.checkpoint import dcp, dcp_layout, integrity, shards
from adaptor.checkpoint.format_torch import TorchFormat, save
from adaptor.checkpoint.optimizer_stand_ins import (
    REPLACED,
    gathered_stand_in,
    plain_stand_in,
    state_without_memory,
)
from adaptor.checkpoint.planned_tensors import CannotBePlanned, PlannedTensors, Source
from adaptor.checkpoint.sequence_layout import SequenceLayout
from adaptor.checkpoint.training_state import CheckpointFormat, Files, TrainingState
from adaptor.checkpoint.weights import TensorSlot
from adaptor.errors import CheckpointError, UnsupportedError

# The kinds of optimizer state that stand-ins can build; None without the distributed optimizer.
ONE_INSTANCE = "dp_zero_gather_scatter"
KINDS = (None, "fully_reshardable", "dp_reshardable", "fully_sharded_model_space", ONE_INSTANCE)

# Where a version of Megatron-LM says how its checkpoints are sharded (since 0.13).
_METADATA = "_build_sharded_state_dict_metadata"


@dataclass(frozen=True)
class Sharding:
    """The format `torch_dist` of one rank, a `CheckpointFormat`.

    Attributes:
        first: the rank in whose place its group is written
        metadata: what the framework tells all its `sharded_state_dict`s
        marks: key and replica id of whatever `first` saves of its model, in order
        random: ShardedObjects without data: where the random states of the group are saved
    """

    first: int
    metadata: Mapping[str, Any]
    marks: tuple[tuple[str, Any], ...]
    random: tuple[Any, ...]

    def model(self, chunks: Mapping[str, Any]) -> dict[str, Any]:
        tree = _model(chunks, self.metadata)
        bases = list(_bases(tree))
        if [base.key for base in bases] != [key for key, _ in self.marks]:
            raise CheckpointError("the model is not the one that it was when training began")
        for base, (_, replica) in zip(bases, self.marks, strict=True):
            base.replica_id = replica
        return tree

    def places(self, saved: Any) -> list[TensorSlot]:
        return [
            (base.key, base.data, partial(setattr, base, "data"))
            for base in _bases(saved)
            if isinstance(base.data, torch.Tensor)
        ]

    def optimizer(
        self, state: TrainingState, model: Mapping[str, Any], states: Sequence[Any], gathered: Sequence[Any]
    ) -> Any:
        chained_states = [
            plain_stand_in(optimizer, live, plain)
            if whole_state is None
            else gathered_stand_in(optimizer, plain, whole_state, stored)
            for (optimizer, live, stored), plain, whole_state in zip(
                state.chained, states, gathered, strict=True
            )
        ]
        whole_optimizer = chained_states[0]
        if hasattr(state.optimizer, "chained_optimizers"):
            whole_optimizer = copy.copy(state.optimizer)
            whole_optimizer.chained_optimizers = chained_states
        return whole_optimizer.sharded_state_dict(dict(model), metadata=dict(self.metadata))

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any:
        return [dataclasses.replace(place, data=list(states)) for place in self.random]

    def files(self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any]) -> Files:
        part, _, files = self._part(state, body)
        if part.has_data:
            files[part.data_file] = part.write_data
        files[part.part_file] = part.write_part
        return integrity.with_part(files, self.first) if _has_integrity(state) else files

    def planned_tensors(self) -> PlannedTensors:
        return PlannedTensors("meta")

    def planned_files(
        self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any], planned: PlannedTensors
    ) -> tuple[dict[str, SequenceLayout[Source]], Files]:
        objects = dcp_layout.PlannedObjects(planned)
        part, common, files = self._part(state, body, objects.token_for)
        if not part.has_data:
            raise CannotBePlanned("this rank has nothing to save")
        pickled = io.BytesIO()
        torch.save(common, pickled)
        dcp_layout.require_no_stand_in(pickled.getvalue(), "what is common to all ranks")
        layout = dcp_layout.lay_out(part, planned, objects)
        files[part.part_file] = part.write_part
        if _has_integrity(state):
            digest = integrity.digest()
            layout.reader = digest.update
            files = integrity.with_part(files, self.first, {part.data_file: digest.hexdigest})
        return {part.data_file: layout}, files

    def _part(
        self, state: TrainingState, body: dict[str, Any], saved_as: Callable[[Any], Any] = lambda value: value
    ) -> tuple[dcp.RankPart, Any, Files]:
        """Return the part of this rank, what is common to all ranks, and the small files.

        Args:
            state: the training state.
            body: what is saved.
            saved_as: returns what is pickled in the place of the value of an object.
        """
        from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
        from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

        # As far as it can be written: later versions put a process group there.
        body["content_metadata"] = {
            name: value for name, value in self.metadata.items() if name != "dp_cp_group"
        }
        sharded, common = save_preprocess(body, False)
        for base in _bases(sharded):
            if isinstance(base, ShardedObject):
                base.data = saved_as(base.data)
        config = dataclasses.asdict(CheckpointingConfig("torch_dist"))
        files: Files = {}
        if "common_backend" not in config:  # later versions know one more object, in the place of a file
            sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=self.first)
        elif self.first == 0:
            files[COMMON_STATE_FNAME] = partial(save, common)
        if self.first == 0:
            files[CONFIG_FNAME] = lambda file: file.write(json.dumps(config).encode())
        return dcp.RankPart(self.first, _planner(sharded)), common, files


def _has_integrity(state: TrainingState) -> bool:
    return bool(getattr(state.args, "verify_integrity", False))


def _planner(sharded: Any) -> Any:
    """The framework's own, set up with what this rank saves."""
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    by_key, _, _ = strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = strategy.MCoreSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(strategy.mcore_to_pyt_state_dict(by_key), is_coordinator=True)
    return planner


def _model(chunks: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: chunk.sharded_state_dict(metadata=dict(metadata)) for key, chunk in chunks.items()}


def _bases(tree: Any) -> Iterator[Any]:
    """Yield the sharded entries of a state dict: tensors, factories of tensors, objects."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    return (value for value in nested_values(tree) if isinstance(value, ShardedBase))


def make(state: TrainingState, first: int) -> CheckpointFormat:
    """See `training_state.FormatFactory`.

    Versions that do not say how state is sharded get the format `torch`, which they load as well.

    Raises:
        UnsupportedError: nobody has said how the state is sharded.
    """
    contents = state.contents
    is_described = contents.metadata is not None and contents.random is not None
    if state.args is None and not is_described:
        raise UnsupportedError(
            "format is 'torch_dist': adaptor.protect needs contents with metadata and random, which say how"
            " state is sharded; give them, or leave format out"
        )
    from megatron.core import mpu

    peers = mpu.get_data_parallel_group(with_context_parallel=True)
    if contents.metadata is not None and is_described:
        return agree(state, contents.metadata, contents.random, first, peers)
    from megatron.training import checkpointing

    if not hasattr(checkpointing, _METADATA):
        return TorchFormat()
    metadata = getattr(checkpointing, _METADATA)(state.args)
    groups = (mpu.get_tensor_model_parallel_group(), mpu.get_pipeline_model_parallel_group())
    parameters = inspect.signature(checkpointing.get_rng_state).parameters
    random = checkpointing.get_rng_state(
        state.args.ckpt_format, *(groups if "tp_group" in parameters else ())
    )
    return agree(state, metadata, random, first, peers)


def agree(
    state: TrainingState,
    metadata: Mapping[str, Any],
    random: Any,
    first: int,
    peers: dist.ProcessGroup,
) -> Sharding:
    """Agree on how the state is saved: collective, before the first step.

    Args:
        state: the training state of this rank.
        metadata: what the framework tells all its `sharded_state_dict`s.
        random: what it saves of random states: a ShardedObject.
        first: the lowest rank of this rank's group.
        peers: the ranks that have the same model but for experts, in which all of a group are.

    Raises:
        UnsupportedError: this cannot be saved.
    """
    kind = metadata.get("distrib_optim_sharding_type")
    if kind not in KINDS:
        raise UnsupportedError(_refused(f"optimizer state of the kind {kind}"))
    for optimizer, _, _ in state.chained:
        if shards.is_sharded(optimizer) and not all(hasattr(optimizer, name) for name in REPLACED):
            raise UnsupportedError(_refused("the optimizer of this version"))
        if kind == ONE_INSTANCE and (instances := _instances(optimizer)) > 1:
            raise UnsupportedError(
                f"--ckpt-format is torch_dist: the framework cannot load optimizer state of the kind {kind} "
                f"with {instances} optimizer instances; use TTP_REPLICA=mirror, or --ckpt-fully-parallel-save"
            )
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    marks = tuple((base.key, base.replica_id) for base in _bases(_model(state.chunks, metadata)))
    is_first = dist.get_rank() == first
    stray = [key for key, replica in marks if is_main_replica(replica) and not is_first]
    saved = [random.without_data()] if is_main_replica(random.replica_id) else []
    gathered: list[Any] = [None] * peers.size()
    dist.all_gather_object(gathered, (first, marks if is_first else None, saved, stray), group=peers)
    for _, _, _, strange in gathered:
        if strange:
            raise UnsupportedError(
                _refused(f"{strange[0]}, which is not saved by the first rank that has it,")
            )
    (first_marks,) = (marks for group, marks, _, _ in gathered if group == first and marks is not None)
    objects = [rank_objects for group, _, saved, _ in gathered if group == first for rank_objects in saved]
    sharding = Sharding(first, metadata, first_marks, tuple(objects))
    _rehearse(sharding, state)
    return sharding


def _instances(optimizer: Any) -> int:
    config = getattr(optimizer, "ddp_config", None)
    return int(getattr(config, "num_distributed_optimizer_instances", 1))


def _rehearse(sharding: Sharding, state: TrainingState) -> None:
    """Do all but the writing, with optimizer state that takes no memory, to see now whether it works."""
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    empty: dict[str, Any] = {"state": {}, "param_groups": []}
    states = [{**empty, "optimizer": {**empty}, "fp32_from_fp16_params": []} for _ in state.chained]
    gathered = [
        state_without_memory(chained_optimizer) if shards.is_sharded(chained_optimizer) else None
        for chained_optimizer, _, _ in state.chained
    ]
    try:
        body = dict(sharding.model(state.chunks))
        if not shards.is_stub(state.optimizer):
            body["optimizer"] = sharding.optimizer(state, body, states, gathered)
        dcp.RankPart(sharding.first, _planner(save_preprocess(body, False)[0]))
    except Exception as error:
        raise UnsupportedError(
            _refused(f"what this version saves ({type(error).__name__}: {error})")
        ) from error


def _refused(subject: str) -> str:
    return (
        f"--ckpt-format is torch_dist: {subject} cannot be written by the survivors alone; "
        "use --ckpt-format torch, or set ENABLE_TTP=False"
    )

"""Megatron's sharded format `torch_dist`, written by one rank of each group, without a collective.

The framework's own `sharded_state_dict`s build the saved state. They are called as on the first rank of the
group, which the framework would have let write: only its replica ids differ, and the ranks exchanged replica
ids when training began. The optimizers are stand-ins with the whole state, in a data-parallel group of the
writer alone, so that nothing is gathered from other ranks. A loader does not depend on how a checkpoint is
cut, so every layout that loads the framework's checkpoint loads this checkpoint.
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
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from adaptor.checkpoint import dcp, dcp_layout, layer_wise, shards
from adaptor.checkpoint.archive_layout import SequenceLayout
from adaptor.checkpoint.format_torch import TorchFormat, save
from adaptor.checkpoint.planned_tensors import CannotBePlanned, PlannedTensors, Source
from adaptor.checkpoint.step_record import with_chain
from adaptor.checkpoint.training_state import CheckpointFormat, Files, TrainingState
from adaptor.checkpoint.weights import TensorSlot
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.replica.group import gather_values
from adaptor.replica.optimizer_state import storage_of

# The attributes that a stand-in replaces; a version without one of them would gather in another way.
REPLACED = (
    "_build_gbuf_range_map",
    "_get_main_param_and_optimizer_states",
    "distributed_optimizer_instance_id",
    "gbuf_ranges",
    "get_parameter_state_dp_zero",
)

# A data-parallel group of the writer alone.
_ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def plain_stand_in(live: Any, plain: Any) -> Any:
    """Return a stand-in for an optimizer without shards: it saves `plain`, under the params of `live`."""
    stand_in = copy.copy(live)
    stand_in.state_dict = lambda *_, **__: plain
    return stand_in


def gathered_stand_in(optimizer: Any, plain: Any, gathered: Mapping[Any, Any], stored: bool) -> Any:
    """Return a stand-in for a distributed optimizer with the gathered state of all its shards.

    Its buffers have no padding at the end of buckets. `plain`: the saved state besides the shards; not
    `stored`: another group saves the state, as the first optimizer instance does for the second.
    """
    if (storage := storage_of(optimizer)) is not None:
        gathered = storage.as_saved(dict(gathered))
    stand_in = copy.copy(optimizer)
    stand_in.buffers = [_without_padding(optimizer, buffer) for buffer in optimizer.buffers]
    stand_in.gbuf_ranges = [stand_in._build_gbuf_range_map(buffer) for buffer in stand_in.buffers]
    stand_in.data_parallel_group = stand_in.data_parallel_group_gloo = _ALONE
    stand_in.distributed_optimizer_instance_id = 0 if stored else 1
    stand_in.state_dict = lambda *_, **__: dict(plain)
    stand_in.get_parameter_state_dp_zero = lambda *_, **__: gathered
    # Moments of fewer bits are gathered in float32, which is exact, and are saved as they are kept.
    config = getattr(optimizer, "config", None)
    dtypes = {
        key: storage.saved_dtype(key) if storage else getattr(config, f"{key}_dtype", torch.float32)
        for key in shards.KEYS
    }
    whole_state = {
        param: {
            key: tensor[start:end].to(dtypes[key]) for key, tensor in tensors.items() if key in shards.KEYS
        }
        for number, buffer in enumerate(stand_in.buffers)
        for tensors in gathered[number].values()
        for param, (start, end, _) in buffer.param_index_map.items()
    }
    stand_in._get_main_param_and_optimizer_states = lambda param: dict(whole_state[param])
    return stand_in


def _without_padding(optimizer: Any, buffer: Any) -> SimpleNamespace:
    """Return the attributes of a buffer that the framework reads in a save, with places as in the gathered
    state.

    Places in a live buffer count the padding at the end of buckets, which the gathered state does not have:
    Megatron-core 0.15 and 0.16 save params behind such padding from a wrong place (fully_reshardable).
    """
    buckets = shards.buckets_of(optimizer, buffer)
    index_map = {
        param: (start - shift, end - shift, number)
        for param, (start, end, number) in buffer.param_index_map.items()
        for shift in (buckets[number].offset - buckets[number].world,)
    }
    return SimpleNamespace(
        param_dtype=buffer.param_dtype,
        grad_dtype=buffer.grad_dtype,
        numel_unpadded=buffer.numel_unpadded,
        data_parallel_group=_ALONE,
        num_optimizer_shards=1,
        buckets=[
            SimpleNamespace(
                offset=bucket.world,
                numel_unpadded=bucket.unpadded,
                grad_data=torch.empty(bucket.unpadded, device="meta"),
            )
            for bucket in buckets
        ],
        param_index_map=index_map,
        get_unpacked_index_map=lambda: index_map,  # 0.17
    )


def state_without_memory(optimizer: Any) -> dict[Any, Any]:
    """Return a gathered state of this optimizer whose tensors have no memory, for a rehearsal."""
    gathered: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(optimizer.buffers):
        tensors = {key: torch.empty(buffer.numel_unpadded, device="meta") for key in shards.KEYS}
        gathered[number] = {(buffer.param_dtype, buffer.grad_dtype): tensors}
    return gathered


# The kinds of optimizer state that stand-ins can build; None without the distributed optimizer.
ONE_INSTANCE = "dp_zero_gather_scatter"
KINDS = (None, "fully_reshardable", "dp_reshardable", "fully_sharded_model_space", ONE_INSTANCE)

# The function by which Megatron-LM describes the sharding of its checkpoints (since 0.13).
_METADATA = "_build_sharded_state_dict_metadata"


@dataclass(frozen=True)
class Sharding:
    """The format `torch_dist` of one rank, a `CheckpointFormat`.

    Attributes:
        first: the rank in whose place its group is written
        marks: key and replica id of each entry that `first` saves of its model, in order
        random: ShardedObjects without data: the places of the random states of the group
        has_owners: whether the rank saves only a part of its model (`layer_wise`)
    """

    first: int
    metadata: Mapping[str, Any]
    marks: tuple[tuple[str, Any], ...]
    random: tuple[Any, ...]
    has_owners: bool = False

    def model(self, chunks: Mapping[str, Any]) -> dict[str, Any]:
        tree = _model(chunks, self.metadata)
        bases = list(_bases(tree))
        if [base.key for base in bases] != [key for key, _ in self.marks]:
            raise CheckpointError("the model is not the one that it was when training began")
        for base, (_, replica) in zip(bases, self.marks, strict=True):
            base.replica_id = replica
        return tree

    def places(self, saved: Any) -> list[TensorSlot]:
        from megatron.core.dist_checkpointing.mapping import is_main_replica

        return [
            (base.key, base.data, partial(setattr, base, "data"))
            for base in _bases(saved)
            if isinstance(base.data, torch.Tensor)
            and (not self.has_owners or is_main_replica(base.replica_id))
        ]

    def optimizer(
        self, state: TrainingState, model: Mapping[str, Any], states: Sequence[Any], gathered: Sequence[Any]
    ) -> Any:
        chained_states = []
        for (optimizer, live, stored), plain, whole_state in zip(
            state.chained, states, gathered, strict=True
        ):
            if whole_state is not None:
                stand_in = gathered_stand_in(optimizer, plain, whole_state, stored)
            else:
                stand_in = plain_stand_in(live, plain)
                if shards.is_sharded(optimizer):  # another group saves it
                    stand_in.sharded_state_dict = lambda *_, **__: {}
            chained_states.append(stand_in)
        whole_optimizer = with_chain(state.optimizer, iter(chained_states))
        for part in layer_wise.parts_of(whole_optimizer):
            part.sharded_state_dict = partial(layer_wise.sharded_state_dict, part)
        return whole_optimizer.sharded_state_dict(dict(model), metadata=dict(self.metadata))

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any:
        return [dataclasses.replace(place, data=list(states)) for place in self.random]

    def files(self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any]) -> Files:
        files = self.written(self._described(body))
        return dcp.with_integrity_part(files, self.first) if _has_integrity(state) else files

    def written(self, tree: Mapping[str, Any]) -> Files:
        """Return the files of the rank for the saved `tree`."""
        part, _, files = self._part(tree)
        if part.has_data:
            files[part.data_file] = part.write_data
        files[part.part_file] = part.write_part
        return files

    def planned_tensors(self) -> PlannedTensors:
        return PlannedTensors("meta")

    def planned_files(
        self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any], planned: PlannedTensors
    ) -> tuple[dict[str, SequenceLayout[Source]], Files]:
        name, layout, files = self.planned(self._described(body), planned)
        if _has_integrity(state):
            digest = dcp.sha256()
            layout.reader = digest.update
            files = dcp.with_integrity_part(files, self.first, {name: digest.hexdigest})
        return {name: layout}, files

    def planned(
        self, tree: Mapping[str, Any], planned: PlannedTensors
    ) -> tuple[str, SequenceLayout[Source], Files]:
        """Return the name and the layout of the data file for the saved `tree`, and the other files."""
        objects = dcp_layout.PlannedObjects(planned)
        part, common, files = self._part(tree, objects.token_for)
        if not part.has_data:
            raise CannotBePlanned("this rank has nothing to save")
        pickled = io.BytesIO()
        torch.save(common, pickled)
        dcp_layout.require_no_stand_in(pickled.getvalue(), "what is common to all ranks")
        layout = dcp_layout.lay_out(part, planned, objects)
        files[part.part_file] = part.write_part
        return part.data_file, layout, files

    def _described(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return `body` with the metadata, which later versions of the framework read."""
        # Without values that cannot be pickled: later versions put a process group there.
        metadata = {name: value for name, value in self.metadata.items() if name != "dp_cp_group"}
        return {**body, "content_metadata": metadata}

    def _part(
        self, tree: Mapping[str, Any], saved_as: Callable[[Any], Any] = lambda value: value
    ) -> tuple[dcp.RankPart, Any, Files]:
        """Return the rank's part of the saved `tree`, the common state, and small files.

        `saved_as` maps pickled values.
        """
        from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
        from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

        sharded, common = save_preprocess(dict(tree), False)
        for base in _bases(sharded):
            if isinstance(base, ShardedObject):
                base.data = saved_as(base.data)
        config = dataclasses.asdict(CheckpointingConfig("torch_dist"))
        files: Files = {}
        if "common_backend" not in config:  # later versions have an object in place of a file
            sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=self.first)
        elif self.first == 0:
            files[COMMON_STATE_FNAME] = partial(save, common)
        if self.first == 0:
            files[CONFIG_FNAME] = lambda file: file.write(json.dumps(config).encode())
        return dcp.RankPart(self.first, _planner(sharded)), common, files


def _has_integrity(state: TrainingState) -> bool:
    return bool(getattr(state.args, "verify_integrity", False))


def _planner(sharded: Any) -> Any:
    """Return the framework's own planner, set up with the state that this rank saves."""
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
    """Make the format; see `training_state.FormatFactory`.

    Versions without a description of the sharding get the format `torch`, which they load as well. Raises
    UnsupportedError if nobody has said how the state is sharded.
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

    `random` is the framework's ShardedObject; `peers` are the ranks with the same model but for experts,
    which include all ranks of the group of `first`. Raises UnsupportedError.
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

    marks = tuple(layer_wise.mark(state.optimizer, _bases(_model(state.chunks, metadata))))
    is_first = dist.get_rank() == first
    stray = [key for key, replica in marks if is_main_replica(replica) and not is_first]
    saved = [random.without_data()] if is_main_replica(random.replica_id) else []
    gathered = gather_values((first, marks if is_first else None, saved, stray), peers)
    for _, _, _, strange in gathered:
        if strange:
            raise UnsupportedError(
                _refused(f"{strange[0]}, which is not saved by the first rank that has it,")
            )
    (first_marks,) = (marks for group, marks, _, _ in gathered if group == first and marks is not None)
    objects = [rank_objects for group, _, saved, _ in gathered if group == first for rank_objects in saved]
    sharding = Sharding(first, metadata, first_marks, tuple(objects), state.has_owners)
    _rehearse(sharding, state)
    return sharding


def _instances(optimizer: Any) -> int:
    config = getattr(optimizer, "ddp_config", None)
    return int(getattr(config, "num_distributed_optimizer_instances", 1))


def _rehearse(sharding: Sharding, state: TrainingState) -> None:
    """Do everything but the write, with optimizer state that takes no memory, to find errors early."""
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    states = [_before_first_update(chained_optimizer) for chained_optimizer, _, _ in state.chained]
    gathered = [
        state_without_memory(chained_optimizer)
        if shards.is_sharded(chained_optimizer) and (stored or not state.has_owners)
        else None
        for chained_optimizer, _, stored in state.chained
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


def _before_first_update(optimizer: Any) -> dict[str, Any]:
    """Return the saved state of an optimizer besides its shards, without moments. Since Megatron-core 0.20
    the framework compares the param groups of an optimizer without shards with the saved groups.
    """
    if shards.is_sharded(optimizer) or shards.is_stub(optimizer):
        empty: dict[str, Any] = {"state": {}, "param_groups": []}
        return {**empty, "optimizer": {**empty}, "fp32_from_fp16_params": []}
    body: dict[str, Any] = optimizer.state_dict()
    body.get("optimizer", body)["state"] = {}
    return body


def _refused(subject: str) -> str:
    return (
        f"--ckpt-format is torch_dist: {subject} cannot be written by the survivors alone; "
        "use --ckpt-format torch, or set ENABLE_TTP=False"
    )

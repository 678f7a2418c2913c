"""The layout file in every checkpoint of a job of Megatron-LM: made when training begins, written with each.

A failure of the file stops neither job nor save: a checkpoint then has no layout file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from adaptor import context, output
from adaptor.checkpoint import disk, layout_file, shards
from adaptor.checkpoint.layout_file import (
    FORMAT,
    BufferLayout,
    Entry,
    OptimizerLayout,
    ParamPlace,
    Piece,
    RankLayout,
)
from adaptor.checkpoint.training_state import CheckpointPlacement, TrainingState
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol.naming import LAYOUT
from adaptor.replica.group import barrier, gather_values


def take(
    state: TrainingState, place: CheckpointPlacement, everyone: dist.ProcessGroup
) -> Mapping[str, bytes]:
    """Describe the layout of the job, for regular saves; return this rank's part for its last words, by name:
    collective.

    Args:
        state: the state of this rank.
        place: the place of this rank in checkpoints.
        everyone: all ranks of the job.
    """
    part, own_problem = b"", ""
    if everyone.rank() == place.first:  # the others of its group have the same
        part, own_problem = _described(state)
    gathered = gather_values((place.group, part, own_problem), everyone)
    problem = next((rank_problem for _, _, rank_problem in gathered if rank_problem), "")
    if problem:
        if everyone.rank() == 0:
            output.tell(
                f"[ttp] checkpoints have no layout file ({problem}): the job trains and resumes all the same;"
                " transform reads only those of the format torch without one, and not all of these"
                " (docs/transform.md)",
                to="stdout",
            )
        return {}
    layout_files = {LAYOUT: layout_file.join(part for _, part, _ in gathered if part)}
    context.part(RegularSaves).on_top = layout_files  # rank 0 completes them
    return layout_files if place.group == gathered[0][0] else {}


def write_alone(path: Path, everyone: dist.ProcessGroup) -> NoReturn:
    """Write the layout of the job to `path`, and end the script: collective.

    Raises:
        CheckpointError: the layout is missing, or the disk refuses the file; on rank 0.
    """
    if dist.get_rank() == 0:
        content = context.part(RegularSaves).on_top.get(LAYOUT)
        if content is None:
            raise CheckpointError(f"{path}: is not written, because the framework does not say the layout")
        try:
            disk.replace(path.absolute().parent, path.name, content)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        output.tell(f"[ttp] {path}: the layout of {dist.get_world_size()} ranks is written", to="stdout")
    barrier(everyone)  # no rank ends while another is at work
    sys.exit(0)


def _described(state: TrainingState) -> tuple[bytes, str]:
    """Return the layout of this rank as a part of the file, or the reason for a missing layout; the other
    ranks wait for the result.
    """
    try:
        return layout_file.encode(describe(state, *_place(state.args))), ""
    except Exception as error:  # of whatever the framework's own functions raise
        return b"", (str(error) or type(error).__name__)[:200]


def _place(args: Any) -> tuple[dict[str, int], dict[str, int], str]:
    """Return the numbers of this rank, the parallel sizes, and the version of Megatron-core."""
    import megatron.core
    from megatron.core import mpu

    ranks = {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "ep": mpu.get_expert_model_parallel_rank(),
    }
    tp = mpu.get_tensor_model_parallel_world_size()
    sizes = {
        "tp": tp,
        "pp": mpu.get_pipeline_model_parallel_world_size(),
        "vpp": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        "ep": mpu.get_expert_model_parallel_world_size(),
        "etp": getattr(args, "expert_tensor_parallel_size", None) or tp,
        "dp": mpu.get_data_parallel_world_size(),
        "cp": mpu.get_context_parallel_world_size(),
    }
    return ranks, sizes, str(getattr(megatron.core, "__version__", ""))


_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_EXPERT = re.compile(r".*\.experts\.local_experts\.(\d+)\..*")


def describe(
    state: TrainingState, ranks: Mapping[str, int], sizes: Mapping[str, int], core: str
) -> RankLayout:
    """Return the layout of the rank, without a collective.

    Args:
        state: of the rank.
        ranks: its numbers: tp, pp, ep.
        sizes: parallel sizes of the job.
        core: the version of Megatron-core.

    Raises:
        UnsupportedError: the framework does not describe a place.
    """
    argument_values = {name: getattr(state.args, name, None) for name in layout_file.ARGUMENTS}
    return RankLayout(
        format=FORMAT,
        folder=state.folder,
        tp=ranks["tp"],
        pp=ranks["pp"],
        ep=ranks["ep"],
        sizes=dict(sizes),
        core=core,
        args={
            name: value
            for name, value in argument_values.items()
            if isinstance(value, int | float | str | None)
        },
        chunks={key: tuple(_entries(chunk)) for key, chunk in state.chunks.items()},
        optimizers=tuple(_optimizers(state)),
    )


def _entries(chunk: Any) -> Iterator[Entry]:
    """Yield the entries of a chunk; an entry without a tensor gets the layer and expert of its neighbours."""
    entries = list(_tensors(chunk))
    numbers = {_module(entry.name): (entry.layer, entry.expert) for entry in entries if entry.dtype}
    layers = {_layer(entry.name): entry.layer for entry in entries if entry.dtype}
    for entry in entries:
        if entry.dtype:
            yield entry
            continue
        layer, expert = numbers.get(_module(entry.name), (layers.get(_layer(entry.name)), None))
        yield msgspec.structs.replace(entry, layer=layer, expert=expert)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _layer(name: str) -> str:
    """Return the part of a name up to the layer on the rank; "" without a layer."""
    match = re.match(r"(?:.*?\.)?layers\.\d+\.", name)
    return match.group() if match else ""


def _tensors(chunk: Any) -> Iterator[Entry]:
    sharded = chunk.sharded_state_dict()
    params = dict(chunk.named_parameters())
    for name, value in chunk.state_dict_for_save_checkpoint().items():
        if not isinstance(value, torch.Tensor):
            yield Entry(name)
            continue
        if name not in sharded:
            raise UnsupportedError(f"the framework does not say where {name} lies in the whole model")
        yield _entry(name, value, sharded[name], params.get(name))


def _entry(name: str, value: torch.Tensor, sharded: Any, param: Any) -> Entry:
    parts = sharded.build() if hasattr(sharded, "build") else sharded
    parts = list(parts.values()) if isinstance(parts, dict) else parts
    parts = parts if isinstance(parts, list) else [parts]
    first = parts[0]
    front = first.prepend_axis_num
    index, whole_shape = first.global_offset[:front], tuple(first.global_shape[front:])
    if any(
        part.key != first.key
        or part.global_offset[:front] != index
        or part.global_shape != first.global_shape
        or part.flattened_range is not None
        or len(part.local_shape) != value.ndim
        for part in parts
    ):
        raise UnsupportedError(f"the framework makes {name} of several tensors, not of pieces of one")
    axis = _axis(name, value, parts, whole_shape, param)
    pieces = []
    axis_start = 0
    for part in parts if axis is not None else ():
        length = part.local_shape[axis]
        pieces.append(Piece(part.global_offset[front + axis], axis_start, length))
        axis_start += length
    layer, expert = _numbers(name, first.key, index)
    return Entry(
        name,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape),
        key=first.key,
        whole=whole_shape,
        axis=axis,
        pieces=tuple(pieces),
        layer=layer,
        expert=expert,
        padded=bool(first.allow_shape_mismatch),
        tied=first.key != name and layer is None,
        param=param is not None,
    )


def _axis(name: str, value: torch.Tensor, parts: Any, whole_shape: tuple[int, ...], param: Any) -> int | None:
    """Return the cut axis: if one rank has the whole, the param names the axis."""
    different = [axis for axis, length in enumerate(value.shape) if length != whole_shape[axis]]
    cut = [
        axis
        for axis in range(value.ndim)
        if any(part.local_shape[axis] != value.shape[axis] for part in parts)
    ]
    if getattr(param, "tensor_model_parallel", False):
        cut.append(param.partition_dim)
    axes = {*different, *cut}
    if len(axes) > 1:
        raise UnsupportedError(f"the framework cuts {name} along several axes")
    return axes.pop() if axes else None


def _numbers(name: str, key: str, index: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Return the numbers of layer and expert in the whole model, from the framework's key or from the axes in
    front.
    """
    remaining = list(index)
    numbers: list[int | None] = []
    for pattern in (_LAYER, _EXPERT):
        if not pattern.fullmatch(name):
            numbers.append(None)
            continue
        number_match = re.fullmatch(
            r".*\.layers\.(\d+)\..*" if pattern is _LAYER else r".*\.experts\.(\d+)\..*", f".{key}"
        )
        if number_match:
            numbers.append(int(number_match.group(1)))
        elif remaining:
            numbers.append(int(remaining.pop(0)))
        else:
            raise UnsupportedError(f"the framework does not say of which layer or expert {name} is")
    if remaining:
        raise UnsupportedError(f"the framework puts more axes in front of {name} than layers and experts")
    return numbers[0], numbers[1]


def _optimizers(state: TrainingState) -> Iterator[OptimizerLayout]:
    names = {
        param: (key, name) for key, chunk in state.chunks.items() for name, param in chunk.named_parameters()
    }
    for optimizer, _, stored in state.chained:
        inner = None if shards.is_stub(optimizer) else optimizer.optimizer
        groups = () if inner is None else tuple(_group(group) for group in inner.param_groups)
        buffers: tuple[BufferLayout, ...] = ()
        if shards.is_sharded(optimizer):
            buffers = tuple(_buffer(optimizer, buffer, names) for buffer in optimizer.buffers)
        yield OptimizerLayout(stored, groups, buffers)


def _group(group: Mapping[str, Any]) -> tuple[float, float, bool, bool]:
    return (
        float(group.get("wd_mult", 1.0)),
        float(group.get("lr_mult", 1.0)),
        bool(group.get("is_expert_parallel", False)),
        bool(group.get("is_decoupled_lr", False)),
    )


def _buffer(optimizer: Any, buffer: Any, names: Mapping[Any, tuple[str, str]]) -> BufferLayout:
    """Describe a buffer as saved: without the padding at the end of its buckets."""
    if not hasattr(buffer, "numel_unpadded"):
        raise UnsupportedError("buffers of this version are saved bucket by bucket")
    buckets = shards.buckets_of(optimizer, buffer)
    places = []
    for param, (start, end, number) in buffer.param_index_map.items():
        shift = buckets[number].offset - buckets[number].world
        if prod(param.shape) != end - start:
            raise UnsupportedError(f"the buffer has another size of {names[param][1]} than the model")
        places.append(ParamPlace(*names[param], start - shift, end - shift))
    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in (buffer.param_dtype, buffer.grad_dtype))
    return BufferLayout((dtypes[0], dtypes[1]), buffer.numel_unpadded, tuple(places))

"""Describes the parts of a model and of its optimizer on the rank, from the framework's own descriptions.

The model's `sharded_state_dict` has the place of each tensor in the whole model, the params have their cut
axis, and the `param_index_map` of each buffer has the places in the optimizer. Nothing is guessed: without a
description no layout is made, and checkpoints have no layout file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec
import torch

from adaptor.checkpoint import layout_file, shards
from adaptor.checkpoint.layout_file import (
    FORMAT,
    BufferLayout,
    Entry,
    OptimizerLayout,
    ParamPlace,
    Piece,
    RankLayout,
)
from adaptor.checkpoint.training_state import TrainingState
from adaptor.errors import UnsupportedError

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

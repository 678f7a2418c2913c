"""Compares two checkpoints of Megatron-LM bit by bit, without the framework."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.faults import sharded
from tests.faults.pickles import Unpickler, load

# Saved arguments that may differ between runs with other folders, another interval, or the adaptor.
OWN_ARGUMENTS = frozenset(
    {
        "save",
        "save_interval",
        "load",
        "dataloader_save",
        "data_cache_path",
        "num_distributed_optimizer_instances",
    }
)


def files(folder: Path) -> set[str]:
    """Return the files of a checkpoint, relative to its folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.pt")}


def differences(left: Path, right: Path) -> list[str]:
    """Return the differences between two checkpoint folders, a line each: order of keys, dtypes, bits."""
    if files(left) != files(right):
        return [f"files: {sorted(files(left))} and {sorted(files(right))}"]
    pairs = {name: (load(left / name), load(right / name)) for name in sorted(files(left))}
    if (right / "metadata.json").exists():
        pairs = {name: (our, _without_rerun_state(their, our)) for name, (our, their) in pairs.items()}
        pairs["metadata.json"] = tuple((root / "metadata.json").read_text() for root in (left, right))
        content = sharded.load(left)
        pairs["sharded"] = content, _without_rerun_state(sharded.load(right), content)
    return [f"{name}{line}" for name, pair in pairs.items() for line in _differences("", *pair)]


def _without_rerun_state(right: dict[str, Any], left: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a `torch_dist` checkpoint, without the rerun state machine's state if ours lacks it.

    Last words lack the state. Regular saves have had the state since 0.17, empty but in a rerun. The
    framework loads a checkpoint without the state.
    """
    name, common = "rerun_state_machine", "common_state/shard_0_1"  # since 0.19 in place of common.pt
    state = {key: value for key, value in right.items() if not key.startswith(name) or key in left}
    if common in left and name not in left[common][0]:
        state[common][0].pop(name, None)
    return state


def _differences(place: str, left: Any, right: Any) -> Iterator[str]:
    if type(left) is not type(right):
        yield f"{place}: {type(left).__name__} and {type(right).__name__}"
    elif isinstance(left, torch.Tensor):
        if "_extra_state" in place and {left.dtype, right.dtype} == {torch.uint8}:
            yield from _differences(place, *map(_extra_state, (left, right)))
        elif (left.dtype, left.shape) != (right.dtype, right.shape):
            yield f"{place}: {left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
        elif left.stride() != right.stride():
            yield f"{place}: strides {left.stride()} and {right.stride()}"
        elif _bits(left) != _bits(right):
            yield f"{place}: other bits"
    elif isinstance(left, numpy.ndarray):
        if left.dtype != right.dtype or left.tobytes() != right.tobytes():
            yield f"{place}: other bits"
    elif isinstance(left, dict):
        if list(left) != list(right):
            yield f"{place}: keys {list(left)} and {list(right)}"
        for key in left.keys() & right.keys():
            yield from _differences(f"{place}/{key}", left[key], right[key])
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{place}: {len(left)} and {len(right)} entries"
        for number, (left_entry, right_entry) in enumerate(zip(left, right, strict=False)):
            yield from _differences(f"{place}/{number}", left_entry, right_entry)
    elif isinstance(left, Namespace):
        left_values, right_entry = (
            {key: value for key, value in vars(namespace).items() if key not in OWN_ARGUMENTS}
            for namespace in (left, right)
        )
        yield from _differences(
            f"{place}.", dict(sorted(left_values.items())), dict(sorted(right_entry.items()))
        )
    elif isinstance(left, float):
        if left.hex() != right.hex():
            yield f"{place}: {left!r} and {right!r}"
    elif left != right:
        yield f"{place}: {left!r} and {right!r}"


def _extra_state(tensor: torch.Tensor) -> Any:
    """Return what Transformer Engine has pickled into a tensor; the bytes have addresses of storages."""
    return Unpickler(io.BytesIO(_bits(tensor))).load() if tensor.numel() else None


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

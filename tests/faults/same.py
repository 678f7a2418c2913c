"""Compares two checkpoints of Megatron-LM bit by bit, without the framework."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.faults import sharded
from tests.faults.pickles import load

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


def differences(ours: Path, theirs: Path) -> list[str]:
    """Return the differences between two checkpoint folders, a line each: order of keys, dtypes, bits."""
    if files(ours) != files(theirs):
        return [f"files: {sorted(files(ours))} and {sorted(files(theirs))}"]
    pairs = {name: (load(ours / name), load(theirs / name)) for name in sorted(files(ours))}
    if (theirs / "metadata.json").exists():
        pairs = {name: (our, _without_rerun_state(their, our)) for name, (our, their) in pairs.items()}
        pairs["metadata.json"] = tuple((root / "metadata.json").read_text() for root in (ours, theirs))
        content = sharded.load(ours)
        pairs["sharded"] = content, _without_rerun_state(sharded.load(theirs), content)
    return [f"{name}{line}" for name, pair in pairs.items() for line in _differences("", *pair)]


def _without_rerun_state(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a `torch_dist` checkpoint, without the rerun state machine's state if ours lacks it.

    Last words lack the state. Regular saves have had the state since 0.17, empty but in a rerun. The
    framework loads a checkpoint without the state.
    """
    name, common = "rerun_state_machine", "common_state/shard_0_1"  # since 0.19 in place of common.pt
    state = {key: value for key, value in theirs.items() if not key.startswith(name) or key in ours}
    if common in ours and name not in ours[common][0]:
        state[common][0].pop(name, None)
    return state


def _differences(place: str, ours: Any, theirs: Any) -> Iterator[str]:
    if type(ours) is not type(theirs):
        yield f"{place}: {type(ours).__name__} and {type(theirs).__name__}"
    elif isinstance(ours, torch.Tensor):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield f"{place}: {ours.dtype} {tuple(ours.shape)} and {theirs.dtype} {tuple(theirs.shape)}"
        elif ours.stride() != theirs.stride():
            yield f"{place}: strides {ours.stride()} and {theirs.stride()}"
        elif _bits(ours) != _bits(theirs):
            yield f"{place}: other bits"
    elif isinstance(ours, numpy.ndarray):
        if ours.dtype != theirs.dtype or ours.tobytes() != theirs.tobytes():
            yield f"{place}: other bits"
    elif isinstance(ours, dict):
        if list(ours) != list(theirs):
            yield f"{place}: keys {list(ours)} and {list(theirs)}"
        for key in ours.keys() & theirs.keys():
            yield from _differences(f"{place}/{key}", ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            yield f"{place}: {len(ours)} and {len(theirs)} entries"
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(f"{place}/{number}", one, other)
    elif isinstance(ours, Namespace):
        mine, other = (
            {key: value for key, value in vars(each).items() if key not in OWN_ARGUMENTS}
            for each in (ours, theirs)
        )
        yield from _differences(f"{place}.", dict(sorted(mine.items())), dict(sorted(other.items())))
    elif isinstance(ours, float):
        if ours.hex() != theirs.hex():
            yield f"{place}: {ours!r} and {theirs!r}"
    elif ours != theirs:
        yield f"{place}: {ours!r} and {theirs!r}"


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

"""Checks that the files of a rank have the content that Megatron-LM writes, before tensors are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptor.errors import CheckpointError
from adaptor.transform.model import Buffer
from adaptor.transform.records import StoredTensor

STATES = ("param", "exp_avg", "exp_avg_sq")
# The entries of the optimizer in a model's file.
OF_OPTIMIZER = ("optimizer", "opt_param_scheduler")
WITHOUT_OPTIMIZER = "give --weights-only for a checkpoint without an optimizer"
_LAYER = "decoder.layers."
_GENERATORS = ("torch_rng_state", "cuda_rng_state")  # as tensors; the other two are tuples


class ByParam:
    """The state of an optimizer, param by param: each kind of tensor (STATES) in the shape of the param.

    Args:
        tensors: name of the param in the whole model, kind, tensor.
    """

    def __init__(self, tensors: Iterable[tuple[str, str, StoredTensor]]) -> None:
        self._tensors = {(name, kind): tensor for name, kind, tensor in tensors}

    def tensor(self, name: str, kind: str) -> StoredTensor:
        """Return one tensor."""
        return self._tensors[name, kind]


def require_model_file(body: Any, path: Path, optimizers: int) -> None:
    """Refuse the `body` of a model's file with another layout than the framework's.

    Args:
        body: the content of the file.
        path: of the file.
        optimizers: the number of its optimizers: two with experts; 0: the optimizer is left out.

    Raises:
        CheckpointError: names the file and the defect.
    """
    for key, value in body.items():
        if not isinstance(key, str):
            raise _wrong(path, f"key {key!a}", "a name")
        if re.fullmatch(r"model\d*", key):
            _require_chunk(value, f"{path}: {key}")
    if optimizers:
        saved = body.get("optimizer")
        saved_states = saved if isinstance(saved, list) else [saved]
        if len(saved_states) != optimizers:
            raise _wrong(path, "optimizer", f"a list of {optimizers}")
        for optimizer_state in saved_states:
            _require_groups(optimizer_state, path)
    states = body.get("rng_state")
    if states is not None:
        if not isinstance(states, list):
            raise _wrong(path, "rng_state", "a list")
        for state in states:
            _require_random_states(state, path)


def _require_chunk(chunk: Any, path: str) -> None:
    if not isinstance(chunk, dict):
        raise CheckpointError(f"{path}: is not a dict of tensors")
    for name in chunk:
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: {name!a} is not a name")
        if name.startswith(_LAYER) and not re.fullmatch(r"\d{1,9}\..+", name.removeprefix(_LAYER)):
            raise CheckpointError(f"{path}: {name[:100]!a} has no number of a layer")


def _require_groups(optimizer: Any, path: Path) -> None:
    inner = optimizer.get("optimizer") if isinstance(optimizer, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list):
        raise CheckpointError(f"{path}: has no optimizer with groups of params; {WITHOUT_OPTIMIZER}")
    for group in groups:
        if not isinstance(group, dict):
            raise _wrong(path, "a group of params", "a dict")
        for name in ("wd_mult", "lr_mult"):
            if not isinstance(group.get(name), int | float):
                raise _wrong(path, f"{name} of a group of params", "a number")
        for name in ("step", "is_expert_parallel", "is_decoupled_lr"):
            if not isinstance(group.get(name, 0), int | float | StoredTensor | None):
                raise _wrong(path, f"{name} of a group of params", "a number or a flag")


def _require_random_states(states: Any, path: Path) -> None:
    if not isinstance(states, dict):
        raise _wrong(path, "rng_state", "a list of dicts")
    trackers = states.get("rng_tracker_states") or {}
    if not isinstance(trackers, dict):
        raise _wrong(path, "rng_tracker_states", "a dict")
    for name, value in [*((name, states.get(name)) for name in _GENERATORS), *trackers.items()]:
        if not isinstance(value, StoredTensor) or value.dtype != "uint8":
            raise _wrong(path, f"the random state {name}", "a tensor of bytes")


def optimizer_states(content: Any, path: Path, optimizers: int) -> list[dict[Any, Any] | None]:
    """Return the states in the `content` of an optimizer's file; None where another rank has the state.

    Raises:
        CheckpointError: the content is not the state of `optimizers` optimizers.
    """
    states = content if isinstance(content, list) else [content]
    if len(states) != optimizers or not all(isinstance(state, dict | None) for state in states):
        raise CheckpointError(f"{path}: is not the state of {optimizers} optimizers, as its arguments say")
    return states


def buffers(
    state: Mapping[Any, Any], expected: Sequence[Buffer], path: Path, authority: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the tensors of each buffer of a state, by their kind (STATES).

    Args:
        state: of the optimizer.
        expected: its buffers.
        path: of the file.
        authority: the source of the expected layout, for the message.

    Raises:
        CheckpointError: a buffer is missing, cut short, of another precision, or laid out by other rules.
    """
    for number, buffer in enumerate(expected):
        kinds = state.get(number)
        stored = kinds.get(buffer.dtypes) if isinstance(kinds, dict) else None
        if not isinstance(stored, dict):
            raise CheckpointError(f"{path}: has no buffer {number} of {buffer.dtypes[0].name}")
        numel = stored.get("numel_unpadded")
        if numel != buffer.numel:
            raise CheckpointError(
                f"{path}: buffer {number} has {_shown(numel)} elements; by {authority} it would have"
                f" {buffer.numel}"
            )
        for kind in STATES:
            _require_whole(stored.get(kind), kind, buffer.numel, f"{path}: buffer {number}")
        yield stored


def _require_whole(tensor: Any, kind: str, numel: int, location: str) -> None:
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{location}: has no {kind}")
    if tensor.dtype != "float32":
        raise CheckpointError(f"{location}: {kind} is {tensor.dtype}; only float32 is transformed")
    if tensor.shape != (numel,):
        raise CheckpointError(f"{location}: {kind} has {tensor.numel} elements, not {numel}")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"a {type(value).__name__} as number of"


def _wrong(path: Path, subject: str, right: str) -> CheckpointError:
    return CheckpointError(f"{path}: {subject[:100]} is not {right}")

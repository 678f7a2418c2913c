"""The state of a torch optimizer in words: the data that another process needs besides the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from adaptor.errors import UnsupportedError
from adaptor.replica import twin

# The optimizers of torch, apex and Transformer Engine agree in three points: each param has a state of
# tensors in float32, or moments in bfloat16, beside the param, and param groups have numbers; a twin can
# therefore be created. Moments of other types have a scale outside of the state, which changes in each
# update. The count of updates is a number of the param groups (apex, Transformer Engine), a tensor there
# (MindSpeed), or a tensor in the state of each param (torch). Options can change the three points; options
# are recognised by their names, so none of these packages has to be installed.

_MOMENTS = (torch.float32, torch.bfloat16)
# (attribute, the values with which state is kept as above, what another one means)
_OPTIONS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("capturable", (False,), "rates and counts are tensors, which change while a dump reads them"),
    ("use_master", (False,), "the optimizer has main params of its own"),
    ("master_weights", (False,), "the optimizer has main params of its own"),
    ("store_param_remainders", (False,), "main params are split in two"),
    ("use_decoupled_grad", (False,), "gradients are not where torch has them"),
    ("exp_avg_dtype", _MOMENTS, "moments have scales outside of the state"),
    ("exp_avg_sq_dtype", _MOMENTS, "moments have scales outside of the state"),
)
# Options with which the storage of an optimizer (`Storage`) has the state as above.
_IN_STORAGE = frozenset({"master_weights", "store_param_remainders", "use_decoupled_grad"})


def require_protected(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an inner optimizer whose state would be saved wrongly. Raises UnsupportedError."""
    kind = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
    _require_muon_alone(optimizer, kind)
    has_storage = storage_of(optimizer) is not None
    for name, known_values, meaning in _OPTIONS:
        if has_storage and name in _IN_STORAGE:
            continue
        values = [getattr(optimizer, name, None), *(group.get(name) for group in optimizer.param_groups)]
        for value in values:
            if value is not None and value not in known_values:
                raise UnsupportedError(
                    f"{kind} has {name}={value}: {meaning}, which cannot be protected yet; "
                    f"use {name}={known_values[0]}, or set ENABLE_TTP=False"
                )
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and name != "step":  # which is read with the tensors
                raise UnsupportedError(
                    f"{kind} has a tensor as {name} of a param group, which changes while a dump reads it: "
                    "use a number, or set ENABLE_TTP=False"
                )


def _require_muon_alone(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Refuse an update of Megatron-core's Muon that other tensor-parallel ranks take part in."""
    mode = getattr(optimizer, "tp_mode", getattr(optimizer, "mode", None))  # its name up to 0.16
    groups = getattr(optimizer, "pg_collection", None)
    if mode in (None, "blockwise") or groups is None:
        return
    if max(group.size() for group in (groups.tp, getattr(groups, "expt_tp", groups.tp))) > 1:
        raise UnsupportedError(
            f"{kind} has muon_tp_mode={mode}: an update that asks other tensor-parallel ranks cannot be"
            " protected; use blockwise, or set ENABLE_TTP=False"
        )


class Storage:
    """The place where a framework keeps params and state of an optimizer between two updates.

    The tensors of the optimizer itself have these values inside the update window alone.
    """

    is_on_host = False  # also the tensors of a twin

    def before_update(self) -> None:
        """Prepare the update, inside the update window."""

    def after_update(self) -> None:
        """Finish the update, inside the update window."""

    def param(self, param: torch.Tensor) -> torch.Tensor:
        """Return the values of a param."""
        raise NotImplementedError

    def state(self, param: torch.Tensor) -> Mapping[str, Any]:
        """Return the values of the entries of the param's state, by key."""
        raise NotImplementedError

    def store(self, values: torch.optim.Optimizer) -> None:
        """Take the params and the state of `values`, an optimizer with the same layout."""
        raise NotImplementedError

    def make_weights(self) -> None:
        """Give this rank's part of the model the values of the params, as an update does."""
        raise NotImplementedError

    def cast(self, main: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return main params as weights, as an update makes the weights."""
        return main.to(dtype)

    def as_saved(self, world: dict[Any, Any]) -> dict[Any, Any]:
        """Return the gathered state of all shards as the framework gathers it for a save."""
        return world

    def saved_dtype(self, key: str) -> torch.dtype:
        """Return the type of a param ("param") or an entry of its state in saves of shards."""
        return torch.float32

    def make_twin(
        self, params: Sequence[list[torch.Tensor]], groups: Sequence[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """Make a twin of the optimizer, whose tensors always have their values; see `twin.make`."""
        raise NotImplementedError


def storage_of(optimizer: Any) -> Storage | None:
    """Return where the state of an optimizer is; None: in the optimizer's own tensors."""
    storage: Storage | None = getattr(getattr(optimizer, "optimizer", optimizer), twin.STORAGE, None)
    return storage


def values_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Return the values of all params, flat, in the order of the param groups."""
    storage = storage_of(optimizer)
    for param in twin.params(optimizer):
        yield (param if storage is None else storage.param(param)).detach().reshape(-1)


def state_values(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Mapping[str, Any]:
    """Return the values of the entries of a param's state, by key."""
    storage = storage_of(optimizer)
    return optimizer.state.get(param, {}) if storage is None else storage.state(param)


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a param, which Megatron-core gives to some optimizers beside torch's own."""
    decoupled: torch.Tensor | None = getattr(param, "decoupled_grad", None)
    return param.grad if decoupled is None else decoupled


def to_be_filled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer to fill with another state, for a later `keep`."""
    if storage_of(optimizer) is None:
        return optimizer
    params = [
        [torch.empty_like(param, dtype=torch.float32, device="cpu") for param in group["params"]]
        for group in optimizer.param_groups
    ]
    return twin.make(optimizer, params, twin.scalars(optimizer))


def keep(optimizer: torch.optim.Optimizer, filled: torch.optim.Optimizer) -> None:
    """Give `optimizer` the state of `filled`, the result of `to_be_filled`."""
    storage = storage_of(optimizer)
    if storage is not None:
        for group, scalars in zip(optimizer.param_groups, twin.scalars(filled), strict=True):
            group.update(scalars)
        storage.store(filled)


# A tensor of one number, in a message. A class that wants it on its device takes it there, as after a load.
_COUNT = 1
_COUNTS = (torch.int32, torch.int64, torch.float32, torch.float64)


class StateEntry(msgspec.Struct, frozen=True):
    """An entry of a param's state: a tensor of `shape` and `dtype`, or, without a dtype, `value`.

    `beside`: the entry lies on the device of its param; a count of updates may be on the host.
    """

    key: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    beside: bool = True
    value: Any = None


def entries_of(optimizer: torch.optim.Optimizer) -> list[list[StateEntry]]:
    """Return the state of each param, in the order of the param groups."""
    return [
        [
            StateEntry(
                key, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.device == param.device
            )
            if isinstance(value, torch.Tensor)
            else StateEntry(key, value=value)
            for key, value in state_values(optimizer, param).items()
        ]
        for param in twin.params(optimizer)
    ]


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of the state, flat, in the order of `entries_of`."""
    return [
        value.detach().reshape(-1)
        for param in twin.params(optimizer)
        for value in state_values(optimizer, param).values()
        if isinstance(value, torch.Tensor)
    ]


def make_state(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, entries: Sequence[StateEntry]
) -> list[torch.Tensor]:
    """Create the state of `param` described by `entries`; return the tensors to fill.

    Transformer Engine's Adam has a scale for each tensor outside of float32, also an unused scale for moments
    in bfloat16.
    """
    state_tensors = []
    scales = getattr(optimizer, "_scales", None)
    for entry in entries:
        value: Any = entry.value
        if entry.dtype:
            device = param.device if entry.beside else torch.device("cpu")
            value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
            state_tensors.append(value)
            if scales is not None and value.dtype != torch.float32:
                scales.setdefault(param, {})[entry.key] = torch.ones(1, device=device)
        optimizer.state[param][entry.key] = value
    return state_tensors


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message with values of param groups and states. Raises TypeError."""
    return msgspec.msgpack.encode(message, enc_hook=_written)


def decode(data: bytes, kind: type[Any]) -> Any:
    """Decode the result of `encode`."""
    return msgspec.msgpack.decode(data, type=kind, ext_hook=_read)


def _written(value: Any) -> msgspec.msgpack.Ext:
    """Some optimizers count their updates in a tensor with a single number (MindSpeed's AdamW)."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dtype not in _COUNTS:
        raise NotImplementedError
    tensor_fields = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": value.shape,
        "number": value.item(),
    }
    return msgspec.msgpack.Ext(_COUNT, msgspec.msgpack.encode(tensor_fields))


def _read(code: int, data: memoryview) -> torch.Tensor:
    tensor_fields = msgspec.msgpack.decode(data)
    return torch.tensor(tensor_fields["number"], dtype=getattr(torch, tensor_fields["dtype"])).reshape(
        tensor_fields["shape"]
    )

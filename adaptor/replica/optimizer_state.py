"""The state of a torch optimizer in words: what another process needs besides the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from adaptor.replica import twin

# A tensor of one number, in a message. A class that wants it on its device takes it there, as after a load.
_COUNT = 1
_COUNTS = (torch.int32, torch.int64, torch.float32, torch.float64)


class Entry(msgspec.Struct, frozen=True):
    """An entry of a param's state: a tensor of `shape` and `dtype`, or, without a dtype, `value`.

    `beside`: it lies where its param lies; a count of updates may be on the host.
    """

    key: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    beside: bool = True
    value: Any = None


def entries_of(optimizer: torch.optim.Optimizer) -> list[list[Entry]]:
    """Return the state of each param, in the order of the param groups."""
    return [
        [
            Entry(
                key,
                str(value.dtype).removeprefix("torch."),
                tuple(value.shape),
                value.device == param.device,
            )
            if isinstance(value, torch.Tensor)
            else Entry(key, value=value)
            for key, value in optimizer.state.get(param, {}).items()
        ]
        for param in twin.params(optimizer)
    ]


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of the state, flat, in the order of `entries_of`."""
    return [
        value.detach().reshape(-1)
        for param in twin.params(optimizer)
        for value in optimizer.state.get(param, {}).values()
        if isinstance(value, torch.Tensor)
    ]


def make_state(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, entries: Sequence[Entry]
) -> list[torch.Tensor]:
    """Give `param` the state that `entries` describe; return its tensors, which are to be filled."""
    state_tensors = []
    for entry in entries:
        value: Any = entry.value
        if entry.dtype:
            device = param.device if entry.beside else torch.device("cpu")
            value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
            state_tensors.append(value)
        optimizer.state[param][entry.key] = value
    return state_tensors


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message with what param groups and states hold.

    Raises:
        TypeError: there is something in it that cannot be passed on.
    """
    return msgspec.msgpack.encode(message, enc_hook=_written)


def decode(data: bytes, kind: type[Any]) -> Any:
    """Decode what `encode` has made."""
    return msgspec.msgpack.decode(data, type=kind, ext_hook=_read)


def _written(value: Any) -> msgspec.msgpack.Ext:
    """Some optimizers count their updates in a tensor of one number (MindSpeed's AdamW)."""
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

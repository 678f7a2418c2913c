"""The record of a step as bytes, for a replacement process; nothing is ever unpickled.

The record contains the parts of checkpoints besides shards: numbers, text, tensors, numpy's arrays, members
of enums, and tuples and dicts of these types.
"""

from __future__ import annotations

import enum
import sys
from typing import Any

import msgspec
import numpy
import torch

_TENSOR, _ARRAY, _TUPLE, _BIG, _GENERATOR, _ENUM = 1, 2, 3, 4, 5, 6
# What fits into a number of msgpack.
_SMALL = range(-(1 << 63), 1 << 64)


def pack(value: Any) -> bytes:
    """Return `value` as bytes.

    Raises:
        TypeError: names the type of an element that cannot be passed on.
    """
    return msgspec.msgpack.encode(_plain(value))


def unpack(data: bytes | memoryview) -> Any:
    """Return what `pack` was given."""
    return msgspec.msgpack.decode(data, ext_hook=_read)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        kind = str(value.dtype).removeprefix("torch.")
        return _ext(_TENSOR, (kind, list(value.shape), flat.numpy().tobytes()))
    if isinstance(value, torch.Generator):
        return _ext(_GENERATOR, (str(value.device), _plain(value.get_state())))
    if isinstance(value, numpy.ndarray):
        return _ext(_ARRAY, (value.dtype.str, list(value.shape), value.tobytes()))
    if isinstance(value, numpy.generic):
        return _plain(value.item())
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        value_class = type(value)
        return _ext(_ENUM, (value_class.__module__, value_class.__qualname__, value.name))
    if isinstance(value, tuple):
        return _ext(_TUPLE, [_plain(item) for item in value])
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and value not in _SMALL:
        return _ext(_BIG, str(value))
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be passed on to a new process")


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _read(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _BIG:
        return int(unpack(data))
    if code == _GENERATOR:
        device, state = unpack(data)
        return torch.Generator(device).set_state(state)
    if code == _ENUM:
        return _member(*unpack(data))
    kind, shape, content = unpack(data)
    if code == _ARRAY:
        return numpy.frombuffer(bytearray(content), dtype=numpy.dtype(kind)).reshape(shape)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte()
    return flat.view(getattr(torch, kind)).reshape(shape)


def _member(module: str, kind: str, name: str) -> enum.Enum:
    """Return member `name` of an enum from a module that this process has imported, too.

    Raises:
        TypeError: the enum does not exist in the process; nothing is imported for the lookup.
    """
    resolved: Any = sys.modules.get(module)
    for part in kind.split("."):
        resolved = getattr(resolved, part, None)
    if not (isinstance(resolved, enum.EnumMeta) and name in resolved.__members__):
        raise TypeError(f"{kind}.{name} of {module} is no member of an enum here")
    member: enum.Enum = resolved[name]
    return member

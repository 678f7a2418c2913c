"""Compares the functions and classes of a module in two processes, at the end of its import.

A spare imports the modules of a worker before the script runs. A function that the script replaces before
`from there import function` is executed would be the original in a spare. A mark identifies a function by its
module, qualified name and wrappers, not by its code: some libraries replace the code of a function at its
first call.
"""

from __future__ import annotations

import functools
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import wrapt

_MOST_WRAPPERS = 16
_FUNCTIONS: tuple[type, ...] = (
    types.FunctionType,
    types.BuiltinFunctionType,
    functools._lru_cache_wrapper,
    wrapt.FunctionWrapper,
)
# Bytes of the code of a name, and of the code of a mark.
_CODE = 4


def codes_of(module: str) -> bytes:
    """Return eight bytes for each mark of a class of a module, and of a function from another module.

    Functions of the module itself are left out: callers look them up, or have imported them by name.
    """
    return b"".join(_code(name) + _code(mark) for name, mark in _marks(module))


def with_current_codes(module: str, codes: bytes) -> bytes:
    """Return `codes` together with the current `codes_of` the module."""
    current = codes_of(module)
    return codes if current == codes else codes + b"".join(_split(current) - _split(codes))


def first_difference(module: str, codes: bytes, worker_codes: bytes) -> str:
    """Return the name of a function or class in a module that differs from a worker's; empty: no difference.

    Args:
        module: a module of this process.
        codes: `codes_of` the module in this process.
        worker_codes: `codes_of` the module in the worker.
    """
    if codes == worker_codes:
        return ""
    own_codes, theirs = _split(codes), _split(worker_codes)
    names = {code[:_CODE] for code in own_codes - theirs}
    # A class of the module that a worker has replaced: the script will replace it in this process, too.
    replaced = {name for name in names if name + _FOREIGN in theirs and name + _FOREIGN not in own_codes}
    differ = names - replaced
    return min((name for name in names_of(module) if type(name) is str and _code(name) in differ), default="")


def _attribute_of_class(cls: Any, name: str) -> Any:
    """Return an attribute present in each class, without running code of the metaclass, which may do
    anything.
    """
    return type.__dict__[name].__get__(cls)


def _split(codes: bytes) -> set[bytes]:
    return {codes[at : at + 2 * _CODE] for at in range(0, len(codes), 2 * _CODE)}


def names_of(module: str) -> Mapping[str, object]:
    """Return the attributes of a module, without loading lazily loaded parts."""
    try:
        attributes: Mapping[str, object] = object.__getattribute__(sys.modules[module], "__dict__")
    except Exception:  # a module may be any object
        return {}
    return attributes


def _code(text: str) -> bytes:
    return zlib.crc32(text.encode(errors="replace")).to_bytes(_CODE, "big")


_FOREIGN = _code("*")


def _marks(module: str) -> Iterator[tuple[str, str]]:
    """Yield name and mark of classes and foreign functions; `*` marks a foreign object once more.

    No code of these objects is called.
    """
    for name, value in list(names_of(module).items()):
        if not isinstance(name, str):
            continue
        try:
            if issubclass(type(value), type):
                is_own = _attribute_of_class(value, "__module__") == module
                yield name, " ".join(map(_class_name, _attribute_of_class(value, "__mro__")))
            elif type(value) in _FUNCTIONS:
                is_own = value.__module__ == module
                if not is_own:
                    yield name, _function_mark(value)
            else:
                continue
            if not is_own:
                yield name, "*"
        except Exception:  # of an unfinished object
            continue


def _class_name(value: type) -> str:
    return f"{_attribute_of_class(value, '__module__')}.{_attribute_of_class(value, '__qualname__')}"


def _function_mark(value: object) -> str:
    """Return the names of a function and of the functions wrapped in it."""
    names: list[str] = []
    while type(value) in _FUNCTIONS and len(names) < _MOST_WRAPPERS:
        function = cast(types.FunctionType, value)
        names.append(f"{type(value).__name__} {function.__module__} {function.__qualname__}")
        value = getattr(value, "__wrapped__", None)
    return " ".join(names)

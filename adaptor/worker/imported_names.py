"""Tells what modules have imported by name, for a process that is to have the same: a spare.

A spare imports what the workers have imported, and runs the script only when it takes a place. Where a
script replaces a function before it imports a module that does `from there import function`, that module has
the replacement in a worker and the original in a spare, and the new rank would compute something else than
the others.
"""

from __future__ import annotations

import functools
import sys
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import wrapt

# Wrappers of a function, one around the other.
_MOST_LAYERS = 16
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper, wrapt.ObjectProxy)
# In the place of a mark: the object of this name was defined in another module.
_FOREIGN = "*"
# Objects, each with the name under which a module has it.
Objects = Iterable[tuple[str, object]]


def of_modules(names: Iterable[str], lost: Mapping[str, Objects]) -> dict[str, bytes]:
    """Return, by module, four bytes for each function that it has from another module, and for each class.

    Args:
        names: of the modules.
        lost: what modules had when their import had finished, and have no longer: a process that has imported
            them alone has it.
    """
    return {
        name: b"".join(sorted({*_codes(name, objects_of(name)), *_codes(name, lost.get(name, ()))}))
        for name in names
    }


def first_that_differs(told: Mapping[str, bytes], names: Iterable[str]) -> str:
    """Return the first `module.name` that another process has not, or nothing.

    Args:
        told: what `of_modules` has returned there.
        names: the modules that are compared.
    """
    for module in names:
        if module not in told:
            continue
        codes = {told[module][at : at + 4] for at in range(0, len(told[module]), 4)}
        for name, mark, is_foreign in _marks(module, objects_of(module)):
            if _code(name, mark) in codes:
                continue
            # A function or a class of its own that was replaced since is replaced here, too, by the script.
            if is_foreign or _code(name, _FOREIGN) not in codes:
                return f"{module}.{name}"
    return ""


def names_of(module: str) -> Mapping[str, object]:
    """Return what a module has, by name, past whatever it has to load its parts late."""
    try:
        found: Mapping[str, object] = object.__getattribute__(sys.modules[module], "__dict__")
    except Exception:  # a module may be any object
        return {}
    return found


def objects_of(module: str) -> list[tuple[str, object]]:
    """Return the classes and functions that a module has, by name, without looking into any."""
    return [
        (name, value)
        for name, value in list(names_of(module).items())
        if issubclass(type(value), type) or issubclass(type(value), _FUNCTIONS)
    ]


def _codes(module: str, objects: Objects) -> Iterator[bytes]:
    for name, mark, is_foreign in _marks(module, objects):
        yield _code(name, mark)
        if is_foreign:
            yield _code(name, _FOREIGN)


def _code(name: str, mark: str) -> bytes:
    return zlib.crc32(f"{name} {mark}".encode(errors="replace")).to_bytes(4, "big")


def _marks(module: str, objects: Objects) -> Iterator[tuple[str, str, bool]]:
    """Yield name, mark and whether another module has defined it: equal marks are equal objects.

    Left out: functions of its own. Whoever calls them looks them up, or has them imported by name.
    """
    for name, value in objects:
        try:
            is_foreign = value.__module__ != module
            if issubclass(type(value), type):
                mark = _classes(cast(type, value))  # what type(value) says, not the object
            elif is_foreign:
                mark = _layers(value)
            else:
                continue
        except BaseException:  # whatever an object of somebody else's answers
            continue
        yield name, mark, is_foreign


def _classes(value: type) -> str:
    return " ".join(f"{each.__module__}.{each.__qualname__}" for each in value.__mro__)


def _layers(value: object) -> str:
    """Return a mark of a function and of what is wrapped in it."""
    layers: list[str] = []
    while value is not None and len(layers) < _MOST_LAYERS:
        place = type(value).__qualname__
        if type(value) is types.FunctionType:
            place = f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}"
        layers.append(f"{place} {getattr(value, '__qualname__', '')}")
        value = getattr(value, "__wrapped__", None)
    return " ".join(layers)

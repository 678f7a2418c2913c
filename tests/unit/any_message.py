"""Messages with any values that a connection lets through."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

_INT64 = 2**63


@functools.cache
def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, within its bounds."""
    if kind in (int, float, str, bytes):
        return {
            int: st.integers(-_INT64, _INT64 - 1),
            float: st.floats(allow_nan=False),
            bytes: st.binary(max_size=20),
            str: st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3000), max_size=20),
        }[kind]
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        (bounds,) = parts[1:]
        assert isinstance(bounds, msgspec.Meta)
        return st.integers(bounds.ge, bounds.le if bounds.le is not None else bounds.lt - 1)
    if origin is tuple:
        return st.lists(any_of(parts[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(any_of(parts[0]), any_of(parts[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([any_of(part) for part in parts])
    if kind is type(None):
        return st.none()
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: any_of(hint) for name, hint in hints.items()})

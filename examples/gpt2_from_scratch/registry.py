"""A registry: parts of the program are found by kind and name, as configuration files name them.

@register("model", "gpt2")
class GPT2: ...

find("model", "gpt2")    # the class
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar("Part", bound=Callable[..., Any])

_PARTS: dict[str, dict[str, Any]] = {}


def register(kind: str, name: str) -> Callable[[Part], Part]:
    """Make the class or function below known as `name` of `kind`. Raises ValueError: the name is taken."""

    def add(part: Part) -> Part:
        parts = _PARTS.setdefault(kind, {})
        if name in parts and parts[name].__qualname__ != part.__qualname__:
            raise ValueError(f"{kind} {name!r} is registered already: {parts[name].__qualname__}")
        parts[name] = part
        return part

    return add


def find(kind: str, name: str) -> Any:
    """Return the part registered as `name` of `kind`. Raises ValueError, which lists near matches."""
    parts = _PARTS.get(kind, {})
    if name not in parts:
        raise ValueError(unknown(kind, name, parts))
    return parts[name]


def unknown(kind: str, name: str, known_names: Any) -> str:
    """Return the line about a name that is not in `known_names`."""
    near = difflib.get_close_matches(name, known_names)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known_names)) or 'none'}"
    )
    return f"unknown {kind} {name!r}; {hint}"

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
        here = _PARTS.setdefault(kind, {})
        if name in here and here[name].__qualname__ != part.__qualname__:
            raise ValueError(f"{kind} {name!r} is registered already: {here[name].__qualname__}")
        here[name] = part
        return part

    return add


def find(kind: str, name: str) -> Any:
    """Return what is registered as `name` of `kind`. Raises ValueError, which lists near matches."""
    here = _PARTS.get(kind, {})
    if name not in here:
        raise ValueError(unknown(kind, name, here))
    return here[name]


def unknown(kind: str, name: str, known: Any) -> str:
    """Return the one line about a name that is not among the `known` ones."""
    near = difflib.get_close_matches(name, known)
    said = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"
    return f"unknown {kind} {name!r}; {said}"

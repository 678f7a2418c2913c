"""The signature that a patch expects, and whether a function has it.

`(a, b=, ...)`: the first parameters are `a`, then `b`, which has a default; both can be given by position.
`...` allows any more parameters, without it there are none. Names after a `*` are keyword-only. `*args` and
`**kwargs` stand for themselves, `(...)` for any callable. `self` and `cls` are not listed. A name without `=`
may have a default or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Expected:
    """A parsed `accepts`."""

    text: str
    parameters: tuple[Parameter, ...]
    open: bool

    @classmethod
    def parse(cls, text: str) -> Expected:
        """Parse `text`.

        Raises:
            ValueError: it is not in the language described above.
        """
        if not (text.startswith("(") and text.endswith(")")):
            raise ValueError(f"accepts={text!r}: must be in parentheses")
        parameters: list[Parameter] = []
        kind: Any = Parameter.POSITIONAL_OR_KEYWORD
        is_open = False
        for item in filter(None, (part.strip() for part in text[1:-1].split(","))):
            if item == "...":
                is_open = True
            elif item == "*":
                kind = Parameter.KEYWORD_ONLY
            elif item.startswith("**"):
                parameters.append(Parameter(item[2:], Parameter.VAR_KEYWORD))
            elif item.startswith("*"):
                parameters.append(Parameter(item[1:], Parameter.VAR_POSITIONAL))
                kind = Parameter.KEYWORD_ONLY
            elif is_open and kind in _POSITIONAL:
                raise ValueError(f"accepts={text!r}: {item} has no position after '...'")
            else:
                default = None if item.endswith("=") else Parameter.empty
                parameters.append(Parameter(item.removesuffix("="), kind, default=default))
        return cls(text, tuple(parameters), is_open)

    def matches(self, parameters: tuple[Parameter, ...]) -> bool:
        """Tell whether a function with these parameters can be called the way the wrapper expects."""
        positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
        remaining = {
            parameter.name: parameter for parameter in parameters if parameter.kind not in _POSITIONAL
        }
        for expected_parameter in self.parameters:
            if expected_parameter.kind in _POSITIONAL:
                have = positional.pop(0) if positional else None
            else:
                have = remaining.pop(expected_parameter.name, None)
            if have is None or have.name != expected_parameter.name:
                return False
            if expected_parameter.kind not in _POSITIONAL and have.kind is not expected_parameter.kind:
                return False
            if expected_parameter.default is not Parameter.empty and have.default is Parameter.empty:
                return False
        return self.open or not (positional or remaining)


def parameters_of(function: Callable[..., Any], bound: bool) -> tuple[Parameter, ...] | None:
    """The parameters without `self` or `cls` where `bound`; None for a builtin that does not tell."""
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if bound and parameters and parameters[0].kind in _POSITIONAL:
        return parameters[1:]
    return parameters


def render(parameters: tuple[Parameter, ...] | None) -> str:
    """The parameters in the language of `accepts`: without values, which may differ between two processes."""
    if parameters is None:
        return "(unknown)"
    parts: list[str] = []
    starred = False
    for parameter in parameters:
        if parameter.kind is Parameter.VAR_POSITIONAL:
            starred = True
            parts.append(f"*{parameter.name}")
        elif parameter.kind is Parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
        else:
            if parameter.kind is Parameter.KEYWORD_ONLY and not starred:
                starred = True
                parts.append("*")
            parts.append(parameter.name + ("" if parameter.default is Parameter.empty else "="))
    return f"({', '.join(parts)})"

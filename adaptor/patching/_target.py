"""The targets of patches: their signatures, their places, and the wrapper in place of the function.

A signature `(a, b=, ...)`: the first parameters are `a`, then `b`, which has a default; both can be given by
position. `...` allows further parameters. Names after a `*` are keyword-only. `*args` and `**kwargs` stand
for themselves, `(...)` for any callable. `self` and `cls` are not listed. A name without `=` may have a
default or not.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from types import FunctionType, ModuleType
from typing import Any

import wrapt

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Expected:
    """A parsed `accepts`."""

    text: str
    parameters: tuple[Parameter, ...]
    open: bool

    @classmethod
    def parse(cls, text: str) -> Expected:
        """Parse `text`. Raises ValueError: `text` is not in the language described above."""
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
        """Return True if a function with these parameters can be called as the wrapper expects."""
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
    """Return the parameters, without `self` or `cls` if `bound`; None for a builtin without a signature."""
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if bound and parameters and parameters[0].kind in _POSITIONAL:
        return parameters[1:]
    return parameters


def render(parameters: tuple[Parameter, ...] | None) -> str:
    """Return the parameters in the language of `accepts`, without values, which may differ."""
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


_NOTHING = object()


class NotFitting(Exception):
    """No function has this name.

    Attributes:
        found: the object found instead
        absent: whether the name is missing
        imported: whether the function belongs to another module
    """

    def __init__(self, actual: str, absent: bool = False, imported: bool = False) -> None:
        super().__init__(actual)
        self.found = actual
        self.absent = absent
        self.imported = imported


@dataclass(frozen=True, eq=False)
class PatchTarget:
    """A function in its place: `raw` is the attribute `name` of a module or class, own or inherited."""

    module: ModuleType
    owner: Any
    name: str
    raw: Any
    inherited: bool

    @property
    def function(self) -> Callable[..., Any]:
        """Return the function itself, out of its classmethod or staticmethod."""
        function: Callable[..., Any] = (
            self.raw.__func__ if isinstance(self.raw, (classmethod, staticmethod)) else self.raw
        )
        return function

    @property
    def bound(self) -> bool:
        """Return True if its first parameter is `self` or `cls`."""
        return isinstance(self.owner, type) and not isinstance(self.raw, staticmethod)

    def current(self) -> Any:
        """Return the object of the name now."""
        return inspect.getattr_static(self.owner, self.name, _NOTHING)

    def holds(self, wrapper: Any) -> bool:
        """Return True if `wrapper` is bound to the name, directly or under other wrappers."""
        current = self.current()
        while current is not wrapper and current is not _NOTHING:
            current = getattr(current, "__wrapped__", _NOTHING)
        return current is wrapper

    def put(self, wrapper: Any) -> None:
        """Put a wrapper in the place."""
        setattr(self.owner, self.name, wrapper)

    def restore(self) -> None:
        """Restore the original; of an inherited method the attribute is deleted."""
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)


def locate(module: ModuleType, qualname: str) -> PatchTarget:
    """Find `name` or `Class.method` in a module. Raises NotFitting."""
    owner: Any = module
    *path, name = qualname.split(".")
    for part in path:
        owner = vars(owner).get(part, _NOTHING)
        if owner is _NOTHING:
            raise NotFitting(f"no class {part}", absent=True)
        if not isinstance(owner, type):
            raise NotFitting(f"{part} is not a class")
    raw = inspect.getattr_static(owner, name, _NOTHING) if path else vars(owner).get(name, _NOTHING)
    if raw is _NOTHING:
        raise NotFitting("no such name", absent=True)
    if isinstance(raw, type):
        raise NotFitting("a class (patch its __init__)")
    target = PatchTarget(module, owner, name, raw, inherited=name not in vars(owner))
    if isinstance(raw, property) or not callable(target.function):
        raise NotFitting(f"a {type(raw).__name__}, not a function")
    if not path and (home := _defined_elsewhere(module, name, raw)):
        raise NotFitting(f"an import from {home} (patch it there)", imported=True)
    return target


def is_gone(module_name: str) -> bool:
    """Return True if the package is imported and has no such module (any more). Imports nothing."""
    parent = sys.modules.get(module_name.rpartition(".")[0])
    if not hasattr(parent, "__path__"):  # not imported, or a file of the script with the package's name
        return False
    return module_name not in sys.modules and not importlib.util.find_spec(module_name)


def _defined_elsewhere(module: ModuleType, name: str, function: Any) -> str | None:
    """Return the module that defines `function` if `module` only imports it: others bypass a wrapper here."""
    if not isinstance(function, FunctionType) or function.__module__ == module.__name__:
        return None
    home = sys.modules.get(function.__module__)
    return function.__module__ if home is not None and vars(home).get(name) is function else None


_Reduced = str | tuple[Any, tuple[Any, ...]]


class _BoundWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    def __copy__(self) -> _BoundWrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As Python does for a bound method: the copied object's own method.
        instance = getattr(self.__wrapped__, "__self__", None)
        if instance is None or isinstance(instance, type):
            return self
        duplicate = copy.deepcopy(instance, memo)
        return self._self_parent.__get__(duplicate, type(duplicate))

    def __reduce_ex__(self, protocol: Any) -> _Reduced:
        instance = getattr(self.__wrapped__, "__self__", None)
        if instance is not None:
            return getattr, (instance, self.__name__)
        reduced: _Reduced = self._self_parent.__reduce_ex__(protocol)
        return (copy.copy, (self._self_parent,)) if isinstance(reduced, str) else reduced


class Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """`wrapt.FunctionWrapper` at `owner.name`, where `owner` is a module or a class; copied and pickled by
    reference.

    wrapt's own refuses copy, deepcopy and pickle; Megatron deep-copies configs with functions and pickles its
    arguments into every checkpoint. A copy or pickle equals the copy or pickle of the plain function or
    method, so a checkpoint loads without the adaptor.
    """

    __bound_function_wrapper__ = _BoundWrapper

    def __init__(self, wrapped: Any, wrapper: Any, enabled: Any, owner: Any, name: str) -> None:
        super().__init__(wrapped, wrapper, enabled=enabled)
        self._self_holder = owner
        self._self_name = name

    def __copy__(self) -> Wrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapper:
        return self

    def __reduce_ex__(self, protocol: Any) -> _Reduced:
        if isinstance(self._self_holder, type):
            return getattr, (self._self_holder, self._self_name)
        module = sys.modules.get(self._self_holder.__name__)
        if getattr(module, self._self_name, None) is self:
            return str(self._self_name)
        # Undone, but still held elsewhere: the wrapper stands for the original, and copy.copy() of a function
        # is the function.
        return copy.copy, (self.__wrapped__,)

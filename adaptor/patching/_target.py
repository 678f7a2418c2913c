"""Finding the function that a target names, and putting something else in its place."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

_NOTHING = object()


class NotFitting(Exception):
    """There is no function of that name; `found` says what there is, `absent` whether there is nothing,
    `imported` whether it is one of another module."""

    def __init__(self, actual: str, absent: bool = False, imported: bool = False) -> None:
        super().__init__(actual)
        self.found = actual
        self.absent = absent
        self.imported = imported


@dataclass(frozen=True, eq=False)
class PatchTarget:
    """A function in its place: `raw` is what the owner, a module or class, has or inherits as `name`."""

    module: ModuleType
    owner: Any
    name: str
    raw: Any
    inherited: bool

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself, out of its classmethod or staticmethod."""
        function: Callable[..., Any] = (
            self.raw.__func__ if isinstance(self.raw, (classmethod, staticmethod)) else self.raw
        )
        return function

    @property
    def bound(self) -> bool:
        """Tell whether its first parameter is `self` or `cls`."""
        return isinstance(self.owner, type) and not isinstance(self.raw, staticmethod)

    def current(self) -> Any:
        """Return the object that the name is bound to now."""
        return inspect.getattr_static(self.owner, self.name, _NOTHING)

    def holds(self, wrapper: Any) -> bool:
        """Tell whether `wrapper` is bound to the name, directly or under other wrappers."""
        current = self.current()
        while current is not wrapper and current is not _NOTHING:
            current = getattr(current, "__wrapped__", _NOTHING)
        return current is wrapper

    def put(self, wrapper: Any) -> None:
        """Put a wrapper in the place."""
        setattr(self.owner, self.name, wrapper)

    def restore(self) -> None:
        """Put back what was there: nothing for an inherited method, or a copy stays on the subclass."""
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
    """Tell whether the package is imported and has no such module (any more). Imports nothing."""
    parent = sys.modules.get(module_name.rpartition(".")[0])
    if not hasattr(parent, "__path__"):  # not imported, or a file of the script with the name of the package
        return False
    return module_name not in sys.modules and not importlib.util.find_spec(module_name)


def _defined_elsewhere(module: ModuleType, name: str, function: Any) -> str | None:
    """Return the module that defines `function` if `module` only imports it: others bypass a wrapper here."""
    if not isinstance(function, FunctionType) or function.__module__ == module.__name__:
        return None
    home = sys.modules.get(function.__module__)
    return function.__module__ if home is not None and vars(home).get(name) is function else None

"""The object shared by the parts of the adaptor in a process: its settings, and the state of each part.

The context is created from the environment at its first use: settings are read at this moment only. A part
whose state lasts as long as the process is a class with the context as its argument, and `Context.part` keeps
a single object of each class. So nothing is kept in globals of modules, and a test begins with a new context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from adaptor import config
from adaptor.config import Config

T = TypeVar("T")


class Context:
    """The state of a process."""

    def __init__(self, settings: Config) -> None:
        self.settings = settings
        self._parts: dict[object, object] = {}
        self._seen: set[str] = set()

    def part(self, kind: Callable[[Context], T]) -> T:
        """Return the single object of the class `kind` in this process; created at its first use."""
        instance = self._parts.get(kind)
        if instance is None:
            instance = self._parts[kind] = kind(self)
        return instance  # type: ignore[return-value]  # a cast is a call, and this is called often in a step

    def discard(self, kind: Callable[[Context], object]) -> None:
        """Let the object of the class `kind` be made anew, as the environment has changed."""
        self._parts.pop(kind, None)

    def is_first(self, event: str) -> bool:
        """Return whether this is the first call with `event` in this process: a line is printed once."""
        is_first = event not in self._seen
        self._seen.add(event)
        return is_first

    def copy_locally(self) -> None:
        """The script's own arguments ask for a local copy, as TTP_LOCAL_COPY does."""
        self.settings = replace(self.settings, local_copy=True)


_context: Context | None = None


def get() -> Context:
    """Return the context of this process. Raises ConfigError."""
    return begin() if _context is None else _context


def begin(environ: Mapping[str, str] | None = None) -> Context:
    """Create the context of this process anew, from the variables in `environ`, or from the process's
    variables.

    Raises:
        ConfigError: a setting makes no sense.
    """
    global _context
    _context = Context(config.load(environ))
    return _context


def forget() -> None:
    """Let the next `get` make a new context."""
    global _context
    _context = None


def part(kind: Callable[[Context], T]) -> T:
    """Return `get().part(kind)`."""
    return (get() if _context is None else _context).part(kind)

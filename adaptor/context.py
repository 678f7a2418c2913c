"""The one object that the parts of the adaptor in a process share: its settings, and the state of each part.

It is made once, from the environment, when it is first asked for: settings are read there and nowhere else.
A part whose state lasts as long as the process is a class that takes the context, and `Context.part` keeps
the one object of each class. So nothing is kept in globals of modules, and a test begins with a new context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from adaptor import config
from adaptor.config import Config

T = TypeVar("T")


class Context:
    """The state of a process.

    Attributes:
        settings: the user's
    """

    def __init__(self, settings: Config) -> None:
        self.settings = settings
        self._parts: dict[object, object] = {}

    def part(self, kind: Callable[[Context], T]) -> T:
        """Return the one object of the class `kind` in this process; made when it is first asked for."""
        instance = self._parts.get(kind)
        if instance is None:
            instance = self._parts[kind] = kind(self)
        return instance  # type: ignore[return-value]  # a cast is a call, and this is called often in a step

    def discard(self, kind: Callable[[Context], object]) -> None:
        """Let the object of the class `kind` be made anew, as the environment has changed."""
        self._parts.pop(kind, None)

    def copy_locally(self) -> None:
        """The script's own arguments ask for a local copy, as TTP_LOCAL_COPY does."""
        self.settings = replace(self.settings, local_copy=True)


_context: Context | None = None


def get() -> Context:
    """Return the context of this process.

    Raises:
        ConfigError: it is not made yet, and a setting makes no sense.
    """
    return begin() if _context is None else _context


def begin(environ: Mapping[str, str] | None = None) -> Context:
    """Make the context of this process anew, from the variables in `environ`, or those of the process.

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

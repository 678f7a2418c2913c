"""Notes what each module has by name when its import has finished, in a worker that runs its script.

What a module has from others later on is not enough to tell what a spare would have in its place. A function
that the script replaces before the import comes from the import itself, and a spare that imports the module
first has the original. One that the script replaces afterwards is replaced in a spare as well, when that runs
the script.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from adaptor import context
from adaptor.context import Context
from adaptor.protocol.messages import ChangedVariable
from adaptor.text import encodable
from adaptor.worker import imported_names


class ScriptImports:
    """The imports of the script of this process.

    Attributes:
        before: the modules that were there before the script, which has changed nothing of what they imported
    """

    def __init__(self, _context: Context) -> None:
        self.before: frozenset[str] = frozenset()
        self.are_watched = False
        # Names, and their objects. One worker of a node is asked, and the others keep them: two tuples for
        # each module are few objects, where pairs would be tens of thousands.
        self._had: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {}
        self._environment: dict[str, str] = {}
        self._seen = 0  # of the environment, a hash
        self._changed: dict[str, str] = {}  # variables: the newest module when it was changed first

    def begin(self, *, watched: bool) -> None:
        """The script begins now.

        Args:
            watched: whether a spare may ask what is imported.
        """
        self.before = frozenset(sys.modules)
        self.are_watched = watched
        if watched:
            self._environment = dict(os.environ)
            self._seen = _hash_of_environment()
            sys.meta_path.insert(0, _Finder())

    def note(self, module: str) -> None:
        """Note what `module` has, whose import has finished."""
        if self.are_watched:
            objects = imported_names.objects_of(module)
            self._had[module] = tuple(name for name, _ in objects), tuple(value for _, value in objects)

    def note_variables(self) -> None:
        """Note which variables have changed; an import begins."""
        seen = _hash_of_environment()
        if seen != self._seen:  # seldom: to read all of them takes longer
            self._seen = seen
            for name in {*self._environment, *os.environ}:
                if name.isprintable() and self._environment.get(name) != os.environ.get(name):
                    self._changed.setdefault(name, next(reversed(sys.modules)))

    def changed_variables(self) -> dict[str, ChangedVariable]:
        """Return, by name, what had changed since the script began when something was imported."""
        return {
            name: ChangedVariable(encodable(newest), code_of_variable(name))
            for name, newest in self._changed.items()
        }

    def end(self) -> dict[str, list[tuple[str, object]]]:
        """Watch no longer, and keep no object.

        Returns:
            By module, the objects that it had, and has lost since.
        """
        self.are_watched = False
        had, self._had = self._had, {}
        lost = {}
        for module, (names, values) in had.items():
            now = imported_names.names_of(module)
            pairs = zip(names, values, strict=True)
            gone = [(name, value) for name, value in pairs if now.get(name) is not value]
            if gone:
                lost[module] = gone
        return lost


def code_of_variable(name: str) -> bytes:
    """Return four bytes for the value that an environment variable has now, which may be a secret."""
    return zlib.crc32(repr(os.environ.get(name)).encode()).to_bytes(4, "big")


def _hash_of_environment() -> int:
    # As it is kept: it is looked at in each import, and to decode it takes 30 times as long.
    return hash(tuple(os.environ._data.items()))  # type: ignore[attr-defined]


class _Finder:
    """The first finder: it finds what the others find, and lets the end of the import be noted."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None where this one has no part in it."""
        imports = context.part(ScriptImports)
        if not imports.are_watched:
            return None
        # An import does not fail for a spare: the script may have replaced `os.environ`.
        with contextlib.suppress(Exception):
            imports.note_variables()
        finders = list(sys.meta_path)
        if self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            if not hasattr(finder, "find_spec"):
                return None  # Python knows what to do with it
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec) is ModuleSpec:
                    spec.__class__ = _Unfinished
                return spec
        return None


class _Unfinished(ModuleSpec):
    """The spec of a module, until its import has finished, which Python notes in it.

    No loader is wrapped for that: it would be a call more in the traceback of each error in an import.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            with contextlib.suppress(Exception):  # an import does not fail for a spare
                context.part(ScriptImports).note(self.name)

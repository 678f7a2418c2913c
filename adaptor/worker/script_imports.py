"""Records the names of each module at the end of its import, in a worker and in a spare.

Both import the same modules in the same order, so a module has the same names at the end of its import in
both, unless the script has changed something before. The names that it has later depend on the training.
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
    """The imports of this process since `begin`.

    Attributes:
        is_watching: whether the imports are recorded.
        names: by module, in the order in which their imports finished, `imported_names.codes_of` it then.
    """

    def __init__(self, _context: Context) -> None:
        self.is_watching = False
        self.names: dict[str, bytes] = {}
        self._environment: dict[bytes, bytes] = {}  # not of os.environ: in a spare, its readers are recorded
        self._seen = 0  # of the environment, a hash
        self._changed: dict[str, str] = {}  # variables: the newest module when it was changed first

    def begin(self) -> None:
        """Record the imports from now on, for a spare or in a spare."""
        self.is_watching = True
        self.names = {}
        self._environment, self._changed = dict(os.environb), {}
        self._seen = _hash_of_environment()
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())

    def end(self) -> dict[str, bytes]:
        """Record nothing any more, and return `names`, with what the modules have now besides.

        An import may change another module. The finder stays: another thread may be going through
        `sys.meta_path`.
        """
        self.is_watching = False
        names, self.names = self.names, {}  # a thread may still add a module
        return {module: imported_names.with_current_codes(module, codes) for module, codes in names.items()}

    def note(self, module: str) -> None:
        """Record the names of `module`, whose import has finished or failed."""
        if self.is_watching and module in sys.modules and module.isprintable():
            self.names[module] = imported_names.codes_of(module)

    def note_variables(self) -> None:
        """Note which variables have changed; an import begins."""
        environment_hash = _hash_of_environment()
        if environment_hash != self._seen:  # seldom: to read all of them takes longer
            self._seen = environment_hash
            for key in {*self._environment, *os.environb}:
                name = os.fsdecode(key)
                if name.isprintable() and self._environment.get(key) != os.environb.get(key):
                    self._changed.setdefault(name, next(reversed(sys.modules)))

    def changed_variables(self) -> dict[str, ChangedVariable]:
        """Return, by name, the variables that the script had changed before its last import."""
        return {
            name: ChangedVariable(encodable(newest), code_of_variable(name))
            for name, newest in self._changed.items()
        }


def code_of_variable(name: str) -> bytes:
    """Return four bytes for the value that an environment variable has now, which may be a secret."""
    # Not of os.environ: what reads that is recorded in a spare.
    return zlib.crc32(repr(os.environb.get(os.fsencode(name))).encode()).to_bytes(4, "big")


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
        if not imports.is_watching:
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

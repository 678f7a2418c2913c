"""Records the names of each module at the end of its import, in a worker and in a spare.

Both import the same modules in the same order, so a module has the same names at the end of its import in
both, unless the script has changed something before. Names added later depend on the training.
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
        names: by module, in the order of finished imports: `imported_names.codes_of` the module at the end of
            its import.
    """

    def __init__(self, _context: Context) -> None:
        self.is_watching = False
        self.names: dict[str, bytes] = {}
        self._environment: dict[bytes, bytes] = {}  # not of os.environ: in a spare, its readers are recorded
        self._seen = 0  # of the environment, a hash
        self._changed: dict[str, str] = {}  # by variable: the newest module at the first change

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
        """Return, by name, the variables changed by the script before its last import."""
        return {
            name: ChangedVariable(encodable(newest), code_of_variable(name))
            for name, newest in self._changed.items()
        }


def code_of_variable(name: str) -> bytes:
    """Return four bytes for the current value of an environment variable, which may be a secret."""
    # Not of os.environ: a spare records reads of os.environ.
    return zlib.crc32(repr(os.environb.get(os.fsencode(name))).encode()).to_bytes(4, "big")


def _hash_of_environment() -> int:
    # Undecoded: the value is read in each import, and decoding takes 30 times as long.
    return hash(tuple(os.environ._data.items()))  # type: ignore[attr-defined]


class _Finder:
    """The first finder: returns the specs of the other finders, and records the end of the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None if this finder has no part in the import."""
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
                return None  # Python handles the case
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec) is ModuleSpec:
                    spec.__class__ = _Unfinished
                return spec
        return None


class _Unfinished(ModuleSpec):
    """The spec of a module during its import, where Python records the end of the import.

    No loader is wrapped: a wrapper would add a call to the traceback of each error in an import.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            with contextlib.suppress(Exception):  # an import does not fail for a spare
                context.part(ScriptImports).note(self.name)

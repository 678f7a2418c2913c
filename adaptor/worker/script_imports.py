"""Records the names of each module at the end of its import, in a worker and in a spare.

Both import the same modules in the same order, so a module has the same names at the end of its import in
both, unless the script has changed something before. Names added later depend on the training.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import wrapt

from adaptor import context
from adaptor.context import Context
from adaptor.protocol.messages import ChangedVariable, Modules
from adaptor.text import encodable

# A spare imports the modules of a worker before the script runs. A function that the script replaces before
# `from there import function` is executed would be the original in a spare. A mark identifies a function by
# its module, qualified name and wrappers, not by its code: some libraries replace the code of a function at
# its first call.

_MOST_WRAPPERS = 16
_FUNCTIONS: tuple[type, ...] = (
    types.FunctionType,
    types.BuiltinFunctionType,
    functools._lru_cache_wrapper,
    wrapt.FunctionWrapper,
)
# Bytes of the code of a name, and of the code of a mark.
_CODE = 4


def codes_of(module: str) -> bytes:
    """Return eight bytes for each mark of a class of a module, and of a function from another module.

    Functions of the module itself are left out: callers look them up, or have imported them by name.
    """
    return b"".join(_code(name) + _code(mark) for name, mark in _marks(module))


def with_current_codes(module: str, codes: bytes) -> bytes:
    """Return `codes` together with the current `codes_of` the module."""
    current = codes_of(module)
    return codes if current == codes else codes + b"".join(_split(current) - _split(codes))


def first_difference(module: str, codes: bytes, worker_codes: bytes) -> str:
    """Return the name of a function or class in a module that differs from a worker's; empty: no difference.

    Args:
        codes: `codes_of` the module in this process.
        worker_codes: `codes_of` the module in the worker.
    """
    if codes == worker_codes:
        return ""
    own_codes, theirs = _split(codes), _split(worker_codes)
    names = {code[:_CODE] for code in own_codes - theirs}
    # A class of the module that a worker has replaced: the script will replace it in this process, too.
    replaced = {name for name in names if name + _FOREIGN in theirs and name + _FOREIGN not in own_codes}
    differ = names - replaced
    return min((name for name in names_of(module) if type(name) is str and _code(name) in differ), default="")


def _attribute_of_class(cls: Any, name: str) -> Any:
    """Return an attribute present in each class, without running code of the metaclass."""
    return type.__dict__[name].__get__(cls)


def _split(codes: bytes) -> set[bytes]:
    return {codes[at : at + 2 * _CODE] for at in range(0, len(codes), 2 * _CODE)}


def names_of(module: str) -> Mapping[str, object]:
    """Return the attributes of a module, without loading lazily loaded parts."""
    try:
        attributes: Mapping[str, object] = object.__getattribute__(sys.modules[module], "__dict__")
    except Exception:  # a module may be any object
        return {}
    return attributes


def _code(text: str) -> bytes:
    return zlib.crc32(text.encode(errors="replace")).to_bytes(_CODE, "big")


_FOREIGN = _code("*")


def _marks(module: str) -> Iterator[tuple[str, str]]:
    """Yield name and mark of classes and foreign functions; `*` marks a foreign object once more.

    No code of these objects is called.
    """
    for name, value in list(names_of(module).items()):
        if not isinstance(name, str):
            continue
        try:
            if issubclass(type(value), type):
                is_own = _attribute_of_class(value, "__module__") == module
                yield name, " ".join(map(_class_name, _attribute_of_class(value, "__mro__")))
            elif type(value) in _FUNCTIONS:
                is_own = value.__module__ == module
                if not is_own:
                    yield name, _function_mark(value)
            else:
                continue
            if not is_own:
                yield name, "*"
        except Exception:  # of an unfinished object
            continue


def _class_name(value: type) -> str:
    return f"{_attribute_of_class(value, '__module__')}.{_attribute_of_class(value, '__qualname__')}"


def _function_mark(value: object) -> str:
    """Return the names of a function and of the functions wrapped in it."""
    names: list[str] = []
    while type(value) in _FUNCTIONS and len(names) < _MOST_WRAPPERS:
        function = cast(types.FunctionType, value)
        names.append(f"{type(value).__name__} {function.__module__} {function.__qualname__}")
        value = getattr(value, "__wrapped__", None)
    return " ".join(names)


class ScriptImports:
    """The imports of this process since `begin`.

    Attributes:
        is_watching: whether the imports are recorded.
        names: by module, in the order of finished imports: `codes_of` the module at the end of
            its import.
    """

    def __init__(self, _context: Context) -> None:
        self.is_watching = False
        self.names: dict[str, bytes] = {}
        self._environment: dict[bytes, bytes] = {}  # not of os.environ: in a spare, its readers are recorded
        self._seen = 0  # of the environment, a hash
        self._changed: dict[str, str] = {}  # by variable: the newest module at the first change
        self._importing: dict[str, str] = {}  # by top-level package: the outermost import that is under way
        self._outermost: dict[str, str] = {}  # modules imported meanwhile, with that import

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
        return {module: with_current_codes(module, codes) for module, codes in names.items()}

    def note(self, module: str) -> None:
        """Record the names of `module`, whose import has finished or failed."""
        if self.is_watching and module in sys.modules and module.isprintable():
            self.names[module] = codes_of(module)

    def note_begin(self, module: str) -> None:
        """Note the import in the same top-level package that has led to the import of `module`."""
        outermost = self._importing.setdefault(module.partition(".")[0], module)
        if outermost != module:
            self._outermost.setdefault(module, outermost)

    def note_end(self, module: str) -> None:
        """Note that the import of `module` has finished or failed, and the names of the module."""
        package = module.partition(".")[0]
        if self._importing.get(package) == module:
            del self._importing[package]
        self.note(module)

    def in_order(self) -> list[str]:
        """Return the modules in an order in which they can be imported one after the other.

        A module of a package may need that another one of the package is being imported, which imports the
        module (a circular import): so it comes after the other one. Otherwise a module comes after those that
        it has imported, as in `sys.modules`.
        """
        order: dict[str, None] = {}
        inner: dict[str, list[str]] = {}
        modules = list(sys.modules)
        for name in modules:
            inner.setdefault(self._outermost.get(name, ""), []).append(name)
        for name in modules:
            if self._outermost.get(name) not in sys.modules:
                order.update(dict.fromkeys([name, *inner.get(name, ())]))
        return [*order, *(name for name in modules if name not in order)]

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
        if name == "_initializing":
            imports = context.part(ScriptImports)
            if not value:
                self.__class__ = ModuleSpec  # type: ignore[assignment]
            with contextlib.suppress(Exception):  # an import does not fail for a spare
                (imports.note_begin if value else imports.note_end)(self.name)


def modules_of_this_process(rank: int) -> Modules:
    """Return the modules of the worker of `rank`, in an order for their imports in a spare; called once."""
    path = tuple(folder for folder in list(sys.path) if isinstance(folder, str))
    imports = context.part(ScriptImports)
    origins = {encodable(name): origin(name) for name in imports.in_order()}
    return Modules(rank, path, origins, imports.end(), imports.changed_variables())


def origin(name: str) -> str:
    """Return the file of the module, or the kind of its origin; '' without a spec."""
    spec = names_of(name).get("__spec__")
    return encodable(str(getattr(spec, "origin", None) or ""))

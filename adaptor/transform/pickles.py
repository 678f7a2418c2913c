"""Reads a pickle of torch without importing, calling or changing anything that it names.

An allowlist in `pickle.Unpickler.find_class` is not enough: a pickle can set attributes of what is allowed,
a class included, and so choose what is imported or called later. Here the standard library only takes the
opcodes apart (`pickletools`). They are carried out by this file on plain lists, dicts and records: a name
stays a name (`records.Name`), and the few constructors that torch and numpy need are functions of ours
(`constructors.py`).
"""

from __future__ import annotations

import pickletools
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adaptor.errors import CheckpointError
from adaptor.transform import constructors
from adaptor.transform.constructors import NumpyType, Storage, is_storage, refuse, words
from adaptor.transform.records import SIZES, Described, DType, Name, StoredArray

_LARGEST_NUMBER = 1 << 10  # bytes of an integer
_MOST_OPCODES = 8_000_000
# Of what was read, where the same object in two places counts twice, because it is walked and written twice.
_MOST_VALUES = 8_000_000
_DEEPEST = 100


def load(data: bytes, path: Path, storages: Mapping[str, tuple[int, int]], *, is_index: bool = False) -> Any:
    """Return what a pickle describes.

    Args:
        data: the pickle.
        path: of the archive, whose name is in the messages and in each `StoredTensor`.
        storages: offset and size of each storage of the archive, in bytes.
        is_index: it is that of a sharded checkpoint: classes of torch.distributed.checkpoint are described.

    Raises:
        CheckpointError: it names or does something that is not read.
        ValueError: it is damaged. Other exceptions may be raised then, too.
    """
    value = _Reader(path, storages, is_index).read(data)
    _require_moderate(value, path)
    return value


class _Reader:
    """Carries out the opcodes of one pickle."""

    def __init__(self, path: Path, storages: Mapping[str, tuple[int, int]], is_index: bool) -> None:
        self._path = path
        self._storages = storages
        self._is_index = is_index
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= _MOST_OPCODES:
                raise CheckpointError(f"{self._path}: its structure has more than {_MOST_OPCODES} steps")
            if opcode.name == "STOP":
                break
            step = _STEPS.get(opcode.name)
            if step is None:
                refuse(self._path, f"uses the opcode {opcode.name}, which torch does not write")
            step(self, argument)
        (value,) = self._stack
        if self._outer:
            raise ValueError("a mark is left")
        return value

    # Values

    def push(self, value: Any) -> None:
        if type(value) is int and value.bit_length() > 8 * _LARGEST_NUMBER:
            refuse(self._path, f"has an integer of {value.bit_length()} bits")
        self._stack.append(value)

    def pop(self, _: Any = None) -> Any:
        return self._stack.pop()

    def mark(self, _: Any) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def pop_mark(self, _: Any = None) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def tuple_of(self, count: int) -> None:
        items = tuple(self._stack[len(self._stack) - count :]) if count else ()
        if len(items) != count:
            raise ValueError("the stack is empty")
        del self._stack[len(self._stack) - count :]
        self._stack.append(items)

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            refuse(self._path, f"appends to {words(target)}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict):
            refuse(self._path, f"sets an item of {words(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if self._is_index and type(key) is Described:
                key = constructors.item_key(self._path, key)
            elif not all(type(key_part) in _KEYS for key_part in (key if type(key) is tuple else (key,))):
                refuse(self._path, f"has {words(key)} as a key")
            target[key] = value

    # Names and objects

    def named(self, module: Any, name: Any) -> None:
        if not (type(module) is str and type(name) is str):
            raise ValueError("a name is not a text")
        global_name = Name(module, name)
        if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise CheckpointError(f"{self._path}: has an object of {module!a}.{name!a}, which is not read")
        if module == "torch" and name in SIZES:
            self._stack.append(DType(name))
        elif constructors.is_known(global_name) or self._is_described(global_name):
            self._stack.append(global_name)
        else:
            raise CheckpointError(f"{self._path}: has an object of {global_name}, which is not read")

    def _is_described(self, callable_name: Name) -> bool:
        return constructors.is_described(callable_name) or (
            self._is_index and constructors.is_of_index(callable_name)
        )

    def call(self, _: Any) -> None:
        call_arguments, callable_name = self.pop(), self.pop()
        if type(callable_name) is not Name or type(call_arguments) is not tuple:
            refuse(self._path, f"calls {words(callable_name)}")
        if callable_name in constructors.CALLS:
            self._stack.append(constructors.CALLS[callable_name](self._path, *call_arguments))
        elif self._is_described(callable_name):
            self._stack.append(Described(callable_name, call_arguments, is_new=False))
        else:
            refuse(self._path, f"calls {callable_name}")

    def make(self, _: Any) -> None:
        call_arguments, callable_name = self.pop(), self.pop()
        if callable_name == constructors.NAMESPACE and call_arguments == ():
            self._stack.append(Namespace())
        elif (
            type(callable_name) is Name
            and type(call_arguments) is tuple
            and self._is_described(callable_name)
        ):
            self._stack.append(Described(callable_name, call_arguments, is_new=True))
        else:
            refuse(self._path, f"makes an object of {words(callable_name)}")

    def build(self, _: Any) -> None:
        state, target = self.pop(), self._stack[-1]
        if type(target) is Namespace:
            if type(state) is not dict or not all(constructors.is_plain_name(key) for key in state):
                refuse(self._path, "sets something else than attributes of argparse.Namespace")
            vars(target).update(state)
        elif type(target) is Described and target.state is None:
            target.state = state
        elif type(target) is StoredArray and not target.dtype:
            constructors.fill(self._path, target, state)
        elif type(target) is NumpyType:
            if state[1] not in ("<", "|") or any(part is not None for part in state[2:5]):
                refuse(self._path, f"has an array of numpy of {target.kind} with the state {words(state)}")
            target.order = state[1]
        elif type(target) is not OrderedDict or type(state) is not dict:  # of it: `_metadata` of torch
            refuse(self._path, f"sets attributes of {words(target)}")

    def persistent(self, _: Any) -> None:
        pid = self.pop()
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not is_storage(pid[1]):
            refuse(self._path, f"has the persistent id {words(pid)}")
        _, kind, key, _, count = pid
        dtype = constructors.STORAGES[kind.name]
        if type(key) is not str or key not in self._storages or not constructors.is_count(count):
            raise ValueError(f"there is no storage {words(key)}")
        begin, size = self._storages[key]
        if size != count * SIZES[dtype]:
            raise CheckpointError(f"{self._path}: storage {key} has {size} bytes, not {count} of {dtype}")
        self._stack.append(Storage(begin, begin + size, dtype))


_KEYS = (str, int, bool, float, type(None), DType)
_VALUES = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
# Those of protocol 2 to 4 that torch writes; none of the text protocol, of extensions and of buffers.
_STEPS: dict[str, Callable[[_Reader, Any], Any]] = {
    **dict.fromkeys(_VALUES, _Reader.push),
    "PROTO": lambda reader, _: None,
    "FRAME": lambda reader, _: None,
    "NONE": lambda reader, _: reader.push(None),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "TUPLE": lambda reader, _: reader.push(tuple(reader.pop_mark())),
    "MARK": _Reader.mark,
    "POP": _Reader.pop,
    "POP_MARK": _Reader.pop_mark,
    "APPEND": lambda reader, _: reader.append([reader.pop()]),
    "APPENDS": lambda reader, _: reader.append(reader.pop_mark()),
    "SETITEM": lambda reader, _: reader.set_items([reader.pop(), reader.pop()][::-1]),
    "SETITEMS": lambda reader, _: reader.set_items(reader.pop_mark()),
    "BINPUT": _Reader.put,
    "LONG_BINPUT": _Reader.put,
    "MEMOIZE": _Reader.memoize,
    "BINGET": _Reader.get,
    "LONG_BINGET": _Reader.get,
    "GLOBAL": lambda reader, text: reader.named(*text.split(" ")),
    "STACK_GLOBAL": lambda reader, _: reader.named(*[reader.pop(), reader.pop()][::-1]),
    "REDUCE": _Reader.call,
    "NEWOBJ": _Reader.make,
    "BUILD": _Reader.build,
    "BINPERSID": _Reader.persistent,
}


def _require_moderate(value: Any, path: Path) -> None:
    """Refuse what is half made, nested in itself or too deeply, or huge once it is walked or written.

    Raises:
        CheckpointError: says which.
    """
    sizes: dict[int, int] = {}

    def count(value: Any, depth: int) -> int:
        if depth > _DEEPEST:
            raise CheckpointError(f"{path}: its structure is nested over {_DEEPEST} levels deep; not read")
        if type(value) in (NumpyType, Storage) or (type(value) is StoredArray and not value.dtype):
            refuse(path, f"has a {type(value).__name__} that belongs to nothing")
        parts = _parts(value)
        if not parts:
            return 1
        if id(value) not in sizes:
            total = 1
            for part in parts:
                total += count(part, depth + 1)
            sizes[id(value)] = total
            if total > _MOST_VALUES:
                raise CheckpointError(f"{path}: its structure has more than {_MOST_VALUES} values; not read")
        return sizes[id(value)]

    count(value, 0)


def _parts(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return value.values()
    if kind is list or kind is tuple:
        return value
    if kind is Namespace:
        return vars(value).values()
    return (value.given, value.state) if kind is Described else ()

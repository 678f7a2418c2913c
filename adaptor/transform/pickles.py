"""Reads a pickle of torch without importing, calling or changing anything that the pickle names.

An allowlist in `pickle.Unpickler.find_class` is not enough: a pickle can set attributes of an allowed class,
and so choose later imports and calls. Here a name stays an inert record (`records.Name`). REDUCE, NEWOBJ and
BUILD, which call and change objects in the standard unpickler, act on plain values and records alone: the few
constructors that torch and numpy need are functions of this module, all other objects are descriptions.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from adaptor.errors import CheckpointError
from adaptor.transform.records import SIZES, Described, DType, ItemKey, Name, StoredArray, StoredTensor

_LARGEST_NUMBER = 1 << 10  # bytes of an integer
# An object in two places counts twice: the object is walked and written twice.
_MOST_VALUES = 8_000_000
_DEEPEST = 100
_MOST_AXES = 64

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
}
# Objects of these packages and classes are kept as descriptions, and written again as the same objects.
_FRAMEWORKS = frozenset({"megatron", "mindspeed", "mindspeed_llm", "modellink", "ascendspeed"})
_DESCRIBED = frozenset(
    {
        Name("_io", "BytesIO"),
        Name("pathlib", "PosixPath"),
        Name("pathlib", "PurePosixPath"),
        Name("signal", "Signals"),
        Name("torch", "device"),
        Name("__builtin__", "set"),
        Name("builtins", "set"),
    }
)
# Further descriptions in the index of a sharded checkpoint; they are read, never written again.
_OF_INDEX = "torch.distributed.checkpoint."
_LAYOUT_OF_INDEX = Name("torch.serialization", "_get_layout")
_INDEX_KEY = Name("torch.distributed.checkpoint.metadata", "MetadataIndex")
_NAMESPACE = Name("argparse", "Namespace")
_NDARRAY = Name("numpy", "ndarray")
# The kinds of elements of an array of numpy, and their sizes in bytes.
_ELEMENTS = {
    **{f"{kind}{size}": size for kind in "iu" for size in (1, 2, 4, 8)},
    "f2": 2,
    "f4": 4,
    "f8": 8,
    "b1": 1,
}
_KEYS = (str, int, bool, float, type(None), DType)


def load(data: bytes, path: Path, storages: Mapping[str, tuple[int, int]], *, is_index: bool = False) -> Any:
    """Return the value that a pickle describes, with records in the place of tensors and objects.

    Args:
        data: the pickle.
        path: the archive's file, for messages and for each `StoredTensor`.
        storages: offset and size of each storage of the archive, in bytes.
        is_index: the pickle is the index of a sharded checkpoint, where classes of
            torch.distributed.checkpoint are described, too.

    Raises:
        CheckpointError: the pickle names or does something that is not read.
        ValueError: the pickle is damaged. A damaged pickle may raise other exceptions, too.
    """
    value = _Reader(data, path, storages, is_index).load()
    _require_moderate(value, path)
    return value


@dataclass
class _NumpyType:
    """A dtype of numpy while the pickle is read: `u4`, and its byte order."""

    kind: str
    order: str = "|"


@dataclass
class _Storage:
    """The place of a tensor's elements: begin and end, in bytes from the start of the file."""

    begin: int
    end: int
    dtype: str


# The unpickler in C cannot be told how to carry out an opcode; the one in Python has no types.
_Base: Any = pickle._Unpickler


class _Reader(_Base):  # type: ignore[misc]
    """Carries out the opcodes of one pickle; see the module."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}

    def __init__(
        self, data: bytes, path: Path, storages: Mapping[str, tuple[int, int]], is_index: bool
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._storages = storages
        self._is_index = is_index

    def load(self) -> Any:
        value = super().load()
        if self.stack or self.metastack:
            raise ValueError("values are left")
        return value

    def find_class(self, module: str, name: str) -> Name | DType:
        global_name = Name(module, name)
        if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise CheckpointError(f"{self._path}: has an object of {module!a}.{name!a}, which is not read")
        if module == "torch" and name in SIZES:
            return DType(name)
        is_known = global_name in _CALLS or global_name in (_NAMESPACE, _NDARRAY) or _is_storage(global_name)
        if not (is_known or self._is_described(global_name)):
            raise CheckpointError(f"{self._path}: has an object of {global_name}, which is not read")
        return global_name

    def _is_described(self, name: Name) -> bool:
        of_index = name.module.startswith(_OF_INDEX) or name == _LAYOUT_OF_INDEX
        return _is_described(name) or (self._is_index and of_index)

    def persistent_load(self, pid: Any) -> _Storage:
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not _is_storage(pid[1]):
            _refuse(self._path, f"has the persistent id {_words(pid)}")
        _, kind, key, _, count = pid
        dtype = STORAGES[kind.name]
        if type(key) is not str or key not in self._storages or not _is_count(count):
            raise ValueError(f"there is no storage {_words(key)}")
        begin, size = self._storages[key]
        if size != count * SIZES[dtype]:
            raise CheckpointError(f"{self._path}: storage {key} has {size} bytes, not {count} of {dtype}")
        return _Storage(begin, begin + size, dtype)

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            _refuse(self._path, f"appends to {_words(target)}")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict):
            _refuse(self._path, f"sets an item of {_words(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if self._is_index and type(key) is Described:
                key = _item_key(self._path, key)
            elif not all(type(key_part) in _KEYS for key_part in (key if type(key) is tuple else (key,))):
                _refuse(self._path, f"has {_words(key)} as a key")
            target[key] = value

    def _append_one(self) -> None:
        self._extend([self.stack.pop()])

    def _append_all(self) -> None:
        self._extend(self.pop_mark())

    def _set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_all(self) -> None:
        self._set_items(self.pop_mark())

    def _call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            _refuse(self._path, f"calls {_words(name)}")
        if name in _CALLS:
            self.stack.append(_CALLS[name](self._path, *arguments))
        elif self._is_described(name):
            self.stack.append(Described(name, arguments, is_new=False))
        else:
            _refuse(self._path, f"calls {name}")

    def _make_object(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if name == _NAMESPACE and arguments == ():
            self.stack.append(Namespace())
        elif type(name) is Name and type(arguments) is tuple and self._is_described(name):
            self.stack.append(Described(name, arguments, is_new=True))
        else:
            _refuse(self._path, f"makes an object of {_words(name)}")

    def _set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Namespace:
            if type(state) is not dict or not all(map(_is_plain_name, state)):
                _refuse(self._path, "sets something else than attributes of argparse.Namespace")
            vars(target).update(state)
        elif type(target) is Described and target.state is None:
            target.state = state
        elif type(target) is StoredArray and not target.dtype:
            _fill(self._path, target, state)
        elif type(target) is _NumpyType:
            if state[1] not in ("<", "|") or any(part is not None for part in state[2:5]):
                _refuse(self._path, f"has an array of numpy of {target.kind} with the state {_words(state)}")
            target.order = state[1]
        elif type(target) is not OrderedDict or type(state) is not dict:
            _refuse(self._path, f"sets attributes of {_words(target)}")
        # The attribute `_metadata` that torch sets on an OrderedDict is left out.

    def _refuse_opcode(self, name: str) -> NoReturn:
        _refuse(self._path, f"uses the opcode {name}, which torch does not write")


# The opcodes of protocol 2 to 4 that torch writes and that make plain values. None of the text protocol, of
# extensions and of buffers.
_PLAIN = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "BINPERSID"),  # through `find_class` and `persistent_load`
)
for _opcode in pickletools.opcodes:
    _code = ord(_opcode.code)
    if _opcode.name in _PLAIN:
        _Reader.dispatch[_code] = _Base.dispatch[_code]
    else:
        _Reader.dispatch[_code] = partial(_Reader._refuse_opcode, name=_opcode.name)
_Reader.dispatch |= {
    pickle.APPEND[0]: _Reader._append_one,
    pickle.APPENDS[0]: _Reader._append_all,
    pickle.SETITEM[0]: _Reader._set_one,
    pickle.SETITEMS[0]: _Reader._set_all,
    pickle.REDUCE[0]: _Reader._call,
    pickle.NEWOBJ[0]: _Reader._make_object,
    pickle.BUILD[0]: _Reader._set_state,
}


# The constructors


def _tensor(path: Path, storage: Any, first: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    if type(storage) is not _Storage or not (_is_count(first) and _is_shape(shape) and _is_shape(stride)):
        raise ValueError("a tensor is not in a storage")
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            raise CheckpointError(f"{path}: a tensor of shape {tuple(shape)} is not contiguous")
        expected *= length
    tensor = StoredTensor(path, storage.begin + first * SIZES[storage.dtype], storage.dtype, shape)
    if tensor.offset + tensor.bytes > storage.end:
        raise CheckpointError(f"{path}: a tensor of shape {tuple(shape)} is larger than its storage")
    return tensor


def _size(path: Path, lengths: Any) -> tuple[int, ...]:
    if not _is_shape(lengths):
        raise ValueError("a torch.Size is no tuple of numbers")
    return tuple(lengths)


def _encoded(path: Path, text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        _refuse(path, f"encodes a text as {_words(encoding)}")
    return text.encode("latin1")


def _member(path: Path, owner: Any, name: Any) -> Described:
    """Return the description of an enum's member or a nested class, as some versions of Python pickle it."""
    if type(owner) is not Name or not _is_described(owner) or not _is_plain_name(name):
        _refuse(path, f"takes {_words(name)} of {_words(owner)}")
    return Described(Name("__builtin__", "getattr"), (owner, name), is_new=False)


def _numpy_type(path: Path, kind: Any, *_: Any) -> _NumpyType:
    if type(kind) is not str or kind not in _ELEMENTS:
        _refuse(path, f"has an array of numpy of {_words(kind)}")
    return _NumpyType(kind)


def _array(path: Path, kind: Any, *_: Any) -> StoredArray:
    if kind != _NDARRAY:
        _refuse(path, f"has an array of numpy of the class {_words(kind)}")
    return StoredArray()


def _scalar(path: Path, kind: Any, data: Any) -> StoredArray:
    array = StoredArray(is_scalar=True)
    _fill(path, array, (1, (), kind, False, data))
    return array


def _fill(path: Path, array: StoredArray, state: Any) -> None:
    """Fill an `array` from the `state` of its BUILD. Raises ValueError: the bytes do not fill the shape."""
    _, shape, kind, by_columns, data = state
    if type(kind) is not _NumpyType or by_columns or not _is_shape(shape):
        _refuse(path, "has an array of numpy that is not laid out by rows")
    if type(data) is not bytes or prod(shape) * _ELEMENTS[kind.kind] != len(data):
        raise ValueError("an array of numpy has not the bytes for its shape")
    array.dtype, array.shape, array.data = f"{kind.order}{kind.kind}", shape, data


# The functions that a pickle calls, and the function of this module for each: the first argument is the path.
_CALLS: dict[Name, Callable[..., Any]] = {
    Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Name("torch", "Size"): _size,
    Name("collections", "OrderedDict"): lambda path: OrderedDict(),
    Name("_codecs", "encode"): _encoded,
    Name("__builtin__", "getattr"): _member,
    Name("builtins", "getattr"): _member,
    Name("numpy", "dtype"): _numpy_type,
    Name("numpy.core.multiarray", "_reconstruct"): _array,
    Name("numpy._core.multiarray", "_reconstruct"): _array,
    Name("numpy.core.multiarray", "scalar"): _scalar,
    Name("numpy._core.multiarray", "scalar"): _scalar,
}


def _item_key(path: Path, key: Described) -> ItemKey:
    """Return the key of an item in the index of a sharded checkpoint, from its description."""
    state = key.state
    if key.source != _INDEX_KEY or type(state) is not dict:
        _refuse(path, f"has {_words(key.source)} as a key")
    name, offset = state.get("fqn"), state.get("offset")
    if type(name) is not str or not (offset is None or _is_shape(offset)):
        _refuse(path, "has a MetadataIndex without a name or with an offset that is none")
    return ItemKey(name, offset)


def _is_described(name: Name) -> bool:
    return name in _DESCRIBED or name.module.partition(".")[0] in _FRAMEWORKS


def _is_storage(value: Any) -> bool:
    return type(value) is Name and value.module == "torch" and value.name in STORAGES


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and len(value) <= _MOST_AXES and all(map(_is_count, value))


def _is_plain_name(value: Any) -> bool:
    """Return whether an attribute may have this name: names with `__` have a meaning for Python itself."""
    return type(value) is str and not value.startswith("__")


def _words(value: Any) -> str:
    """Return a value of the file for a message: a name or a short text as it is, else its type."""
    if isinstance(value, Name):
        return str(value)
    return ascii(value) if type(value) is str and len(value) < 100 else f"a {type(value).__name__}"


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: {reason}; not read")


def _require_moderate(value: Any, path: Path) -> None:
    """Refuse a value that is half made, nested too deeply or in itself, or huge when walked or written.

    Raises:
        CheckpointError: names the defect.
    """
    sizes: dict[int, int] = {}

    def count(value: Any, depth: int) -> int:
        if depth > _DEEPEST:
            raise CheckpointError(f"{path}: its structure is nested over {_DEEPEST} levels deep; not read")
        if type(value) in (_NumpyType, _Storage) or (type(value) is StoredArray and not value.dtype):
            _refuse(path, f"has a {type(value).__name__} that belongs to nothing")
        if type(value) is int and value.bit_length() > 8 * _LARGEST_NUMBER:
            _refuse(path, f"has an integer of {value.bit_length()} bits")
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
    return (value.arguments, value.state) if kind is Described else ()

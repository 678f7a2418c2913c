"""Reads archives of torch without tensors, and without importing, calling or changing what an archive names.

An archive is a zip file, uncompressed, with a pickle of the structure and a file for each storage. An
allowlist in `find_class` alone is not enough: a pickle can set attributes of an allowed class, and so choose
later imports and calls. Here a name stays an inert record (`records.Name`), and the opcodes that make and
change objects act on plain values and records alone. All objects but a few of torch are descriptions, which
`writing.py` writes again as the same objects.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from adaptor.errors import CheckpointError
from adaptor.transform.records import SIZES, Archive, Described, DType, ItemKey, Name, StoredTensor

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive
_LARGEST_PICKLE = 64 << 20
_LARGEST_NUMBER = 1 << 10  # bytes of an integer
_LARGEST_KEY = 64  # bits of an integer: larger integers may all have the same hash
# An object in two places counts twice: the object is walked and written twice.
_MOST_VALUES = 8_000_000
_TOO_MANY = f"its structure has more than {_MOST_VALUES} values"
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
# Objects of these packages, classes and functions are kept as descriptions.
_FRAMEWORKS = frozenset({"megatron", "mindspeed", "mindspeed_llm", "modellink", "ascendspeed"})
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_DESCRIBED = frozenset(
    {
        Name("_codecs", "encode"),
        Name("_io", "BytesIO"),
        Name("pathlib", "PosixPath"),
        Name("pathlib", "PurePosixPath"),
        Name("signal", "Signals"),
        Name("torch", "device"),
        *(Name(module, name) for module in ("__builtin__", "builtins") for name in ("getattr", "set")),
        *(Name("numpy", name) for name in ("dtype", "ndarray")),
        *(Name(module, name) for module in _NUMPY for name in ("_reconstruct", "scalar")),
    }
)
# Further descriptions in the index of a sharded checkpoint; they are read, never written again.
_OF_INDEX = "torch.distributed.checkpoint."
_LAYOUT_OF_INDEX = Name("torch.serialization", "_get_layout")
_INDEX_KEY = Name("torch.distributed.checkpoint.metadata", "MetadataIndex")
_NAMESPACE = Name("argparse", "Namespace")
_KEYS = (str, int, bool, float, type(None), DType)
# The opcodes of protocol 2 to 4 that torch writes. None of the text protocol, of extensions and of buffers.
_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "APPEND", "APPENDS"),
        *("GLOBAL", "STACK_GLOBAL", "BINPERSID"),  # through `find_class` and `persistent_load`
    )
)


def read(path: Path) -> Any:
    """Return the content of an archive, with records (`records.py`) in the place of tensors and objects.

    Raises:
        CheckpointError: the file is no archive of torch, is damaged, or has an object that is not read.
    """
    return _read(path, 0, None)


def read_inside(archive: Archive) -> Any:
    """Return the content of an archive inside of a file, like `read`."""
    return _read(archive.path, archive.begin, archive.begin + archive.length)


def only_tensor(archive: Archive) -> StoredTensor:
    """Return the tensor of an archive inside of a file whose whole content is one tensor.

    Raises:
        CheckpointError: the content is something else; or as `read`.
    """
    value = read_inside(archive)
    if not isinstance(value, StoredTensor):
        raise CheckpointError(
            f"{archive.path}: has a {type(value).__name__} at byte {archive.begin}, no tensor"
        )
    return value


@contextlib.contextmanager
def in_one_line(path: Path, kind: str) -> Iterator[None]:
    """Raise CheckpointError in place of any exception of a damaged file.

    Args:
        path: of the file.
        kind: of file.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _RefusedError as error:
        raise CheckpointError(f"{path}: {error}; not read") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: there is not enough memory to read its structure") from error
    except Exception as error:
        raise CheckpointError(f"{path}: is no {kind}, or is damaged ({error})") from error


def _read(path: Path, begin: int, end: int | None) -> Any:
    with (
        in_one_line(path, "archive of torch"),
        _FilePart(path, begin, end) as file,
        zipfile.ZipFile(file) as archive,
    ):
        name, storages = _members(archive, file, path)
        return load(archive.read(name), path, storages)


class _FilePart(io.FileIO):
    """The bytes from `begin` to `end` of a file, read like a file.

    Raises:
        CheckpointError: the file ends before `end`.
    """

    def __init__(self, path: Path, begin: int, end: int | None) -> None:
        super().__init__(str(path))
        size = os.fstat(self.fileno()).st_size
        self.begin, self._end = begin, size if end is None else end
        if self._end > size:
            self.close()
            raise CheckpointError(f"{path}: ends before byte {end}")
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: self.begin, os.SEEK_CUR: super().tell()}.get(whence, self._end)
        return super().seek(max(self.begin, start + offset)) - self.begin

    def tell(self) -> int:
        return super().tell() - self.begin

    def read(self, count: int | None = -1, /) -> bytes:
        remaining = max(0, self._end - super().tell())
        return super().read(remaining if count is None or count < 0 else min(count, remaining)) or b""


def _members(archive: zipfile.ZipFile, file: _FilePart, path: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the name of the pickle, and offset and size of each storage in the file."""
    (name,) = (
        member_name
        for member_name in archive.namelist()
        if member_name.count("/") == 1 and member_name.endswith("/data.pkl")
    )
    root = name.removesuffix("data.pkl")
    length = file.seek(0, os.SEEK_END)
    storages = {}
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{path}: is compressed, which is not read")
        if info.filename.startswith(f"{root}data/"):
            file.seek(info.header_offset)
            header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            start = info.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
            if start + info.file_size > length:
                raise CheckpointError(f"{path}: ends before the end of {info.filename}")
            storages[info.filename.removeprefix(f"{root}data/")] = (file.begin + start, info.file_size)
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise CheckpointError(f"{path}: was written on a big-endian machine, which is not read")
    if archive.getinfo(name).file_size > _LARGEST_PICKLE:
        raise CheckpointError(f"{path}: its structure has more than {_LARGEST_PICKLE >> 20} MiB; not read")
    return name, storages


# The pickle


def load(data: bytes, path: Path, storages: Mapping[str, tuple[int, int]], *, is_index: bool = False) -> Any:
    """Return the value that a pickle describes, with records in the place of tensors and objects.

    Call inside of `in_one_line`: a damaged pickle may raise any exception.

    Args:
        data: the pickle.
        path: the archive's file, for each `StoredTensor`.
        storages: offset and size of each storage of the archive, in bytes.
        is_index: the pickle is the index of a sharded checkpoint, where classes of
            torch.distributed.checkpoint are described, too.
    """
    value = _Reader(data, path, storages, is_index).load()
    _require_moderate(value)
    return value


class _RefusedError(Exception):
    """The pickle names or does something that is not read."""


# The unpickler in C cannot be told how to carry out an opcode, and allocates memory for any number of a memo.
# The private unpickler in Python has no type stubs.
_Base: Any = pickle._Unpickler


class _Reader(_Base):  # type: ignore[misc]
    """Carries out the opcodes of one pickle; see the module."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        ord(opcode.code): _Base.dispatch[ord(opcode.code)]
        for opcode in pickletools.opcodes
        if opcode.name in _OPCODES
    }

    def __init__(
        self, data: bytes, path: Path, storages: Mapping[str, tuple[int, int]], is_index: bool
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._storages = storages
        self._is_index = is_index
        self._repeated = 0

    def load(self) -> Any:
        value = super().load()
        if self.stack or self.metastack:
            raise ValueError("values are left")
        return value

    def find_class(self, module: str, name: str) -> Name | DType:
        global_name = Name(module, name)
        if not all(part.isidentifier() for part in (name, *module.split("."))):
            raise _RefusedError(f"has an object of {module!a}.{name!a}")
        if module == "torch" and name in SIZES:
            return DType(name)
        is_known = global_name in _CALLS or global_name == _NAMESPACE or _is_storage(global_name)
        if not (is_known or self._is_described(global_name)):
            raise _RefusedError(f"has an object of {global_name}")
        return global_name

    def _is_described(self, name: Name) -> bool:
        of_index = name.module.startswith(_OF_INDEX) or name == _LAYOUT_OF_INDEX
        is_usual = name in _DESCRIBED or name.module.partition(".")[0] in _FRAMEWORKS
        return is_usual or (self._is_index and of_index)

    def persistent_load(self, pid: Any) -> StoredTensor:
        """Return a storage: a flat tensor."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not _is_storage(pid[1]):
            raise _RefusedError(f"has the persistent id {_words(pid)}")
        _, kind, key, _, count = pid
        dtype = STORAGES[kind.name]
        if type(key) is not str or key not in self._storages or not _is_count(count):
            raise ValueError(f"there is no storage {_words(key)}")
        begin, size = self._storages[key]
        if size != count * SIZES[dtype]:
            raise _RefusedError(f"storage {key} has {size} bytes, not {count} of {dtype}")
        return StoredTensor(self._path, begin, dtype, (count,))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict):
            raise _RefusedError(f"sets an item of {_words(target)}")
        if self._is_index and type(key) is Described:
            key = _item_key(key)
        else:
            parts = key if type(key) is tuple else (key,)
            self._count_repeated(len(parts))
            if not all(map(_is_key, parts)):
                raise _RefusedError(f"has {_words(key)} as a key")
        target[key] = value

    def _count_repeated(self, values: int) -> None:
        """Count values that are walked or copied again each time the pickle uses them.

        A small pickle may use a long tuple or dict very often.
        """
        self._repeated += values
        if self._repeated > _MOST_VALUES:
            raise _RefusedError(_TOO_MANY)

    def _call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise _RefusedError(f"calls {_words(name)}")
        if name in _CALLS:
            self.stack.append(_CALLS[name](*arguments))
        elif self._is_described(name):
            self.stack.append(Described(name, arguments, is_new=False))
        else:
            raise _RefusedError(f"calls {name}")

    def _make_object(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if name == _NAMESPACE and arguments == ():
            self.stack.append(Namespace())
        elif type(name) is Name and type(arguments) is tuple and self._is_described(name):
            self.stack.append(Described(name, arguments, is_new=True))
        else:
            raise _RefusedError(f"makes an object of {_words(name)}")

    def _set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Namespace and type(state) is dict:
            self._count_repeated(len(state))
            if not all(map(_is_plain_name, state)):
                raise _RefusedError(f"sets attributes of {_words(target)}")
            vars(target).update(state)
        elif type(target) is Described and target.state is None:
            target.state = state
        elif type(target) is not OrderedDict or type(state) is not dict:
            raise _RefusedError(f"sets attributes of {_words(target)}")
        # The attribute `_metadata` that torch sets on an OrderedDict is left out.


_Reader.dispatch |= {
    pickle.SETITEM[0]: _Reader._set_item,
    pickle.SETITEMS[0]: _Reader._set_items,
    pickle.REDUCE[0]: _Reader._call,
    pickle.NEWOBJ[0]: _Reader._make_object,
    pickle.BUILD[0]: _Reader._set_state,
}


def _tensor(
    storage: Any, first: Any, shape: Any, stride: Any, _needs_grad: Any, _hooks: Any, _metadata: Any = None
) -> StoredTensor:
    if type(storage) is not StoredTensor or not (_is_count(first) and _is_shape(shape) and _is_shape(stride)):
        raise ValueError("a tensor is not in a storage")
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            raise _RefusedError(f"a tensor of shape {shape} is not contiguous")
        expected *= length
    tensor = storage.part(first, shape)
    if first + tensor.numel > storage.numel:
        raise _RefusedError(f"a tensor of shape {shape} is larger than its storage")
    return tensor


def _size(lengths: Any) -> tuple[int, ...]:
    if not _is_shape(lengths):
        raise ValueError("a torch.Size is no tuple of numbers")
    return tuple(lengths)


# The functions that a pickle calls, and the function of this module for each.
_CALLS: dict[Name, Callable[..., Any]] = {
    Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Name("torch", "Size"): _size,
    Name("collections", "OrderedDict"): lambda: OrderedDict(),
}


def _item_key(key: Described) -> ItemKey:
    """Return the key of an item in the index of a sharded checkpoint, from its description."""
    state = key.state
    if key.source != _INDEX_KEY or type(state) is not dict:
        raise _RefusedError(f"has {_words(key.source)} as a key")
    name, offset = state.get("fqn"), state.get("offset")
    if type(name) is not str or not (offset is None or _is_shape(offset)):
        raise _RefusedError("has a MetadataIndex without a name or with an offset that is none")
    return ItemKey(name, offset)


def _is_storage(value: Any) -> bool:
    return type(value) is Name and value.module == "torch" and value.name in STORAGES


def _is_key(value: Any) -> bool:
    return type(value) in _KEYS and (type(value) is not int or value.bit_length() <= _LARGEST_KEY)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


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


def _require_moderate(value: Any) -> None:
    """Refuse a value that is nested too deeply or in itself, or huge when walked or written."""
    sizes: dict[int, int] = {}

    def count(value: Any, depth: int) -> int:
        if depth > _DEEPEST:
            raise _RefusedError(f"its structure is nested over {_DEEPEST} levels deep")
        if type(value) is int and value.bit_length() > 8 * _LARGEST_NUMBER:
            raise _RefusedError(f"has an integer of {value.bit_length()} bits")
        parts = _parts(value)
        if not parts:
            return 1
        if id(value) not in sizes:
            total = 1
            for part in parts:
                total += count(part, depth + 1)
            sizes[id(value)] = total
            if total > _MOST_VALUES:
                raise _RefusedError(_TOO_MANY)
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

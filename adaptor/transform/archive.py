"""Reads and writes archives of torch without the classes of a framework, and without reading tensors.

An archive is a zip file, uncompressed, with a pickle of the structure and a file for each storage. Only
classes of an allowlist are made while it is read. Objects of the framework's own classes (its enums, in the
arguments) become a `Foreign`, which is written again as what it was; no code of the framework runs.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import struct
import zipfile
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from adaptor.errors import CheckpointError

_FRAMEWORKS = frozenset({"megatron", "mindspeed", "mindspeed_llm", "modellink", "ascendspeed"})
_NUMPY = frozenset({"ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer"})
_NUMPY_MODULES = frozenset(
    {"numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"}
)
_STORAGES = {
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
SIZES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive
_LARGEST_PICKLE = 1 << 30


@dataclass(frozen=True)
class DType:
    """A dtype of torch, by its name."""

    name: str


@dataclass(frozen=True)
class StoredTensor:
    """A contiguous tensor in a file: `offset` in bytes from the start of the file."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return how many elements it has."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Return its size in bytes."""
        return self.numel * SIZES[self.dtype]


class ForeignType(type):
    """The type of a class of the framework that is not imported; nothing in a file can rename it."""

    named: tuple[str, str]

    def __setattr__(cls, name: str, value: object) -> None:
        raise CheckpointError(f"{cls.named[0]}.{cls.named[1]}: a file changes this class, which is not done")


class Foreign(metaclass=ForeignType):
    """An object of a class of the framework: what it was made from, and its state."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if key != "given"}
        return (type(self), self.given, state) if state else (type(self), self.given)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


@functools.cache
def _foreign_class(module: str, name: str) -> ForeignType:
    return ForeignType(
        name.rpartition(".")[2],
        (Foreign,),
        {"__module__": module, "__qualname__": name, "named": (module, name)},
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: Path, storages: dict[str, tuple[int, int]]) -> None:
        super().__init__(file, encoding="utf-8")
        self._path = path
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise CheckpointError(f"{self._path}: has an object of {module!a}.{name!a}, which is not read")
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in SIZES:
            return DType(name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return partial(_stored, self._path)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("argparse", "Namespace"):
            return Namespace
        if (
            (module in _NUMPY_MODULES and name in _NUMPY)
            or (module, name) in {("_codecs", "encode"), ("_io", "BytesIO"), ("signal", "Signals")}
            or (module == "pathlib" and name in {"PosixPath", "PurePosixPath"})
        ):
            return super().find_class(module, name)
        if module.partition(".")[0] in _FRAMEWORKS:
            return _foreign_class(module, name)
        raise CheckpointError(f"{self._path}: has an object of {module}.{name}, which is not read")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, count = pid
        offset, size = self._storages[key]
        if kind != "storage" or size != count * SIZES[dtype]:
            raise CheckpointError(f"{self._path}: storage {key} has {size} bytes, not {count} of {dtype}")
        return offset, size, dtype


def _stored(
    path: Path, storage: tuple[int, int, str], first: int, shape: Any, stride: Any, *_: Any
) -> StoredTensor:
    offset, size, dtype = storage
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            raise CheckpointError(f"{path}: a tensor of shape {tuple(shape)} is not contiguous")
        expected *= length
    tensor = StoredTensor(path, offset + first * SIZES[dtype], dtype, tuple(shape))
    if tensor.offset + tensor.bytes > offset + size:
        raise CheckpointError(f"{path}: a tensor of shape {tuple(shape)} is larger than its storage")
    return tensor


def read(path: Path) -> Any:
    """Return the content of an archive, with a `StoredTensor` in the place of each tensor.

    Raises:
        CheckpointError: it is no archive of torch, is damaged, or has an object that is not read.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            (name,) = (
                each for each in archive.namelist() if each.count("/") == 1 and each.endswith("/data.pkl")
            )
            root = name.removesuffix("data.pkl")
            if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
                raise CheckpointError(f"{path}: was written on a big-endian machine, which is not read")
            storages = {}
            for info in archive.infolist():
                if info.filename.startswith(f"{root}data/"):
                    if info.compress_type != zipfile.ZIP_STORED:
                        raise CheckpointError(f"{path}: is compressed, which is not read")
                    file.seek(info.header_offset)
                    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                    start = info.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
                    storages[info.filename.removeprefix(f"{root}data/")] = (start, info.file_size)
            if archive.getinfo(name).file_size > _LARGEST_PICKLE:
                raise CheckpointError(f"{path}: its structure has more than {_LARGEST_PICKLE} bytes")
            return _Unpickler(io.BytesIO(archive.read(name)), path, storages).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise CheckpointError(f"{path}: is no archive of torch, or is damaged ({error})") from error


# The pickler in C can write only classes that can be imported; the one in Python has no types.
_Base: Any = pickle._Pickler


class _Pickler(_Base):  # type: ignore[misc]
    dispatch: ClassVar[dict[type, Any]] = dict(_Base.dispatch)

    def _save_foreign(self, cls: Any) -> None:
        self._save_name(cls, *cls.named)

    def _save_dtype(self, dtype: DType) -> None:
        self._save_name(dtype, "torch", dtype.name)

    def _save_name(self, value: Any, module: str, name: str) -> None:
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.memoize(value)

    dispatch[ForeignType] = _save_foreign
    dispatch[DType] = _save_dtype


def save(value: Any, file: Any) -> None:
    """Write `value`, with tensors of torch, as `torch.save` does."""
    import torch

    pickling = SimpleNamespace(Pickler=_Pickler, __name__="pickle")
    torch.save(value, cast(Any, file), pickle_module=pickling)

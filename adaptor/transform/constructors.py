"""The names that a pickle of torch may use, and functions that stand for the few constructors among them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from adaptor.errors import CheckpointError
from adaptor.transform.records import SIZES, Described, ItemKey, Name, StoredArray, StoredTensor

# Objects of these packages and classes are kept as descriptions, and written again as what they were.
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
# What the index of a sharded checkpoint has besides: descriptions, of which none is written again.
_OF_INDEX = "torch.distributed.checkpoint."
_INDEX_KEY = Name("torch.distributed.checkpoint.metadata", "MetadataIndex")
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
NAMESPACE = Name("argparse", "Namespace")
_NDARRAY = Name("numpy", "ndarray")
# The kinds of elements of an array of numpy, and their sizes in bytes.
_ELEMENTS = {
    **{f"{kind}{size}": size for kind in "iu" for size in (1, 2, 4, 8)},
    "f2": 2,
    "f4": 4,
    "f8": 8,
    "b1": 1,
}
_MOST_AXES = 64


class NumpyType:
    """A dtype of numpy while it is read: `u4`, and then its byte order."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.order = "|"


class Storage:
    """The place of a tensor's elements: begin and end, in bytes from the start of the file."""

    def __init__(self, begin: int, end: int, dtype: str) -> None:
        self.begin, self.end, self.dtype = begin, end, dtype


def _tensor(path: Path, storage: Any, first: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    if type(storage) is not Storage or not (is_count(first) and _is_shape(shape) and _is_shape(stride)):
        raise ValueError("a tensor is not in a storage")
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            raise CheckpointError(f"{path}: a tensor of shape {tuple(shape)} is not contiguous")
        expected *= length
    offset = storage.begin + first * SIZES[storage.dtype]
    tensor = StoredTensor(path, offset, storage.dtype, tuple(shape))
    if tensor.offset + tensor.bytes > storage.end:
        raise CheckpointError(f"{path}: a tensor of shape {tuple(shape)} is larger than its storage")
    return tensor


def _size(path: Path, lengths: Any) -> tuple[int, ...]:
    if not _is_shape(lengths):
        raise ValueError("a torch.Size is no tuple of numbers")
    return tuple(lengths)


def _ordered(path: Path) -> OrderedDict[Any, Any]:
    return OrderedDict()


def _encoded(path: Path, text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        refuse(path, f"encodes a text as {words(encoding)}")
    return text.encode("latin1")


def _member(path: Path, owner: Any, name: Any) -> Described:
    """An enum's member or a nested class, as some versions of Python write it."""
    if type(owner) is not Name or not is_described(owner) or not is_plain_name(name):
        refuse(path, f"takes {words(name)} of {words(owner)}")
    return Described(Name("__builtin__", "getattr"), (owner, name), is_new=False)


def _numpy_type(path: Path, kind: Any, *_: Any) -> NumpyType:
    if type(kind) is not str or kind not in _ELEMENTS:
        refuse(path, f"has an array of numpy of {words(kind)}")
    return NumpyType(kind)


def _array(path: Path, kind: Any, *_: Any) -> StoredArray:
    if kind != _NDARRAY:
        refuse(path, f"has an array of numpy of the class {words(kind)}")
    return StoredArray()


def _scalar(path: Path, kind: Any, data: Any) -> StoredArray:
    array = StoredArray(is_scalar=True)
    fill(path, array, (1, (), kind, False, data))
    return array


def fill(path: Path, array: StoredArray, state: Any) -> None:
    """Give an `array` the `state` that its BUILD says.

    Raises:
        ValueError: its bytes do not fill the shape.
    """
    _, shape, kind, by_columns, data = state
    if type(kind) is not NumpyType or by_columns or not _is_shape(shape):
        refuse(path, "has an array of numpy that is not laid out by rows")
    if type(data) is not bytes or prod(shape) * _ELEMENTS[kind.kind] != len(data):
        raise ValueError("an array of numpy has not the bytes for its shape")
    array.dtype, array.shape, array.data = f"{kind.order}{kind.kind}", shape, data


# What is called in a pickle, and the function for it here; its first argument is the path of the archive.
CALLS: dict[Name, Callable[..., Any]] = {
    Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Name("torch", "Size"): _size,
    Name("collections", "OrderedDict"): _ordered,
    Name("_codecs", "encode"): _encoded,
    Name("__builtin__", "getattr"): _member,
    Name("builtins", "getattr"): _member,
    Name("numpy", "dtype"): _numpy_type,
    Name("numpy.core.multiarray", "_reconstruct"): _array,
    Name("numpy._core.multiarray", "_reconstruct"): _array,
    Name("numpy.core.multiarray", "scalar"): _scalar,
    Name("numpy._core.multiarray", "scalar"): _scalar,
}


def is_described(callable_name: Name) -> bool:
    """Return whether objects of it are kept as descriptions."""
    return callable_name in _DESCRIBED or callable_name.module.partition(".")[0] in _FRAMEWORKS


def is_of_index(callable_name: Name) -> bool:
    """Return whether objects of it are described in the index of a sharded checkpoint."""
    return callable_name.module.startswith(_OF_INDEX) or callable_name == Name(
        "torch.serialization", "_get_layout"
    )


def item_key(path: Path, key: Described) -> ItemKey:
    """Return the key of an item in the index of a sharded checkpoint, from its description."""
    state = key.state
    if key.what != _INDEX_KEY or type(state) is not dict:
        refuse(path, f"has {words(key.what)} as a key")
    name, offset = state.get("fqn"), state.get("offset")
    if type(name) is not str or not (offset is None or _is_shape(offset)):
        refuse(path, "has a MetadataIndex without a name or with an offset that is none")
    return ItemKey(name, offset)


def is_storage(value: Any) -> bool:
    """Return whether it names a storage of torch."""
    return type(value) is Name and value.module == "torch" and value.name in STORAGES


def is_count(value: Any) -> bool:
    """Return whether it is a number from 0 on."""
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and len(value) <= _MOST_AXES and all(map(is_count, value))


def is_plain_name(value: Any) -> bool:
    """Return whether an attribute may have this name: none that Python itself looks for."""
    return type(value) is str and not value.startswith("__")


def words(value: Any) -> str:
    """Return a value from the file for a line: a name or a short text as it is, else its type."""
    if isinstance(value, Name):
        return str(value)
    return ascii(value) if type(value) is str and len(value) < 100 else f"a {type(value).__name__}"


def is_known(callable_name: Name) -> bool:
    """Return whether a pickle may name it at all."""
    return (
        callable_name in CALLS
        or callable_name in (NAMESPACE, _NDARRAY)
        or is_described(callable_name)
        or is_storage(callable_name)
    )


def refuse(path: Path, reason: str) -> NoReturn:
    """Raise the CheckpointError for an archive that does what is not read."""
    raise CheckpointError(f"{path}: {reason}; not read")

"""The layout file of a checkpoint: the parts of the model and of the optimizer on each model-parallel rank.

The file lies beside the manifest, in either format. Its content comes from the framework at the begin of
training (`frameworks.layout_beside`); `python -m adaptor transform` reads it. The file is JSON, compressed
with gzip.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from adaptor.checkpoint import disk
from adaptor.errors import CheckpointError

FORMAT = 1
# Arguments of the framework, beside the sizes, that determine how a model is cut.
ARGUMENTS = (
    "num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "num_experts",
)
# Bytes of a file, and of its text: 1,000 ranks with 100 params each have about 40 MB of text.
LARGEST, _LARGEST_TEXT = 256 << 20, 2 << 30
_GZIP = b"\x1f\x8b"

_Kind = TypeVar("_Kind")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A stretch along the cut axis, in rows: its place in the whole tensor, its place here, its length."""

    whole: _Count
    here: _Count
    length: _Count


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of a chunk of the model.

    Attributes:
        dtype: by torch's name; "" if the entry is no tensor
        key: the name of the whole tensor in the framework's sharded format
        whole: the shape of the whole tensor, without the axes of layers and experts that the framework puts
            in front
        axis: the axis that tensor-parallel ranks cut; None: each rank has the whole
        pieces: of the axis, in their order here: two in a gated MLP
        layer: its number in the whole model
        expert: its number in the layer
        padded: whether the axis is the vocabulary, whose last rows may be padding
        tied: whether the entry is a second copy of a tensor of the first stage
        param: whether an optimizer has the entry
    """

    name: str
    dtype: str = ""
    shape: tuple[_Count, ...] = ()
    key: str = ""
    whole: tuple[_Count, ...] = ()
    axis: _Count | None = None
    pieces: tuple[Piece, ...] = ()
    layer: _Count | None = None
    expert: _Count | None = None
    padded: bool = False
    tied: bool = False
    param: bool = False


class ParamPlace(msgspec.Struct, frozen=True, array_like=True):
    """A param in the whole tensor of its buffer: its chunk and name, begin and end in elements."""

    chunk: str
    name: str
    begin: _Count
    end: _Count


class BufferLayout(msgspec.Struct, frozen=True):
    """A buffer of a distributed optimizer: dtypes of params and gradients, elements without padding."""

    dtypes: tuple[str, str]
    numel: _Count
    params: tuple[ParamPlace, ...]


class OptimizerLayout(msgspec.Struct, frozen=True):
    """An optimizer of the chain.

    Attributes:
        stored: whether the rank's folder has its state: ranks of experts share the state of the dense
            optimizer
        groups: of params, in order: factors of weight decay and learning rate, whether of experts, whether
            with a rate of its own
    """

    stored: bool
    groups: tuple[tuple[float, float, bool, bool], ...]
    buffers: tuple[BufferLayout, ...]


class RankLayout(msgspec.Struct, frozen=True):
    """The part of a model-parallel rank.

    Attributes:
        tp, pp, ep: its numbers
        sizes: parallel sizes of the job: tp, pp, vpp, ep, etp, dp, cp
        core: the version of Megatron-core
        args: arguments of the framework that determine how the model is cut
        chunks: of the model, by their key in a checkpoint
    """

    format: int
    folder: str
    tp: _Count
    pp: _Count
    ep: _Count
    sizes: dict[str, _Count]
    core: str
    args: dict[str, int | float | bool | str | None]
    chunks: dict[str, tuple[Entry, ...]]
    optimizers: tuple[OptimizerLayout, ...]


class JobLayout(msgspec.Struct, frozen=True):
    """The layouts of all model-parallel ranks of a job: the content of the file."""

    format: int
    ranks: tuple[RankLayout, ...]


def encode(layout: RankLayout) -> bytes:
    """Return the layout of a rank as a part of a file; `join` makes the file of parts."""
    return _packed(msgspec.json.encode(layout))


def join(parts: Iterable[bytes]) -> bytes:
    """Return the content of the file with these ranks: a gzip file may have several parts."""
    between = _packed(b",\n")
    return _packed(f'{{"format":{FORMAT},"ranks":['.encode()) + between.join(parts) + _packed(b"]}\n")


def _packed(text: bytes) -> bytes:
    return gzip.compress(text, compresslevel=6, mtime=0)


def read(path: Path) -> JobLayout:
    """Read a layout file. Raises CheckpointError if damaged, incomplete, or of ranks of several jobs."""
    ranks = read_part(path)
    require_complete(ranks, path)
    return JobLayout(FORMAT, ranks)


class RankPlace(msgspec.Struct, frozen=True):
    """The place of a model-parallel rank in the job; the attributes are attributes of `RankLayout`."""

    folder: str
    tp: _Count = 0
    pp: _Count = 0
    sizes: dict[str, _Count] = {}


class _Places(msgspec.Struct):
    ranks: tuple[RankPlace, ...]


def folders(path: Path) -> set[str]:
    """Return the folders of all model-parallel ranks of the job. Raises CheckpointError."""
    return {place.folder for place in places(_content(path), str(path))}


def places(content: bytes, source_name: str) -> tuple[RankPlace, ...]:
    """Return the places of all model-parallel ranks, without their parts. Raises CheckpointError."""
    return _decoded(content, source_name, _Places).ranks


def read_part(path: Path) -> tuple[RankLayout, ...]:
    """Read a layout file that may have only some ranks of a job. Raises CheckpointError."""
    layout = _decoded(_content(path), str(path), JobLayout)
    if layout.format != FORMAT:
        raise CheckpointError(f"{path}: format {layout.format}; this version reads format {FORMAT}")
    for rank in layout.ranks:
        _require_whole(rank, path)
    return layout.ranks


def _content(path: Path) -> bytes:
    try:
        return disk.read(path, LARGEST)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _decoded(packed: bytes, source_name: str, kind: type[_Kind]) -> _Kind:
    try:
        text = _unpacked(packed) if packed.startswith(_GZIP) else packed
        return msgspec.json.decode(text, type=kind)
    except (OSError, msgspec.MsgspecError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{source_name}: is no layout file ({error})") from error


def _unpacked(packed: bytes) -> bytes:
    """Return the content of a gzip file. Raises ValueError if too large."""
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
        text = disk.read_at_most(file, _LARGEST_TEXT + 1)
    if len(text) > _LARGEST_TEXT:
        raise ValueError(f"it has more than {_LARGEST_TEXT >> 20} MiB")
    return text


def is_of_one_job(first: RankLayout, second: RankLayout) -> bool:
    """Return True if two ranks may belong to the same job: equal sizes, arguments and version."""
    return (first.sizes, first.args, first.core) == (second.sizes, second.args, second.core)


def require_complete(layouts: Iterable[RankLayout], source_path: Path) -> None:
    """Refuse layouts of several jobs, or without some rank, with a CheckpointError that names it."""
    ranks = list(layouts)
    if not ranks:
        raise CheckpointError(f"{source_path}: has no layout of any rank")
    first = ranks[0]
    for rank in ranks:
        if not is_of_one_job(rank, first):
            raise CheckpointError(
                f"{source_path}: the layouts of {first.folder} and {rank.folder} are of two jobs"
            )
    stage_places = {(rank.tp, rank.pp) for rank in ranks}
    for stage in range(first.sizes.get("pp", 1)):
        for number in range(first.sizes.get("tp", 1)):
            if (number, stage) not in stage_places:
                raise CheckpointError(
                    f"{source_path}: has no layout of tensor rank {number} of stage {stage}"
                )
    experts = {rank.ep for rank in ranks}
    missing = set(range(first.sizes.get("ep", 1))) - experts
    if missing:
        raise CheckpointError(f"{source_path}: has no layout of expert rank {min(missing)}")


def _require_whole(layout: RankLayout, path: Path) -> None:
    """Refuse a layout with pieces outside of tensors, or params outside of buffers."""
    for key, entries in layout.chunks.items():
        for entry in entries:
            if not _is_whole(entry):
                raise CheckpointError(f"{path}: {key}: {entry.name}: its pieces do not make up its shape")
    shapes = _numbers(layout)
    for number, optimizer in enumerate(layout.optimizers):
        for buffer in optimizer.buffers:
            places = sorted(buffer.params, key=lambda place: place.begin)
            for place in places:
                if shapes.get((place.chunk, place.name)) != place.end - place.begin:
                    raise CheckpointError(
                        f"{path}: optimizer {number} has {place.end - place.begin} elements of"
                        f" {place.chunk}: {place.name}, which has another size"
                    )
            if any(first.end > two.begin for first, two in pairwise(places)) or (
                places and places[-1].end > buffer.numel
            ):
                raise CheckpointError(f"{path}: optimizer {number}: params lie on each other or outside")


def _numbers(layout: RankLayout) -> Mapping[tuple[str, str], int]:
    return {
        (key, entry.name): prod(entry.shape) for key, entries in layout.chunks.items() for entry in entries
    }


def _is_whole(entry: Entry) -> bool:
    if entry.axis is None:
        return not entry.pieces and entry.shape == entry.whole
    if entry.axis >= len(entry.shape) or len(entry.shape) != len(entry.whole):
        return False
    at = 0
    for piece in entry.pieces:
        if piece.here != at or piece.whole + piece.length > entry.whole[entry.axis]:
            return False
        at += piece.length
    whole_shape = list(entry.whole)
    whole_shape[entry.axis] = at
    return tuple(whole_shape) == entry.shape

"""The rules of Megatron-core by which a model and its optimizer's buffers are cut.

Checked against the files of core 0.15 (`tests/integration/test_transform.py`). A name that no rule knows is
refused: nothing is guessed. The data show whether the buffers follow the rules, too: the main params must
round to the weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaptor.checkpoint.layout_file import Piece
from adaptor.errors import UnsupportedError

# In elements: where a param begins in its buffer.
_ALIGNMENT = 64
# Megatron's default size of a bucket with --overlap-grad-reduce, in elements: at least, and for each rank.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Cut:
    """The way in which tensor-parallel ranks share a tensor.

    Attributes:
        axis: the axis that is cut; None: each rank has the whole
        pieces: 1; 2 for the input of a gated MLP: each rank has its part of the gate and its part of the rest
        rows: the axis is the padded axis of the vocabulary
    """

    axis: int | None = None
    pieces: int = 1
    rows: bool = False


WHOLE = Cut()
_LAYER = r"decoder\.layers\.\d+\."
_LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")
_MLP = rf"{_LAYER}mlp\.(?:experts\.local_experts\.\d+\.|shared_experts\.)?"
_RULES: tuple[tuple[str, Cut], ...] = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight|output_layer\.bias", Cut(0, rows=True)),
    (r"embedding\.position_embeddings\.weight", WHOLE),
    # One piece: rows of a query group (queries, key, value) stand together, and ranks share whole groups.
    (rf"{_LAYER}self_attention\.linear_qkv\.(?:weight|bias)", Cut(0)),
    (rf"{_LAYER}self_attention\.linear_proj\.weight", Cut(1)),
    (rf"{_LAYER}self_attention\.linear_proj\.bias", WHOLE),
    (rf"{_MLP}linear_fc1\.(?:weight|bias)", Cut(0)),
    (rf"{_MLP}linear_fc2\.weight", Cut(1)),
    (rf"{_MLP}linear_fc2\.bias", WHOLE),
    # Transformer Engine joins a norm and the linear layer behind it.
    (rf"{_LAYER}(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(?:weight|bias)", WHOLE),
    (rf"{_LAYER}(?:input_layernorm|pre_mlp_layernorm)\.(?:weight|bias)", WHOLE),
    (rf"{_LAYER}self_attention\.[qk]_layernorm\.(?:weight|bias)", WHOLE),
    (rf"{_LAYER}mlp\.router\.(?:weight|bias|expert_bias|local_tokens_per_expert)", WHOLE),
    (rf"{_LAYER}mlp\.shared_experts\.gate_weight", WHOLE),
    (r"decoder\.final_layernorm\.(?:weight|bias)", WHOLE),
)
_BUFFERS = re.compile(r".*\.(?:expert_bias|local_tokens_per_expert)")
_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..*)")


def cut_of(name: str, gated: bool) -> Cut:
    """Return how a tensor is cut.

    Args:
        name: in the model.
        gated: the MLPs have a gate (SwiGLU).

    Raises:
        UnsupportedError: no rule knows the name.
    """
    for pattern, cut in _RULES:
        if re.fullmatch(pattern, name):
            return Cut(0, 2) if gated and ".linear_fc1." in name and cut.axis == 0 else cut
    raise UnsupportedError(f"{name}: no rule says how tensor-parallel ranks share it; see docs/transform.md")


def pieces(cut: Cut, length: int, rank: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces that tensor rank `rank` of `size` has of an axis of length `length`."""
    if cut.axis is None:
        return ()
    piece_length = length // cut.pieces // size
    return tuple(
        Piece(number * (length // cut.pieces) + rank * piece_length, number * piece_length, piece_length)
        for number in range(cut.pieces)
    )


def is_buffer(name: str) -> bool:
    """Return whether a tensor of the model is a buffer of a module, which no optimizer has."""
    return _BUFFERS.fullmatch(name) is not None


def expert_of(name: str) -> int | None:
    """Return the number of a tensor's expert, None for a tensor of no expert."""
    match = _EXPERT.fullmatch(name)
    return int(match.group(2)) if match else None


def layer_of(name: str) -> int | None:
    """Return the number of the layer of an entry of the whole model, None outside of the layers."""
    match = _LAYER_NUMBER.match(name)
    return int(match.group(1)) if match else None


def with_expert(name: str, number: int) -> str:
    """Return the name of the same tensor of another expert."""
    match = _EXPERT.fullmatch(name)
    return f"{match.group(1)}{number}{match.group(3)}" if match else name


@dataclass(frozen=True)
class Placed:
    """A param in the whole tensor of its buffer, in elements."""

    name: str
    begin: int
    end: int


def place(params: Sequence[tuple[str, int, bool]], bucket: int | None) -> tuple[list[Placed], int]:
    """Return the places of params in the whole tensor of their buffer, and its size. Buckets have no padding.

    Args:
        params: in the order of the model: the name, the number of elements, and whether it has its own
            bucket.
        bucket: the size at which a bucket is full; None: one bucket.
    """
    placed = []
    filled_numel = 0  # of the full buckets
    at = 0  # in the bucket
    filled = False
    for name, count, alone in reversed(params):
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if alone and filled:
            filled_numel, at, filled = filled_numel + at, 0, False
        placed.append(Placed(name, filled_numel + at, filled_numel + at + count))
        at, filled = at + count, True
        if alone or (bucket is not None and at >= bucket):
            filled_numel, at, filled = filled_numel + at, 0, False
    return placed, filled_numel + at


def bucket_size(args: Any, stage: int, chunk: int, numel: int, data_parallel_size: int) -> int | None:
    """Return the size of the buckets of a chunk; None where the chunk has one bucket.

    Args:
        args: the stored arguments.
        stage: of the pipeline.
        chunk: of the stage.
        numel: of all params of the rank.
        data_parallel_size: the framework's size for the params of the chunk.
    """
    if (
        not getattr(args, "overlap_grad_reduce", False)
        or stage > 0
        or chunk > 0
        or getattr(args, "overlap_param_gather_with_optimizer_step", False)
    ):
        return None
    if getattr(args, "ddp_num_buckets", None) is not None:
        return int(numel // args.ddp_num_buckets)
    bucket_size_argument = getattr(args, "ddp_bucket_size", None)
    return (
        bucket_size_argument
        if bucket_size_argument is not None
        else max(_BUCKET, _BUCKET_PER_RANK * data_parallel_size)
    )


def group_of(name: str, dimensions: int, expert: bool, decoupled: bool) -> tuple[float, float, bool, bool]:
    """Return the key of a param's group: weight decay, learning rate, expert, decoupled learning rate.

    Args:
        name: of the param.
        dimensions: the number of its dimensions.
        expert: an expert has the param.
        decoupled: embeddings have a learning rate of their own.
    """
    decays = 0.0 if name.endswith(".bias") or dimensions == 1 else 1.0
    return decays, 1.0, expert, decoupled and name in (EMBEDDING, OUTPUT)


def padded_rows(vocabulary: int, multiple: int, tp: int) -> int:
    """Return the rows of a `vocabulary` that is padded to a `multiple` on each of `tp` ranks."""
    step = multiple * tp
    return -(-vocabulary // step) * step

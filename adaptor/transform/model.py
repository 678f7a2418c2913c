"""A whole model, and the part of each rank: tensors, and their places in the optimizer's buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from adaptor.checkpoint.layout_file import Piece
from adaptor.errors import UnsupportedError
from adaptor.transform import rules
from adaptor.transform.records import DType
from adaptor.transform.rules import EMBEDDING, OUTPUT, WHOLE, Cut, Placed
from adaptor.transform.sizes import Chunk, Rank, Sizes

Group = tuple[float, float, bool, bool]


@dataclass(frozen=True)
class Item:
    """An entry of the whole model.

    Attributes:
        name: with the numbers of layers and experts in the whole model
        shape: of the whole tensor; of the vocabulary with the padding of the source; empty without a tensor
        dtype: empty without a tensor
        value: of an entry without a tensor
        param: an optimizer has the entry
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    cut: Cut = WHOLE
    value: Any = None
    param: bool = True


@dataclass(frozen=True)
class Slot:
    """An entry of the model on one rank.

    Attributes:
        name: of the entry on the rank
        item: the entry of the whole model
        shape: on the rank
        pieces: of the axis that is cut; empty where the rank has the whole axis
    """

    name: str
    item: Item
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def is_param(self) -> bool:
        """Return whether an optimizer has the entry."""
        return bool(self.item.dtype) and self.item.param


@dataclass(frozen=True)
class Buffer:
    """A buffer of a distributed optimizer: the params with one pair of dtypes, and its size in elements."""

    dtypes: tuple[DType, DType]
    slots: tuple[tuple[Slot, Placed], ...]
    numel: int


@dataclass(frozen=True)
class View:
    """The part of one rank.

    Attributes:
        chunks: the entries of each chunk of the model, by its key
        optimizers: the buffers of the optimizer, and of the experts' optimizer if there is one
        groups: the order of the rank's groups of params, for each optimizer
        stored: for each optimizer, whether the rank's file has its state
    """

    rank: Rank
    chunks: Mapping[str, tuple[Slot, ...]]
    optimizers: tuple[tuple[Buffer, ...], ...]
    groups: tuple[tuple[Group, ...], ...]
    stored: tuple[bool, ...]


@dataclass(frozen=True)
class Model:
    """A whole model.

    Attributes:
        first: the entries before the layers
        layers: the entries of each layer
        last: the entries behind the layers
        rows: of the vocabulary with padding, in the source
    """

    args: Any
    first: tuple[Item, ...]
    layers: tuple[tuple[Item, ...], ...]
    last: tuple[Item, ...]
    rows: int

    @property
    def is_tied(self) -> bool:
        """Return whether the output layer has the weight of the embedding."""
        return not self.args.untie_embeddings_and_output_weights

    @property
    def experts(self) -> int:
        """Return how many experts a layer has; 0 where it is dense."""
        return getattr(self.args, "num_experts", None) or 0

    def items(self) -> Iterator[Item]:
        """Yield all entries."""
        yield from self.first
        for layer in self.layers:
            yield from layer
        yield from self.last

    def view(self, rank: Rank, sizes: Sizes, rows: int) -> View:
        """Return the part of `rank`.

        Args:
            rank: of the checkpoint.
            sizes: of the checkpoint.
            rows: of its vocabulary, with padding.

        Raises:
            UnsupportedError: a dimension is not divisible by its size.
        """
        chunks = sizes.chunks(len(self.layers), rank.pp)
        slots = {chunk.key: tuple(self._slots(chunk, rank, sizes, rows)) for chunk in chunks}
        numel = sum(
            prod(slot.shape) for chunk_slots in slots.values() for slot in chunk_slots if slot.is_param
        )
        optimizers, groups = [], []
        apart = bool(self.experts) and sizes.ep > 1  # else one optimizer has the experts, too
        for expert in (False, True) if apart else (False,):
            buffers: list[Buffer] = []
            order: dict[Group, None] = {}
            for number, own_slots in enumerate(slots.values()):
                bucket = rules.bucket_size(self.args, rank.pp, number, numel, sizes.dp)
                params = [
                    slot
                    for slot in own_slots
                    if slot.is_param and (apart and rules.expert_of(slot.name) is not None) == expert
                ]
                buffers += self._buffers(params, bucket, sizes)
                order.update(dict.fromkeys(self._group(slot, expert) for slot in params))
            optimizers.append(tuple(buffers))
            groups.append(tuple(order))
        # Ranks of experts share the optimizer of all else.
        stored = tuple(number == 1 or sizes.replica(rank) == 0 for number in range(len(optimizers)))
        return View(rank, slots, tuple(optimizers), tuple(groups), stored)

    def _group(self, slot: Slot, expert: bool) -> Group:
        decoupled = getattr(self.args, "decoupled_lr", None) is not None
        return rules.group_of(slot.name, len(slot.shape), expert, decoupled)

    def _buffers(self, params: Sequence[Slot], bucket: int | None, sizes: Sizes) -> Iterator[Buffer]:
        by_name = {slot.name: slot for slot in params}
        for dtype in dict.fromkeys(slot.item.dtype for slot in params):
            of_dtype = [
                (slot.name, prod(slot.shape), self._is_alone(slot.name, sizes))
                for slot in params
                if slot.item.dtype == dtype
            ]
            placed, numel = rules.place(of_dtype, bucket)
            gradient = "float32" if self.args.accumulate_allreduce_grads_in_fp32 else dtype
            slots = tuple((by_name[placed_slot.name], placed_slot) for placed_slot in placed)
            yield Buffer((DType(dtype), DType(gradient)), slots, numel)

    def _is_alone(self, name: str, sizes: Sizes) -> bool:
        """Return whether a param has a bucket of its own: the embedding that two pipeline stages have."""
        return self.is_tied and sizes.pp > 1 and name in (EMBEDDING, OUTPUT)

    def _slots(self, chunk: Chunk, rank: Rank, sizes: Sizes, rows: int) -> Iterator[Slot]:
        if chunk.first:
            for item in self.first:
                yield self._slot(item.name, item, rank, sizes, rows)
        for local, number in enumerate(chunk.layers):
            for item in self.layers[number]:
                name = item.name.replace(f"decoder.layers.{number}.", f"decoder.layers.{local}.", 1)
                expert = rules.expert_of(item.name)
                if expert is not None:
                    experts_per_rank = self.experts // sizes.ep
                    if expert // experts_per_rank != rank.ep:
                        continue
                    name = rules.with_expert(name, expert % experts_per_rank)
                yield self._slot(name, item, rank, sizes, rows)
        if chunk.last:
            for item in self.last:
                if item.name == "output_layer._extra_state" and self.is_tied and sizes.pp > 1:
                    (embedding,) = (slot for slot in self.first if slot.name == EMBEDDING)
                    yield self._slot(OUTPUT, embedding, rank, sizes, rows)
                yield self._slot(item.name, item, rank, sizes, rows)

    def _slot(self, name: str, item: Item, rank: Rank, sizes: Sizes, rows: int) -> Slot:
        shape = list(item.shape)
        pieces: tuple[Piece, ...] = ()
        if item.cut.axis is not None:
            whole_length = rows if item.cut.rows else shape[item.cut.axis]
            of_expert = rules.expert_of(item.name) is not None
            size = sizes.expert_tensor if of_expert else sizes.tp
            number = sizes.expert_rank(rank) if of_expert else rank.tp
            if whole_length % (size * item.cut.pieces):
                description = (
                    f"{item.cut.pieces} pieces of {whole_length // item.cut.pieces}"
                    if item.cut.pieces > 1
                    else whole_length
                )
                option = f"--{'etp' if of_expert else 'tp'} {size}"
                raise UnsupportedError(
                    f"{option}: {name} has {description} rows or columns, not divisible by it"
                )
            shape[item.cut.axis] = whole_length // size
            pieces = rules.pieces(item.cut, whole_length, number, size)
        return Slot(name, item, tuple(shape), pieces)

    def require_divisible(self, sizes: Sizes) -> None:
        """Refuse target sizes by which the model is not divisible. Raises UnsupportedError."""
        args = self.args
        counts = [("attention heads", args.num_attention_heads)]
        if args.group_query_attention:
            counts.append(("query groups", args.num_query_groups))
        for subject, count in counts:
            if count % sizes.tp:
                raise UnsupportedError(f"--tp {sizes.tp}: {count} {subject} are not divisible by {sizes.tp}")
        if sizes.ep > 1 and not self.experts:
            raise UnsupportedError(f"--ep {sizes.ep}: the model has no experts")
        if self.experts % sizes.ep:
            raise UnsupportedError(f"--ep {sizes.ep}: {self.experts} experts are not divisible by {sizes.ep}")
        if sizes.expert_tensor != sizes.tp and not self.experts:
            raise UnsupportedError(f"--etp {sizes.etp}: the model has no experts")
        if sizes.lack:
            raise UnsupportedError(f"--etp {sizes.expert_tensor}: {sizes.lack}")
        apart = sizes.expert_tensor * sizes.ep // sizes.tp
        if sizes.dp % apart:
            raise UnsupportedError(
                f"--dp {sizes.dp}: the experts are divided among {apart} of the data-parallel ranks,"
                f" and {sizes.dp} is not divisible by {apart}"
            )
        if sizes.vpp > 1 and sizes.pp == 1:
            raise UnsupportedError(f"--vpp {sizes.vpp}: needs --pp of at least 2, not {sizes.pp}")
        sizes.chunks(len(self.layers), 0)


def in_whole_model(name: str, layer: int | None, expert: int | None) -> str:
    """Return the name in the whole model of a rank's entry `name`, with numbers of `layer` and `expert`
    there.
    """
    if layer is not None:
        _, _, name_in_layer = name.removeprefix("decoder.layers.").partition(".")
        name = f"decoder.layers.{layer}.{name_in_layer}"
    return name if expert is None else rules.with_expert(name, expert)


def whole_shape(shape: tuple[int, ...], cut: Cut, tp: int) -> tuple[int, ...]:
    """Return the shape of a whole tensor from its `shape` on one of `tp` ranks."""
    if cut.axis is None:
        return shape
    whole_lengths = list(shape)
    whole_lengths[cut.axis] *= tp
    return tuple(whole_lengths)


def resized(args: Any, sizes: Sizes, rows: int, etp: int | None) -> dict[str, Any]:
    """Return the framework's arguments about the sizes of a checkpoint, by name.

    Args:
        args: the stored arguments.
        sizes: of the checkpoint.
        rows: of the padded vocabulary.
        etp: the size of experts' tensor parallelism.
    """
    world = sizes.tp * sizes.pp * sizes.dp * (getattr(args, "context_parallel_size", None) or 1)
    changed_arguments = {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "transformer_pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": (
            args.num_layers // (sizes.pp * sizes.vpp) if sizes.vpp > 1 else None
        ),
        "num_virtual_stages_per_pipeline_rank": None,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": etp,
        "data_parallel_size": sizes.dp,
        "world_size": world,
        "inprocess_active_world_size": world,
        "padded_vocab_size": rows,
        # Tensor parallelism with experts needs sequence parallelism.
        "sequence_parallel": sizes.tp > 1
        and bool(getattr(args, "sequence_parallel", False) or getattr(args, "num_experts", None)),
    }
    was_interleaved = getattr(args, "virtual_pipeline_model_parallel_size", None) is not None
    if was_interleaved != (sizes.vpp > 1):  # its defaults with, and without, an interleaved pipeline
        changed_arguments |= dict.fromkeys(("overlap_p2p_comm", "align_param_gather"), sizes.vpp > 1)
    return {name: value for name, value in changed_arguments.items() if hasattr(args, name)}

"""The checkpoint to transform: files, model, the place of each part, the parts that a new tensor needs.

`open_source` finds the step, and checks that all files are of one job and step.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from adaptor.checkpoint import layout_file, tracker
from adaptor.checkpoint.layout_file import JobLayout, Piece
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol import naming
from adaptor.protocol.naming import MODEL_FILE, OPTIMIZER_FILE
from adaptor.transform import archive, described, rules
from adaptor.transform.described import STATES, ByParam
from adaptor.transform.model import Item, Model, Slot, View, in_whole_model, whole_shape
from adaptor.transform.records import StoredTensor
from adaptor.transform.rules import EMBEDDING, OUTPUT
from adaptor.transform.sharded_source import COMMON, ShardedCheckpoint, is_sharded
from adaptor.transform.sizes import Chunk, Rank, Sizes, arguments_of, require_supported

WEIGHT = "weight"


@dataclass(frozen=True)
class StoredPart:
    """A rank's part of a whole tensor, in a file; without pieces the part is the whole."""

    rank: Rank
    stored: StoredTensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint: the content of the files of its ranks, without its tensors.

    Attributes:
        folder: of the step
        sizes: of the job that saved
        bodies: of the model's files
        states: of the optimizer's files, a list for each rank: of the optimizer, and of the experts'
            optimizer
        layout: the framework's description at the save; None: the rules lay out the checkpoint
        weights_only: the optimizer, if the checkpoint has one, is left out
    """

    folder: Path
    step: int
    sizes: Sizes
    args: Namespace
    bodies: Mapping[Rank, dict[str, Any]]
    states: Mapping[Rank, Sequence[dict[Any, Any] | ByParam | None]]
    layout: JobLayout | None = None
    weights_only: bool = False
    _parts: dict[tuple[str, str], list[StoredPart]] = field(default_factory=dict)

    @cached_property
    def model(self) -> Model:
        """Return the whole model."""
        if self.layout is None:
            return _describe(self)
        return described.model_of(self.layout, self.args, self._values(self.layout))

    @property
    def authority(self) -> str:
        """Return the source of the expected layout, for messages."""
        return "the rules of Megatron-core 0.15" if self.layout is None else f"its {naming.LAYOUT}"

    def _values(self, layout: JobLayout) -> dict[str, Any]:
        """Return the entries without a tensor, by their names in the whole model."""
        return {
            described.name_of(entry): self.bodies[rank].get(key, {}).get(entry.name)
            for rank, rank_layout in described.by_rank(layout).items()
            for key, entries in rank_layout.chunks.items()
            for entry in entries
            if not entry.dtype
        }

    def _view(self, rank: Rank) -> View:
        if self.layout is None:
            return self.model.view(rank, self.sizes, self.model.rows)
        items = {item.name: item for item in self.model.items()}
        return described.view_of(described.by_rank(self.layout)[rank], rank, items)

    @cached_property
    def views(self) -> Mapping[Rank, View]:
        """Return the part of each rank, as the rules describe it and as its file has it.

        Raises:
            UnsupportedError: a file has other tensors than the rules say.
        """
        views_by_rank = {}
        for rank in self.sizes.ranks:
            view = views_by_rank[rank] = self._view(rank)
            for key, slots in view.chunks.items():
                body = self.bodies[rank].get(key)
                shapes_by_name = {slot.name: slot.shape for slot in slots}
                stored = {name: _shape(value) for name, value in (body or {}).items()}
                if list(shapes_by_name) != list(stored) or shapes_by_name != stored:
                    odd = (
                        sorted(set(shapes_by_name.items()) ^ set(stored.items()), key=str)[:1]
                        or "their order"
                    )
                    raise UnsupportedError(
                        f"{self.file(rank, MODEL_FILE)}: the tensors of {key} are not those of a GPT model"
                        f" that is cut as {self._layout_says} ({self.sizes}): {odd}"
                    )
        return views_by_rank

    @property
    def _layout_says(self) -> str:
        return "its arguments say" if self.layout is None else f"its {naming.LAYOUT} says"

    def file(self, rank: Rank, name: str) -> Path:
        """Return a file of a rank."""
        return self.folder / self.sizes.folder(rank) / name

    def parts(self, name: str, tensor_kind: str) -> list[StoredPart]:
        """Return all ranks' parts of a tensor: of the weight, or of a state of the optimizer (STATES)."""
        if not self._parts:
            for rank in self.sizes.ranks:
                for slot, kind, stored in self._stored(rank):
                    part = StoredPart(rank, stored, slot.pieces)
                    self._parts.setdefault((slot.item.name, kind), []).append(part)
        return self._parts.get((name, tensor_kind), [])

    def _stored(self, rank: Rank) -> Iterator[tuple[Slot, str, StoredTensor]]:
        view = self.views[rank]
        for key, slots in view.chunks.items():
            for slot in slots:
                if slot.item.dtype:
                    yield slot, WEIGHT, self.bodies[rank][key][slot.name]
        if self.weights_only:
            return
        path = self.file(rank, OPTIMIZER_FILE)
        for expected, state in zip(view.optimizers, self.states[rank], strict=True):
            if state is None:
                continue
            if isinstance(state, ByParam):
                for buffer in expected:
                    for slot, _ in buffer.slots:
                        for kind in STATES:
                            yield slot, kind, state.tensor(slot.item.name, kind)
                continue
            stored_buffers = described.buffers(state, expected, path, self.authority)
            for buffer, stored in zip(expected, stored_buffers, strict=True):
                for kind in STATES:
                    whole_part = stored[kind]
                    for slot, placed in buffer.slots:
                        yield slot, kind, whole_part.part(placed.begin, slot.shape)


def _shape(value: Any) -> tuple[int, ...]:
    return value.shape if isinstance(value, StoredTensor) else ()


def _describe(source: SourceCheckpoint) -> Model:
    """Return the whole model, from the names and shapes on the ranks with tensor rank 0."""
    args, sizes = source.args, source.sizes
    count = args.num_layers
    first: list[Item] = []
    last: list[Item] = []
    layers: list[list[Item]] = [[] for _ in range(count)]
    for stage in range(sizes.pp):
        for chunk in sizes.chunks(count, stage):
            items_before, inside, items_behind = _entries(source, chunk, stage)
            first += items_before
            last += items_behind
            for number, layer in inside.items():
                layers[number] = layer
    tied = not args.untie_embeddings_and_output_weights
    if tied:
        last = [item for item in last if item.name != OUTPUT]
    rows = next((item.shape[0] for item in first if item.name == EMBEDDING and item.shape), 0)
    if not rows:
        raise UnsupportedError(f"{source.folder}: has no {EMBEDDING}, so it is no GPT model")
    return Model(args, tuple(first), tuple(map(tuple, layers)), tuple(last), rows)


def _entries(
    source: SourceCheckpoint, chunk: Chunk, stage: int
) -> tuple[list[Item], dict[int, list[Item]], list[Item]]:
    sizes = source.sizes
    items_before: list[Item] = []
    items_behind: list[Item] = []
    inside: dict[int, list[Item]] = {number: [] for number in chunk.layers}
    bodies = [source.bodies[Rank(0, stage, ep)].get(chunk.key) for ep in range(sizes.ep)]
    if None in bodies:
        model_file = source.file(Rank(0, stage, bodies.index(None)), MODEL_FILE)
        raise UnsupportedError(f"{model_file}: has no {chunk.key}, which {sizes} has")
    experts_per_rank = (getattr(source.args, "num_experts", None) or 0) // sizes.ep
    body = bodies[0] or {}
    for name, value in body.items():
        _require_gate_as_said(source.args, name, body)
        if not name.startswith("decoder.layers."):
            (items_behind if any(inside.values()) else items_before).append(_item(source, name, name, value))
            continue
        local = int(name.split(".")[2])
        if local >= len(chunk.layers):
            raise UnsupportedError(f"{name}: {sizes} has {len(chunk.layers)} layers in a chunk")
        number = chunk.layers[local]
        expert = rules.expert_of(name)
        inside[number].append(_item(source, name, in_whole_model(name, number, expert), value))
    if experts_per_rank:
        for number in inside:
            inside[number] = _with_all_experts(inside[number], experts_per_rank, sizes.ep)
    return items_before, inside, items_behind


def _with_all_experts(layer: list[Item], experts_per_rank: int, ep: int) -> list[Item]:
    """Put the experts of the other ranks behind the experts of the first rank, which have the same shapes."""
    own_experts = [item for item in layer if rules.expert_of(item.name) is not None]
    if not own_experts:
        return layer
    end = layer.index(own_experts[-1]) + 1
    other_experts = [
        Item(
            rules.with_expert(item.name, rank * experts_per_rank + number),
            item.shape,
            item.dtype,
            item.cut,
            item.value,
        )
        for rank in range(1, ep)
        for number in range(experts_per_rank)
        for item in own_experts
        if rules.expert_of(item.name) == number
    ]
    return [*layer[:end], *other_experts, *layer[end:]]


def _require_gate_as_said(args: Namespace, name: str, body: Mapping[str, Any]) -> None:
    """Refuse an MLP whose gate contradicts the arguments.

    Gated and plain MLPs are cut in different ways; the wrong cut would have the right shapes and wrong rows.
    """
    if not name.endswith(".linear_fc1.weight"):
        return
    wide, narrow = body[name], body.get(name.replace("linear_fc1", "linear_fc2"))
    if not isinstance(wide, StoredTensor) or not isinstance(narrow, StoredTensor):
        return
    if len(wide.shape) != 2 or len(narrow.shape) != 2:
        raise CheckpointError(f"{name}: has the shape {wide.shape}, and linear_fc2 {narrow.shape}")
    if (wide.shape[0] == 2 * narrow.shape[1]) is not bool(args.swiglu):
        raise UnsupportedError(
            f"{name}: has {wide.shape[0]} rows for the {narrow.shape[1]} columns of linear_fc2, and the"
            f" arguments say swiglu={args.swiglu}; MLPs with another gate are not transformed"
        )


def _item(source: SourceCheckpoint, local: str, name: str, value: Any) -> Item:
    if not isinstance(value, StoredTensor):
        return Item(name, value=value)
    cut = rules.cut_of(local, bool(source.args.swiglu))
    if cut.axis is not None and cut.axis >= len(value.shape):
        raise CheckpointError(f"{local}: has the shape {value.shape}, with no axis {cut.axis} to cut")
    full_shape = whole_shape(value.shape, cut, source.sizes.tp)
    return Item(name, full_shape, value.dtype, cut, param=not rules.is_buffer(local))


def one_of_each(slot: Slot, parts: Sequence[StoredPart]) -> list[StoredPart]:
    """Return one part for each place in the whole tensor; of an uncut tensor the first part alone."""
    axis = slot.item.cut.axis
    if axis is None:
        return list(parts[:1])
    distinct_parts = {pieces_of(axis, part.pieces, part.stored.shape): part for part in reversed(parts)}
    return [distinct_parts[pieces] for pieces in sorted(distinct_parts, key=lambda pieces: pieces[0].whole)]


def pieces_of(axis: int, pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """Return the `pieces` of a rank's tensor of this `shape` along `axis`: one piece where the rank has the
    whole.
    """
    return pieces or (Piece(0, 0, shape[axis]),)


def needed(slot: Slot, parts: Sequence[StoredPart]) -> Iterator[tuple[StoredPart, int, int, int]]:
    """Yield the parts of a rank's tensor: a part, the place in it, the place in the rank's tensor, the
    length.

    Args:
        slot: of the rank.
        parts: of the source, each place once (`one_of_each`).
    """
    axis = slot.item.cut.axis
    if axis is None:
        yield parts[0], 0, 0, slot.shape[0] if slot.shape else 1
        return
    own_pieces = pieces_of(axis, slot.pieces, slot.shape)
    for part in parts:
        for source_piece in pieces_of(axis, part.pieces, part.stored.shape):
            for own_piece in own_pieces:
                begin = max(own_piece.whole, source_piece.whole)
                end = min(own_piece.whole + own_piece.length, source_piece.whole + source_piece.length)
                if begin < end:
                    yield (
                        part,
                        begin - source_piece.whole + source_piece.here,
                        begin - own_piece.whole + own_piece.here,
                        end - begin,
                    )


def find(root: Path, step: int | None) -> tuple[Path, int]:
    """Return the folder of a step and the step: `step`, else the step that the tracker names.

    Raises:
        CheckpointError: the folder is missing.
    """
    if step is None:
        step = tracker.tracked_step(root)
        if step is None:
            raise CheckpointError(f"{root / naming.TRACKER}: names no step; give --step N")
    folder = root / naming.final_name(step)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    return folder, step


def sizes_at(root: Path, step: int) -> Sizes:
    """Return the parallel sizes with which the checkpoint of `step` below `root` was saved.

    Only the arguments in one file are read: the other content is not checked.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        UnsupportedError: the checkpoint has no arguments.
    """
    folder, _ = find(root, step)
    path = folder / COMMON if is_sharded(folder) else _model_files(folder)[0]
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    return Sizes.of(arguments_of(archive.read(path), path))


def _model_files(folder: Path) -> list[Path]:
    """Return the files of the ranks' models. Raises CheckpointError if the folder has none."""
    ranks = sorted(path / MODEL_FILE for path in folder.iterdir() if path.name.startswith("mp_rank_"))
    model_files = [path for path in ranks if path.is_file()]
    if not model_files:
        raise CheckpointError(
            f"{folder}: has no mp_rank_*/{MODEL_FILE}, so it is no checkpoint of the format torch"
        )
    return model_files


def open_source(root: Path, step: int | None, *, weights_only: bool = False) -> SourceCheckpoint:
    """Open the checkpoint of `step` below `root`; no tensor is read.

    Args:
        root: the folder with the checkpoints and the tracker.
        step: None: the step that the tracker names.
        weights_only: leave out the optimizer; the checkpoint need not have one.

    Raises:
        CheckpointError: a rank is missing, ranks are of different steps, a file is damaged.
        UnsupportedError: its kind is not supported.
    """
    folder, number = find(root, step)
    if is_sharded(folder):
        return _open_sharded(folder, number, weights_only)
    first = _model_files(folder)
    args = arguments_of(archive.read(first[0]), first[0])
    layout = layout_file.read(path) if (path := folder / naming.LAYOUT).exists() else None
    require_supported(args, folder, described=layout is not None, weights_only=weights_only)
    sizes = Sizes.of(args)
    if layout is not None:
        _require_sizes(layout, sizes, folder)
    optimizers = 0 if weights_only else _optimizers(args, sizes)
    bodies: dict[Rank, dict[str, Any]] = {}
    states: dict[Rank, Sequence[dict[Any, Any] | ByParam | None]] = {}
    for rank in sizes.ranks:
        path = folder / sizes.folder(rank)
        if not (path / MODEL_FILE).is_file():
            raise CheckpointError(
                f"{path / MODEL_FILE}: missing; the arguments say {sizes}, {len(sizes.ranks)} ranks"
            )
        body = archive.read(path / MODEL_FILE)
        if not isinstance(body, dict) or body.get("iteration") != number:
            raise CheckpointError(f"{path / MODEL_FILE}: is not of step {number}{_other_step(body)}")
        sizes_of_file = Sizes.of(arguments_of(body, path / MODEL_FILE))
        if sizes_of_file != sizes:
            raise CheckpointError(
                f"{path / MODEL_FILE}: was saved with {sizes_of_file}, {first[0]} with {sizes}"
            )
        described.require_model_file(body, path / MODEL_FILE, optimizers)
        bodies[rank] = body
        if weights_only:
            for key in described.OF_OPTIMIZER:
                body.pop(key, None)
            continue
        if not (path / OPTIMIZER_FILE).is_file():
            raise CheckpointError(f"{path / OPTIMIZER_FILE}: missing; {described.WITHOUT_OPTIMIZER}")
        content = archive.read(path / OPTIMIZER_FILE)
        states[rank] = described.optimizer_states(content, path / OPTIMIZER_FILE, optimizers)
    return SourceCheckpoint(folder, number, sizes, args, bodies, states, layout, weights_only)


def _open_sharded(folder: Path, number: int, weights_only: bool) -> SourceCheckpoint:
    sharded = ShardedCheckpoint(folder, number, weights_only=weights_only)
    args, sizes, layout = sharded.args, sharded.sizes, sharded.layout
    require_supported(args, folder, described=True, weights_only=weights_only)
    _require_sizes(layout, sizes, folder)
    bodies = {rank: sharded.body(rank) for rank in sizes.ranks}
    for body in bodies.values():
        described.require_model_file(body, folder, 0 if weights_only else _optimizers(args, sizes))
    states = {} if weights_only else {rank: sharded.states(rank) for rank in sizes.ranks}
    return SourceCheckpoint(folder, number, sizes, args, bodies, states, layout, weights_only)


def _optimizers(args: Namespace, sizes: Sizes) -> int:
    return 2 if getattr(args, "num_experts", None) and sizes.ep > 1 else 1


def _require_sizes(layout: JobLayout, sizes: Sizes, folder: Path) -> None:
    sizes_of_layout = described.sizes_of(layout)
    if sizes_of_layout != sizes:
        raise CheckpointError(
            f"{folder / naming.LAYOUT}: is of {sizes_of_layout}, and the arguments of {folder} say {sizes}"
        )


def _other_step(body: Any) -> str:
    step = body.get("iteration") if isinstance(body, dict) else None
    return f", but of step {step}" if isinstance(step, int) else ""

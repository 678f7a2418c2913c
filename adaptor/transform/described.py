"""A model and the part of each rank, as layout files describe them, without the rules of `rules.py`.

Below: checks that the files of a rank have the content that Megatron-LM writes, before tensors are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptor.checkpoint.layout_file import Entry, JobLayout, RankLayout
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.transform import rules
from adaptor.transform.model import Buffer, Item, Model, Slot, View, in_whole_model
from adaptor.transform.records import SIZES, DType, StoredTensor
from adaptor.transform.rules import EMBEDDING, WHOLE, Cut, Placed
from adaptor.transform.sizes import Rank, Sizes


def sizes_of(layout: JobLayout) -> Sizes:
    """Return the parallel sizes of a job.

    Raises:
        UnsupportedError: the folders lack a part of the experts.
        CheckpointError: a rank has no folder, or the sizes are of no job.
    """
    job_sizes = layout.ranks[0].sizes
    has_experts = bool(layout.ranks[0].args.get("num_experts"))
    etp = job_sizes["etp"] if has_experts else None
    if (
        min(
            job_sizes["tp"],
            job_sizes["pp"],
            job_sizes["vpp"],
            job_sizes["ep"],
            job_sizes["dp"],
            etp or job_sizes["tp"],
        )
        < 1
    ):
        raise CheckpointError(f"the layout file says sizes that no job has: {job_sizes}")
    sizes = Sizes(job_sizes["tp"], job_sizes["pp"], job_sizes["vpp"], job_sizes["ep"], job_sizes["dp"], etp)
    if sizes.lack:
        raise UnsupportedError(sizes.lack)
    missing = {sizes.folder(rank) for rank in sizes.ranks} - {rank.folder for rank in layout.ranks}
    if missing:
        raise CheckpointError(f"the layout file has no {min(missing)}, and {sizes} has")
    return sizes


def by_rank(layout: JobLayout) -> dict[Rank, RankLayout]:
    """Return the layouts by rank."""
    return {Rank(rank_layout.tp, rank_layout.pp, rank_layout.ep): rank_layout for rank_layout in layout.ranks}


def model_of(layout: JobLayout, args: Any, values: Mapping[str, Any]) -> Model:
    """Return the whole model.

    Args:
        layout: of the source.
        args: the stored arguments.
        values: of entries without a tensor, by their names in the whole model.

    Raises:
        UnsupportedError: the model is no GPT model, or is cut in a way that no rule can repeat.
    """
    sizes, ranks = sizes_of(layout), by_rank(layout)
    first: list[Item] = []
    last: list[Item] = []
    layers: dict[int, list[Item]] = {}
    experts: dict[int, list[Item]] = {}  # of other ranks than the first, by layer
    for number in range(sizes.vpp):
        for rank in sizes.ranks:
            is_first = sizes.replica(rank) == 0 and rank.tp == 0
            if not is_first and sizes.expert_rank(rank):
                continue
            for entry in ranks[rank].chunks.get("model" if sizes.vpp == 1 else f"model{number}", ()):
                if entry.tied or (not is_first and entry.expert is None):
                    continue
                item = _item(entry, values)
                if entry.layer is None:
                    (last if layers else first).append(item)
                elif not is_first:
                    experts.setdefault(entry.layer, []).append(item)
                else:
                    layers.setdefault(entry.layer, []).append(item)
    rows = next((item.shape[0] for item in first if item.name == EMBEDDING), 0)
    if not rows:
        raise UnsupportedError(f"the layout file has no {EMBEDDING}, so it is of no GPT model")
    all_layers = tuple(_joined(layers[number], experts.get(number, [])) for number in sorted(layers))
    return Model(args, tuple(first), all_layers, tuple(last), rows)


def _joined(layer: list[Item], experts: list[Item]) -> tuple[Item, ...]:
    """Put the experts of other ranks behind the experts of the first rank."""
    places = [place for place, item in enumerate(layer) if rules.expert_of(item.name) is not None]
    end = places[-1] + 1 if places else len(layer)
    return (*layer[:end], *experts, *layer[end:])


def name_of(entry: Entry) -> str:
    """Return the name of an entry in the whole model."""
    return entry.key if entry.tied else in_whole_model(entry.name, entry.layer, entry.expert)


def _item(entry: Entry, values: Mapping[str, Any]) -> Item:
    name = name_of(entry)
    if not entry.dtype:
        return Item(name, value=values.get(name))
    if entry.dtype not in SIZES:
        raise UnsupportedError(f"{name}: is {entry.dtype}, which is not transformed")
    return Item(name, entry.whole, entry.dtype, _cut(entry), param=entry.param)


def _cut(entry: Entry) -> Cut:
    if entry.axis is None:
        return WHOLE
    count = len(entry.pieces)
    shard_length = entry.whole[entry.axis] // count
    for number, piece in enumerate(entry.pieces):
        if (
            not number * shard_length
            <= piece.whole
            <= piece.whole + piece.length
            <= (number + 1) * shard_length
        ):
            raise UnsupportedError(f"{entry.name}: is cut into {count} uneven pieces; not transformed")
    return Cut(entry.axis, count, entry.padded)


def view_of(layout: RankLayout, rank: Rank, items: Mapping[str, Item]) -> View:
    """Return the part of a rank.

    Args:
        layout: of the rank.
        rank: its numbers.
        items: of the whole model, by name.

    Raises:
        UnsupportedError: the rank has an entry that the model lacks, or has in another shape or precision.
    """
    chunks = {
        key: tuple(_slot(layout, entry, items) for entry in entries) for key, entries in layout.chunks.items()
    }
    by_place = {(key, slot.name): slot for key, slots in chunks.items() for slot in slots}
    optimizers = tuple(
        tuple(
            Buffer(
                (DType(buffer.dtypes[0]), DType(buffer.dtypes[1])),
                tuple(
                    (
                        by_place[buffer_entry.chunk, buffer_entry.name],
                        Placed(buffer_entry.name, buffer_entry.begin, buffer_entry.end),
                    )
                    for buffer_entry in buffer.params
                ),
                buffer.numel,
            )
            for buffer in optimizer.buffers
        )
        for optimizer in layout.optimizers
    )
    groups = tuple(optimizer.groups for optimizer in layout.optimizers)
    stored = tuple(optimizer.stored for optimizer in layout.optimizers)
    return View(rank, chunks, optimizers, groups, stored)


def _slot(layout: RankLayout, entry: Entry, items: Mapping[str, Item]) -> Slot:
    name = name_of(entry)
    item = items.get(name)
    if item is None:
        if not entry.dtype:
            return Slot(entry.name, Item(name), ())
        raise UnsupportedError(f"{layout.folder}: has {name}, which the checkpoint has not")
    axis = item.cut.axis
    if item.dtype != entry.dtype or (entry.axis is not None and entry.axis != axis):
        raise UnsupportedError(
            f"{name}: is {entry.dtype}, cut along axis {entry.axis}, on {layout.folder};"
            f" in the checkpoint {item.dtype}, cut along axis {axis}"
        )
    axes_agree = [
        (axis is not None and item.cut.rows and place == axis) or own_length == stored_length
        for place, (own_length, stored_length) in enumerate(zip(entry.whole, item.shape, strict=False))
    ]
    if len(entry.whole) != len(item.shape) or not all(axes_agree):
        raise UnsupportedError(
            f"{name}: is {list(entry.whole)} in the layout of {layout.folder}, and"
            f" {list(item.shape)} in the checkpoint"
        )
    return Slot(entry.name, item, entry.shape, entry.pieces)


STATES = ("param", "exp_avg", "exp_avg_sq")
# The entries of the optimizer in a model's file.
OF_OPTIMIZER = ("optimizer", "opt_param_scheduler")
WITHOUT_OPTIMIZER = "give --weights-only for a checkpoint without an optimizer"
_LAYER = "decoder.layers."
_GENERATORS = ("torch_rng_state", "cuda_rng_state")  # as tensors; the other two are tuples


class ByParam:
    """The state of an optimizer, param by param: each kind of tensor (STATES) in the shape of the param.

    Args:
        tensors: name of the param in the whole model, kind, tensor.
    """

    def __init__(self, tensors: Iterable[tuple[str, str, StoredTensor]]) -> None:
        self._tensors = {(name, kind): tensor for name, kind, tensor in tensors}

    def tensor(self, name: str, kind: str) -> StoredTensor:
        """Return one tensor."""
        return self._tensors[name, kind]


def require_model_file(body: Any, path: Path, optimizers: int) -> None:
    """Refuse the `body` of a model's file with another layout than the framework's.

    Args:
        body: the content of the file.
        path: of the file.
        optimizers: the number of its optimizers: two with experts; 0: the optimizer is left out.

    Raises:
        CheckpointError: names the file and the defect.
    """
    for key, value in body.items():
        if not isinstance(key, str):
            raise _wrong(path, f"key {key!a}", "a name")
        if re.fullmatch(r"model\d*", key):
            _require_chunk(value, f"{path}: {key}")
    if optimizers:
        saved = body.get("optimizer")
        saved_states = saved if isinstance(saved, list) else [saved]
        if len(saved_states) != optimizers:
            raise _wrong(path, "optimizer", f"a list of {optimizers}")
        for optimizer_state in saved_states:
            _require_groups(optimizer_state, path)
    states = body.get("rng_state")
    if states is not None:
        if not isinstance(states, list):
            raise _wrong(path, "rng_state", "a list")
        for state in states:
            _require_random_states(state, path)


def _require_chunk(chunk: Any, path: str) -> None:
    if not isinstance(chunk, dict):
        raise CheckpointError(f"{path}: is not a dict of tensors")
    for name in chunk:
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: {name!a} is not a name")
        if name.startswith(_LAYER) and not re.fullmatch(r"\d{1,9}\..+", name.removeprefix(_LAYER)):
            raise CheckpointError(f"{path}: {name[:100]!a} has no number of a layer")


def _require_groups(optimizer: Any, path: Path) -> None:
    inner = optimizer.get("optimizer") if isinstance(optimizer, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list):
        raise CheckpointError(f"{path}: has no optimizer with groups of params; {WITHOUT_OPTIMIZER}")
    for group in groups:
        if not isinstance(group, dict):
            raise _wrong(path, "a group of params", "a dict")
        for name in ("wd_mult", "lr_mult"):
            if not isinstance(group.get(name), int | float):
                raise _wrong(path, f"{name} of a group of params", "a number")
        for name in ("step", "is_expert_parallel", "is_decoupled_lr"):
            if not isinstance(group.get(name, 0), int | float | StoredTensor | None):
                raise _wrong(path, f"{name} of a group of params", "a number or a flag")


def _require_random_states(states: Any, path: Path) -> None:
    if not isinstance(states, dict):
        raise _wrong(path, "rng_state", "a list of dicts")
    trackers = states.get("rng_tracker_states") or {}
    if not isinstance(trackers, dict):
        raise _wrong(path, "rng_tracker_states", "a dict")
    for name, value in [*((name, states.get(name)) for name in _GENERATORS), *trackers.items()]:
        if not isinstance(value, StoredTensor) or value.dtype != "uint8":
            raise _wrong(path, f"the random state {name}", "a tensor of bytes")


def optimizer_states(content: Any, path: Path, optimizers: int) -> list[dict[Any, Any] | None]:
    """Return the states in the `content` of an optimizer's file; None where another rank has the state.

    Raises:
        CheckpointError: the content is not the state of `optimizers` optimizers.
    """
    states = content if isinstance(content, list) else [content]
    if len(states) != optimizers or not all(isinstance(state, dict | None) for state in states):
        raise CheckpointError(f"{path}: is not the state of {optimizers} optimizers, as its arguments say")
    return states


def buffers(
    state: Mapping[Any, Any], expected: Sequence[Buffer], path: Path, authority: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the tensors of each buffer of a state, by their kind (STATES).

    Args:
        state: of the optimizer.
        expected: its buffers.
        path: of the file.
        authority: the source of the expected layout, for the message.

    Raises:
        CheckpointError: a buffer is missing, cut short, of another precision, or laid out by other rules.
    """
    for number, buffer in enumerate(expected):
        kinds = state.get(number)
        stored = kinds.get(buffer.dtypes) if isinstance(kinds, dict) else None
        if not isinstance(stored, dict):
            raise CheckpointError(f"{path}: has no buffer {number} of {buffer.dtypes[0].name}")
        numel = stored.get("numel_unpadded")
        if numel != buffer.numel:
            raise CheckpointError(
                f"{path}: buffer {number} has {_shown(numel)} elements; by {authority} it would have"
                f" {buffer.numel}"
            )
        for kind in STATES:
            _require_whole(stored.get(kind), kind, buffer.numel, f"{path}: buffer {number}")
        yield stored


def _require_whole(tensor: Any, kind: str, numel: int, location: str) -> None:
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{location}: has no {kind}")
    if tensor.dtype != "float32":
        raise CheckpointError(f"{location}: {kind} is {tensor.dtype}; only float32 is transformed")
    if tensor.shape != (numel,):
        raise CheckpointError(f"{location}: {kind} has {tensor.numel} elements, not {numel}")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"a {type(value).__name__} as number of"


def _wrong(path: Path, subject: str, right: str) -> CheckpointError:
    return CheckpointError(f"{path}: {subject[:100]} is not {right}")

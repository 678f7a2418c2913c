"""Lays out a data file of `torch.distributed.checkpoint` before its shards have arrived (`SequenceLayout`).

The tensors of the plan are stand-ins on the device `meta`, or views of stand-ins: the framework's own
functions can slice and reshape stand-ins, but cannot read them. The content of a tensor that such a function
has allocated itself is not known, unless the tensor is a copy and copies are followed (`planned_tensors`):
`CannotBePlanned` is raised for an unknown tensor.
"""

from __future__ import annotations

import io
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from adaptor.checkpoint.archive_layout import ArchiveLayout, SequenceLayout, stand_in_for
from adaptor.checkpoint.dcp import RankPart, by_itself
from adaptor.checkpoint.planned_tensors import CannotBePlanned, PlannedTensors, Source

# The keys of what an optimizer, alone or in a chain, saves in the form of its own buffers begin so.
_FLAT = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.")
# The beginning of the text that is pickled in place of a value.
_TOKEN = "ttp: a value with stand-ins "
# The function that makes a tensor of the device `meta`, in a pickle of torch.
_WITHOUT_MEMORY = b"_rebuild_meta_tensor_no_storage"


class PlannedObjects:
    """The values with stand-ins that a framework saves as objects, and pickles at once."""

    def __init__(self, planned: PlannedTensors) -> None:
        self._planned = planned
        self._values: dict[str, Any] = {}

    def token_for(self, value: Any) -> Any:
        """Return the text to pickle in place of `value`; `value` itself without stand-ins."""
        if not any(self._planned.stands_for_state(tensor) for tensor in _tensors(value)):
            return value
        token = f"{_TOKEN}{len(self._values)}"
        self._values[token] = value
        return token

    def value_of(self, pickled: bytes) -> Any | None:
        """Return the pickled value, with the values in place of their tokens; None without a token."""
        if _TOKEN.encode() not in pickled:
            return None
        return _mapped(torch.load(io.BytesIO(pickled), weights_only=True), self._put_back)

    def _put_back(self, leaf: Any) -> Any:
        return self._values.get(leaf, leaf) if isinstance(leaf, str) else leaf


def lay_out(
    part: RankPart, planned: PlannedTensors, objects: PlannedObjects | None = None
) -> SequenceLayout[Source]:
    """Lay out the data file of `part`, in place of `write_data`. Raises CannotBePlanned."""
    layout: SequenceLayout[Source] = SequenceLayout()
    contents = part.contents()
    planned_ones = [(item, data) for item, data in contents if _is_planned(data)]
    sources = _sources(planned_ones, planned)
    for item, data in contents:
        if item.type == WriteItemType.BYTE_IO:
            pickled = data.getvalue()
            require_no_stand_in(pickled, item.index.fqn)
            value = objects.value_of(pickled) if objects is not None else None
            if value is None:
                start, length = layout.add_bytes(pickled)
            else:
                start, length = layout.add_archive(archive_of(value, planned, item.index.fqn))
        elif (source := sources.get(item.index)) is not None:
            start, length = layout.add_planned(data, source)
        elif _is_part_on_host(data):
            start, length = layout.add_part(data)
        else:
            start, length = layout.add_tensor(by_itself(data))
        part.note(item, start, length)
    return layout


def archive_of(value: Any, planned: PlannedTensors, name: str) -> ArchiveLayout[Source]:
    """Lay out the archive that torch.save would make of `value` with the tensors.

    Args:
        name: of `value`, for the exception.

    Raises:
        CannotBePlanned: the place of some content is not known.
    """
    sources_by_storage: dict[int, Source] = {}

    def on_host(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not planned.stands_for_state(leaf):
            return leaf
        source = planned.range_of(leaf)
        if source is None or source.numel != leaf.numel() or not leaf.is_contiguous():
            raise CannotBePlanned(name)
        # torch would save the subclass or the flag as well
        if type(leaf) is not torch.Tensor or leaf.requires_grad:
            raise CannotBePlanned(name)
        stand_in = stand_in_for(leaf)
        sources_by_storage[stand_in.untyped_storage()._cdata] = source
        return stand_in

    stand_in = _mapped(value, on_host)
    archive = ArchiveLayout(stand_in, lambda storage: sources_by_storage.get(storage._cdata))
    # For example a sum of stand-ins, or a stand-in in a value of another kind: its content would not be in
    # the file.
    require_no_stand_in(archive.structure, name)
    return archive


def _mapped(value: Any, act: Callable[[Any], Any]) -> Any:
    """Return `value` with `act` applied to all leaves of its dicts, lists and tuples."""
    if type(value) in (dict, OrderedDict):
        mapped = type(value)((key, _mapped(item, act)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # of torch's state dicts
            vars(mapped).update(_metadata=value._metadata)
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, act) for item in value)
    return act(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def note(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)

    _mapped(value, note)
    return tensors


def require_no_stand_in(content: bytes, name: str) -> None:
    """Raise CannotBePlanned if the output of torch.save, `content`, has a stand-in as a tensor."""
    if _WITHOUT_MEMORY in content:
        raise CannotBePlanned(name)


def _is_planned(data: Any) -> bool:
    return isinstance(data, torch.Tensor) and data.device.type == "meta"


def _is_part_on_host(tensor: torch.Tensor) -> bool:
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return is_part and tensor.device.type == "cpu" and tensor.is_contiguous()


def _sources(items: Sequence[tuple[Any, torch.Tensor]], planned: PlannedTensors) -> dict[Any, Source]:
    """Return the source of each of these tensors, by the index of its item. Raises CannotBePlanned."""
    sources_by_index = {item.index: planned.range_of(tensor) for item, tensor in items}
    starts = _starts(items, sources_by_index)
    sources_found: dict[Any, Source] = {}
    for item, tensor in items:
        source = sources_by_index[item.index]
        if source is None and not planned.stands_for_state(tensor):
            source = _padding(item, tensor, starts)
        if (
            source is None
            or source.numel != tensor.numel()
            or source.dtype != tensor.dtype
            or not tensor.is_contiguous()
        ):
            raise CannotBePlanned(item.index.fqn)
        sources_found[item.index] = source
    return sources_found


# The start of a flat tensor in a world tensor: position, number, key, dtype, and the place there.
_Start = tuple[int, int, str, torch.dtype, int]


def _starts(
    items: Sequence[tuple[Any, torch.Tensor]], sources_by_index: Mapping[Any, Source | None]
) -> dict[str, set[_Start]]:
    """Return the starts of the tensor under each key, from its pieces: one start, if the tensor is flat."""
    starts: dict[str, set[_Start]] = defaultdict(set)
    for item, _ in items:
        source = sources_by_index[item.index]
        if _FLAT.match(item.index.fqn) and source is not None and not source.view:
            begin = source.begin - item.tensor_data.chunk.offsets[0]
            starts[item.index.fqn].add((source.position, source.number, source.key, source.dtype, begin))
    return starts


def _padding(item: Any, tensor: torch.Tensor, starts: Mapping[str, set[_Start]]) -> Source | None:
    """Return the source of a tensor that the framework has made to fill a bucket (`dp_reshardable`).

    The saved tensors of a bucket are flat, and cut in pieces: so the other pieces tell the part of the world
    tensor for this piece. Between two params the world tensor is zero.
    """
    places = starts.get(item.index.fqn, set())
    if tensor.dim() != 1 or len(places) != 1:
        return None
    ((position, number, key, dtype, start),) = places
    begin = start + item.tensor_data.chunk.offsets[0]
    return Source(position, number, key, begin, begin + tensor.numel(), dtype)

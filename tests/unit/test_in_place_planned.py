"""A framework's operations on stand-ins equal the operations on the state bitwise, or the shards are
gathered.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptor.checkpoint import dcp, dcp_layout, shards
from adaptor.checkpoint.archive_layout import ArchiveLayout, SequenceLayout, join_crcs
from adaptor.checkpoint.file_parts import PartWriter, Region, WrittenPart
from adaptor.checkpoint.in_place import InPlace
from adaptor.checkpoint.in_place_holder import own_readers
from adaptor.checkpoint.planned_tensors import CannotBePlanned, PlannedTensors, Source
from adaptor.checkpoint.shards import Exchange
from tests.unit.test_checkpoint_dump import Rank
from tests.unit.test_in_place import DTYPES, half, one_param, same
from tests.unit.test_in_place_dcp import PiecePlanner, set_block, world_of

NUMEL = 240
Tensors = Mapping[str, torch.Tensor]
Step = Callable[[torch.Tensor], torch.Tensor]


def _state() -> Any:
    """Return a rank with all shards of a state without equal numbers."""
    rank = one_param(NUMEL)
    for key in shards.KEYS:
        rank.states[rank.model.a][key] = torch.rand(NUMEL, generator=torch.Generator().manual_seed(7))
    return rank


def _written(make: Callable[[Tensors], Any], *, follow: bool = True, as_object: bool = False) -> Any:
    """Return the values that torch loads from the file written in place. Raises CannotBePlanned."""
    rank, planned = _state(), PlannedTensors("meta")
    world = planned.state_of(rank.optimizer, 0)[0][DTYPES]
    objects = dcp_layout.PlannedObjects(planned)

    def lay_out() -> Any:
        result = make(world)
        if as_object:
            planner = PiecePlanner({}, {"a": [objects.token_for(result)]})
        else:
            planner = PiecePlanner({"a": (result.shape, {(0,) * result.dim(): result})}, {})
        part = dcp.RankPart(0, planner)
        return part, dcp_layout.lay_out(part, planned, objects)

    if follow:
        with planned.follow_copies():
            part, layout = lay_out()
    else:
        part, layout = lay_out()
    with tempfile.TemporaryDirectory() as folder:
        exchange = Exchange(None, 0, [[0]], folder=Path(folder))
        with InPlace({part.data_file: layout}, [rank.optimizer], exchange, 1) as archives:
            assert archives.write()
            (entry,) = archives.finish()
        content = (Path(folder) / entry.draft).read_bytes()
    loaded = torch.load(io.BytesIO(content), weights_only=False)
    return loaded[0] if as_object else loaded


def _expected(make: Callable[[Tensors], Any]) -> Any:
    rank = _state()
    return make({key: tensor.clone() for key, tensor in rank.states[rank.model.a].items()})


def _is_bitwise(first: torch.Tensor, right: torch.Tensor) -> bool:
    # Copy: a single element may have any stride, even when contiguous.
    flat = [torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1) for tensor in (first, right)]
    flat = [tensor.view(torch.uint8) for tensor in flat]
    return first.dtype == right.dtype and first.shape == right.shape and torch.equal(*flat)


def _out(world: Tensors) -> torch.Tensor:
    copy = world["param"].clone()
    torch.mul(world["exp_avg"], 2, out=copy)
    return copy


def _foreach(world: Tensors) -> torch.Tensor:
    copy = world["param"].clone()
    torch._foreach_mul_([copy[:9], copy[9:]], 2.0)
    return copy


def _bits(world: Tensors) -> torch.Tensor:
    return world["param"].view(torch.int32).clone()


def _bits_of_halves(world: Tensors) -> torch.Tensor:
    return world["param"].view(torch.bfloat16)[4:12].clone()


def _bits_turned(world: Tensors) -> torch.Tensor:
    return world["param"].view(torch.int32).view(-1, 12).t().contiguous()


def _changed_in_place(world: Tensors) -> torch.Tensor:
    world["param"].mul_(2)
    return world["param"]


def _changed_through_a_view(world: Tensors) -> torch.Tensor:
    world["param"].view(-1, 12)[3:5].zero_()
    return world["param"][40:]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    "make", [_out, _foreach, _bits, _bits_of_halves, _bits_turned, _changed_in_place, _changed_through_a_view]
)
def test_results_other_than_copies_are_gathered(
    make: Callable[[Tensors], torch.Tensor], follow: bool
) -> None:
    with pytest.raises(CannotBePlanned):
        _written(make, follow=follow)


@pytest.mark.parametrize(("rows", "dtype"), [(20, torch.bfloat16), (1, torch.float32)])
def test_a_cast_has_the_order_and_the_rounding_of_its_tensor(rows: int, dtype: torch.dtype) -> None:
    planned = PlannedTensors("meta")
    (world,) = planned.state_of(_state().optimizer, 0)[0].values()
    half = world["param"] if rows > 1 else planned.cast(world["param"], torch.bfloat16)
    converted = planned.cast(half.view(rows, -1).t() if rows > 1 else half, dtype)
    assert planned.range_of(converted) is None


def test_the_archive_of_a_stand_in_that_was_changed_is_not_laid_out() -> None:
    """Otherwise arbitrary memory would be saved."""
    planned = PlannedTensors()
    (world,) = planned.state_of(_state().optimizer, 0)[0].values()
    world["param"].mul_(2)
    with pytest.raises(CannotBePlanned):
        ArchiveLayout(world, planned.source_of)


def _with_a_sum(world: Tensors) -> Any:
    return {"param": world["param"], "sum": world["param"] + world["exp_avg"]}


class _Strange(dict[str, Any]):
    """A kind of value that the planner does not inspect."""


def _in_another_kind_of_value(world: Tensors) -> Any:
    return {"param": world["param"], "more": _Strange(exp_avg=world["exp_avg"])}


def _as_parameter(world: Tensors) -> Any:
    return [torch.nn.Parameter(world["param"])]


def _bits_in_an_object(world: Tensors) -> Any:
    return [world["param"].view(torch.int32)[3:9]]


@pytest.mark.parametrize("make", [_with_a_sum, _in_another_kind_of_value, _as_parameter, _bits_in_an_object])
def test_an_object_of_unknown_content_is_gathered(make: Callable[[Tensors], Any]) -> None:
    """torch pickles a tensor without memory as it is: a load would restore nothing."""
    with pytest.raises(CannotBePlanned):
        _written(make, as_object=True)


def test_an_object_has_tensors_of_all_kinds_twice() -> None:
    def make(world: Tensors) -> Any:
        computed = torch.arange(6.0).view(2, 3).t()
        world_views = [world["param"], world["param"][3:9], world["param"][:0], world["exp_avg"].view(20, 12)]
        other_values = [
            computed,
            computed,
            torch.tensor([True, False]),
            torch.empty(0),
            torch.tensor(7),
            computed.to(torch.bfloat16),
        ]
        return {"known": world_views, "again": world_views, "others": (other_values, "text", None)}

    assert same(_written(make, as_object=True), _expected(make))


def test_a_part_of_one_element_is_written_in_place_whatever_its_step() -> None:
    frozen = torch.arange(240.0).view(20, 12)
    parts = {(0,): frozen[3:4, 5], (1,): frozen[:0, 5], (2,): frozen[7:8, 1]}
    part = _Placed(0, PiecePlanner({"frozen": ((3,), parts)}, {}))
    layout = dcp_layout.lay_out(part, PlannedTensors("meta"))
    with tempfile.TemporaryDirectory() as folder:
        content = _by_several(layout, [one_param(NUMEL)], Path(folder) / "file")
    for (start, length), part_tensor in zip(part.places, parts.values(), strict=True):
        assert _is_bitwise(torch.load(io.BytesIO(content[start : start + length])), part_tensor)


# Operations on a tensor, with a parameter in [0, 1); an inapplicable operation returns the tensor unchanged.
def _dimension(tensor: torch.Tensor, part: float) -> int:
    return min(int(part * tensor.dim()), tensor.dim() - 1)


def _transposed(tensor: torch.Tensor, part: float) -> torch.Tensor:
    return tensor.transpose(0, _dimension(tensor, part)) if tensor.dim() else tensor


def _narrowed(tensor: torch.Tensor, part: float) -> torch.Tensor:
    if not tensor.dim():
        return tensor
    dimension = _dimension(tensor, part)
    size = tensor.shape[dimension]
    begin = int(part * 7919) % (size + 1)
    return tensor.narrow(dimension, begin, int(part * 104729) % (size - begin + 1))


def _selected(tensor: torch.Tensor, part: float) -> torch.Tensor:
    if not tensor.dim() or not tensor.shape[dimension := _dimension(tensor, part)]:
        return tensor
    return tensor.select(dimension, int(part * 7919) % tensor.shape[dimension])


def _each_second(tensor: torch.Tensor, part: float) -> torch.Tensor:
    return tensor[int(part * 2) :: 2] if tensor.dim() else tensor


def _windows(tensor: torch.Tensor, part: float) -> torch.Tensor:
    return tensor.unfold(0, 2, 1) if tensor.dim() and tensor.shape[0] > 1 and tensor.dim() < 4 else tensor


def _split(tensor: torch.Tensor, part: float) -> torch.Tensor:
    return tensor.reshape(2, -1) if tensor.numel() and tensor.numel() % 2 == 0 else tensor


def _expanded(tensor: torch.Tensor, part: float) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(2, *tensor.shape) if tensor.dim() < 4 else tensor


def _halved(tensor: torch.Tensor, part: float) -> torch.Tensor:
    return tensor.to(torch.bfloat16 if part < 0.5 else torch.float32)


def _as_bits(tensor: torch.Tensor, part: float) -> torch.Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


STEPS: Sequence[Callable[[torch.Tensor, float], torch.Tensor]] = [
    _transposed, _narrowed, _selected, _each_second, _windows, _split, _expanded, _halved, _as_bits,
    lambda tensor, part: tensor.contiguous(), lambda tensor, part: tensor.clone(),
    lambda tensor, part: tensor.reshape(-1), lambda tensor, part: tensor.unsqueeze(-1),
]  # fmt: skip
SHAPES = [(NUMEL,), (20, 12), (3, 20, 4), (2, 5, 6, 4)]


@given(
    st.sampled_from(SHAPES),
    st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0, 1, exclude_max=True)), max_size=6),
    st.booleans(),
)
def test_any_operations_give_torch_s_result_or_are_gathered(
    shape: Sequence[int], steps: Sequence[tuple[Callable[..., torch.Tensor], float]], is_last_copied: bool
) -> None:
    def make(world: Tensors) -> torch.Tensor:
        tensor = world["param"].view(*shape)
        for step, part in steps:
            tensor = step(tensor, part)
        return tensor.contiguous() if is_last_copied else tensor

    try:
        written = _written(make)
    except CannotBePlanned:
        return
    assert _is_bitwise(written, _expected(make))


class _Placed(dcp.RankPart):
    """Records the place and the length of each item, in order."""

    def __init__(self, rank: int, planner: Any) -> None:
        super().__init__(rank, planner)
        self.places: list[tuple[int, int]] = []

    def note(self, item: Any, start: int, length: int) -> None:
        self.places.append((start, length))


def _by_several(layout: SequenceLayout[Source], ranks: Sequence[Rank], file: Path) -> bytes:
    """Return the file written by `ranks` in turn, each with its shards."""
    regions = []
    for entry in layout.entries:
        if isinstance(source := entry.content, Source):
            dtype = str(source.dtype).removeprefix("torch.")
            place = source.position, source.number, source.key, dtype, source.begin, source.end, source.view
            regions.append(Region(0, entry.begin, *place))
    parts: list[WrittenPart] = []
    with file.open("w+b") as opened, contextlib.ExitStack() as stack:
        os.ftruncate(opened.fileno(), layout.size)
        for number, rank in enumerate(ranks):
            exchange = Exchange(None, number, [list(range(len(ranks)))])
            writer = stack.enter_context(PartWriter([opened.fileno()], exchange))
            for entry in layout.entries if number == 0 else ():
                if isinstance(entry.content, torch.Tensor):
                    writer.add_content(0, entry.begin, entry.content)
            writer.add_shards(regions, [rank.optimizer], own_readers([rank.optimizer], exchange))
            while not writer.write_for(0.0):
                pass
            parts += writer.parts
        parts.sort(key=lambda part: part.at)
        crcs = []
        for entry in layout.entries:
            parts_of_entry = [part for part in parts if entry.begin <= part.at < entry.begin + entry.size]
            places = [
                entry.begin,
                *itertools.chain.from_iterable((p.at, p.at + p.size) for p in parts_of_entry),
            ]
            places.append(entry.begin + entry.size)
            assert places[::2] == places[1::2], "each byte is written, by one rank"
            crcs.append(join_crcs([(part.crc, part.size) for part in parts_of_entry]))
        for at, data in layout.around(crcs):
            os.pwrite(opened.fileno(), data, at)
    return file.read_bytes()


@given(
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([64, 256, 4096]),
    st.lists(
        st.tuples(
            st.sampled_from(shards.KEYS),
            st.sampled_from(SHAPES),
            st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0, 1, exclude_max=True)), max_size=3),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_several_ranks_write_the_same_file_as_one_rank(
    count: int, block: int, copies: Sequence[tuple[str, Sequence[int], Sequence[tuple[Any, float]]]]
) -> None:
    ranks = [half(index, count, NUMEL) for index in range(count)]
    for number, rank in enumerate(ranks):
        generator = torch.Generator().manual_seed(number)
        for key in shards.KEYS:
            rank.states[rank.model.a][key] = torch.rand(NUMEL // count, generator=generator)

    def tensors(world: Tensors) -> Mapping[str, Any]:
        tensors_by_name = {
            "mine": ((3, 5), {(0, 0): torch.arange(15.0).view(3, 5)[:2], (2, 0): torch.ones(1, 5)})
        }
        for number, (key, shape, steps) in enumerate(copies):
            tensor = world[key].view(*shape)
            for step, part in steps:
                tensor = step(tensor, part)
            tensor = tensor.contiguous()
            tensors_by_name[f"{number}"] = tensor.shape, {(0,) * tensor.dim(): tensor}
        return tensors_by_name

    planned = PlannedTensors("meta")
    with planned.follow_copies():
        part = _Placed(0, PiecePlanner(tensors(planned.state_of(ranks[0].optimizer, 0)[0][DTYPES]), {}))
        try:
            layout = dcp_layout.lay_out(part, planned)
        except CannotBePlanned:
            return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        set_block(patch, block)
        content = _by_several(layout, ranks, Path(folder) / "file")
    rank_part = dcp.RankPart(0, PiecePlanner(tensors(world_of(ranks)), {}))
    for (start, length), (item, expected) in zip(part.places, rank_part.contents(), strict=True):
        loaded = torch.load(io.BytesIO(content[start : start + length]), weights_only=True)
        assert _is_bitwise(loaded, expected), item.index


@pytest.mark.parametrize("step", [_transposed, _narrowed, _selected, _each_second, _windows, _halved])
def test_most_copies_are_known(step: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    """Show that the comparison above does not only see gathered results."""

    def make(world: Tensors) -> torch.Tensor:
        return step(world["param"].view(3, 20, 4), 0.4).contiguous()

    assert _is_bitwise(_written(make), _expected(make))

"""Weights that a framework transposes before saving, written in place by their holders."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.checkpoint import dcp, dcp_layout, file_parts, planned_tensors, shards
from adaptor.checkpoint.file_parts import NotFinite
from adaptor.checkpoint.hashing import BLOCK
from adaptor.checkpoint.in_place_holder import own_readers
from adaptor.checkpoint.planned_tensors import CannotBePlanned, PlannedTensors, Source, StridedView
from adaptor.checkpoint.shards import Exchange
from adaptor.devices.device import Device
from tests.faults import sharded
from tests.unit.test_in_place import DTYPES, half, one_param
from tests.unit.test_in_place_dcp import PiecePlanner, assert_same, in_both_ways, ranks_of, set_block

EXPERTS, ROWS, COLUMNS = 3, 20, 64
# The boundary between two ranks' shards lies in the second expert.
BEGIN = 100
Tensors = Mapping[str, torch.Tensor]
Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def _matrices(flat: torch.Tensor) -> torch.Tensor:
    return flat[BEGIN : BEGIN + EXPERTS * ROWS * COLUMNS].view(EXPERTS, ROWS, COLUMNS)


def _whole(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {name: (tensor.shape, {(0,) * tensor.dim(): tensor})}


def _all_experts(world: Tensors, cast: Cast) -> dict[str, Any]:
    """As in a grouped-GEMM expert layer, with its optimizer state."""
    weights = _matrices(cast(world["param"], torch.bfloat16)).transpose(-1, -2).contiguous()
    state = _matrices(world["exp_avg"]).transpose(-1, -2).contiguous()
    return _whole("weights", weights) | _whole("state", state)


def _each_expert(world: Tensors, cast: Cast) -> dict[str, Any]:
    turned = _matrices(world["exp_avg_sq"]).transpose(-1, -2)
    halves = torch.chunk(turned, 2, -2)
    return {
        f"expert {number} {half}": (expert.shape, {(0, 0): expert.contiguous()})
        for half, experts in enumerate(halves)
        for number, expert in enumerate(experts)
    }


def _pieces_of_a_copy(world: Tensors, cast: Cast) -> dict[str, Any]:
    copy = _matrices(world["param"]).permute(2, 0, 1).contiguous()
    rows = {(0, 0, 0): copy[:7], (7, 0, 0): copy[7:]}
    return {"rows": (copy.shape, rows)} | _whole("one", copy[9, 1]) | _whole("few", copy[9, 1, 3:11])


def _columns(world: Tensors, cast: Cast) -> dict[str, Any]:
    return _whole("columns", _matrices(world["param"])[:, :, 5:23].clone())


def _cast_behind_the_copy(world: Tensors, cast: Cast) -> dict[str, Any]:
    return _whole("half", _matrices(world["param"]).transpose(0, 1).contiguous().to(torch.bfloat16))


def _in_order_after_all(world: Tensors, cast: Cast) -> dict[str, Any]:
    """Copies of copies: the rows end up in their old order."""
    return _whole("back", _matrices(world["param"]).transpose(1, 2).contiguous()[1].clone())


@pytest.mark.parametrize("block", [BLOCK, 64])
@pytest.mark.parametrize(
    "turned",
    [_all_experts, _each_expert, _pieces_of_a_copy, _columns, _cast_behind_the_copy, _in_order_after_all],
)
def test_torch_loads_the_same_values_as_from_a_gathered_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: Callable[[Tensors, Cast], Any], block: int
) -> None:
    set_block(monkeypatch, block)

    def planner(world: Tensors, cast: Cast, saved_as: Any) -> PiecePlanner:
        return PiecePlanner(turned(world, cast), {})

    in_place, gathered = map(sharded.load, in_both_ways(tmp_path, ranks_of(1 << 12), planner))
    assert_same(in_place, gathered)


def _changed(world: Tensors) -> torch.Tensor:
    return world["param"].view(-1, 64).t().contiguous().mul_(2)


def _rounded_twice(world: Tensors) -> torch.Tensor:
    return world["param"].view(-1, 64).t().to(torch.bfloat16).to(torch.float32)


def _in_the_order_of_its_memory(world: Tensors) -> torch.Tensor:
    return world["param"].view(-1, 64).t().to(torch.bfloat16).contiguous()


def _repeated(world: Tensors) -> torch.Tensor:
    return world["param"][:4].view(4, 1).expand(4, 3).contiguous()


def _no_view(world: Tensors) -> torch.Tensor:
    return world["param"].view(-1, 64).t().contiguous().view(-1)[5:900]


def _filled(world: Tensors) -> torch.Tensor:
    return torch.cat([world["param"], world["exp_avg"]])


@pytest.mark.parametrize(
    "make", [_changed, _rounded_twice, _in_the_order_of_its_memory, _repeated, _no_view, _filled]
)
def test_unknown_copies_are_not_planned(make: Callable[[Tensors], torch.Tensor]) -> None:
    def tensors(world: Tensors) -> dict[str, Any]:
        # Next to flat tensors a tensor of unknown content could pass as padding.
        flat = {"optimizer.distributed.a": ((1 << 12,), {(0,): world["param"][:9]})}
        return flat | _whole("a", make(world))

    with pytest.raises(CannotBePlanned):
        _lay_out(tensors)


def test_a_changed_stand_in_is_no_padding() -> None:
    def tensors(world: Tensors) -> dict[str, Any]:
        changed = world["param"][9:20].clone().mul_(2)
        return {"optimizer.distributed.a": ((20,), {(0,): world["param"][:9], (9,): changed})}

    with pytest.raises(CannotBePlanned):
        _lay_out(tensors)


def _lay_out(tensors: Callable[[Tensors], dict[str, Any]]) -> None:
    planned = PlannedTensors("meta")
    world = planned.state_of(half(0, 1, 1 << 12).optimizer, 0)[0][DTYPES]
    with planned.follow_copies():
        dcp_layout.lay_out(dcp.RankPart(0, PiecePlanner(tensors(world), {})), planned)


def test_runs_are_limited_to_the_range() -> None:
    tensor = torch.arange(BEGIN + EXPERTS * ROWS * COLUMNS)
    view = _matrices(tensor).transpose(-1, -2)[:, 3:, :]
    strided = StridedView(BEGIN + 3, tuple(zip(view.shape, view.stride(), strict=True)))
    flat = view.reshape(-1)
    assert torch.equal(strided.places(0, flat.numel()), flat)
    for low, high in ((0, len(tensor)), (BEGIN, BEGIN + 1), (1500, 2222), (1403, 2777), (len(tensor), 9999)):
        runs = list(strided.runs(low, high))
        assert strided.count_runs(low, high) == len(runs)
        positions = [int(place) for first, last in runs for place in strided.places(first, last)]
        assert positions == [place for place in flat.tolist() if low <= place < high]
        assert all(
            previous_end < next_start for (_, previous_end), (next_start, _) in itertools.pairwise(runs)
        ), "joined"


def test_too_many_runs_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that ends inside the matrix has a run per row."""
    optimizers = [half(0, 2, 1 << 12).optimizer]
    source = Source(0, 0, "param", 0, 1 << 12, torch.float32, ((64, 1), (64, 64)))
    monkeypatch.setattr(planned_tensors, "_MOST_RUNS", 128)
    planned_tensors.require_few_runs([source], optimizers)
    monkeypatch.setattr(planned_tensors, "_MOST_RUNS", 127)
    with pytest.raises(CannotBePlanned, match="128 runs"):
        planned_tensors.require_few_runs([source], optimizers)


class _Far(Device):
    """A device that counts the copied bytes, and the largest number of elements held on the host."""

    def __init__(self) -> None:
        self.brought: list[int] = []
        self.most = 0
        self._copies: list[weakref.ref[torch.Tensor]] = []

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.brought.append(tensor.numel())
        copy = tensor.clone()
        self._copies.append(weakref.ref(copy))
        live_copies = [live for reference in self._copies if (live := reference()) is not None]
        self.most = max(self.most, sum(live.numel() for live in live_copies))
        return copy


def test_a_device_copies_a_block_at_once_and_a_number_that_is_not_finite_is_reported_once(
    tmp_path: Path,
) -> None:
    rank, device = one_param(1 << 12), _Far()
    rank.states[rank.model.a]["param"][BEGIN + 7] = float("inf")
    region = file_parts.Region(
        0, 0, 0, 0, "param", "float32", BEGIN, BEGIN + EXPERTS * ROWS * COLUMNS,
        ((EXPERTS, ROWS * COLUMNS), (COLUMNS, 1), (ROWS, COLUMNS)),
    )  # fmt: skip
    exchange = Exchange(None, 0, [[0]], device=device)
    with (tmp_path / "file").open("w+b") as file:
        with file_parts.PartWriter([file.fileno()], exchange) as writer:
            writer.add_shards([region], [rank.optimizer], own_readers([rank.optimizer], exchange))
            assert writer.write_for(60.0)
        assert writer.not_finite == [NotFinite(0, 0, "param", "float32", 0, 0, 1 << 12)]
        content = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.float32)
    turned = _matrices(rank.states[rank.model.a]["param"]).transpose(-1, -2)
    assert torch.equal(content, turned.reshape(-1))
    assert len(device.brought) == 1, "it is one run of one block"


def _written(file: Path, device: Device, rank: Any, *views: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return the file that a rank with all shards writes for views of its param, in order.

    Args:
        file: the written file.
        device: the device of the state.
        rank: a rank with one param, in one tensor or several.
        views: views of a tensor with the world tensor's size.
        block: the size of a block.
    """
    regions, at = [], 0
    for view in views:
        dimensions = tuple(zip(view.shape, view.stride(), strict=True))
        begin, span = view.storage_offset(), 1 + sum((size - 1) * step for size, step in dimensions)
        regions.append(file_parts.Region(0, at, 0, 0, "param", "float32", begin, begin + span, dimensions))
        at += view.numel() * 4
    readers = own_readers([rank.optimizer], exchange := Exchange(None, 0, [[0]], device=device))
    with file.open("w+b") as opened, pytest.MonkeyPatch.context() as patch:
        set_block(patch, block)
        with file_parts.PartWriter([opened.fileno()], exchange) as writer:
            writer.add_shards(regions, [rank.optimizer], readers)
            assert writer.write_for(60.0)
            parts = sorted((part.at, part.at + part.size) for part in writer.parts)
    edges = [0, *itertools.chain.from_iterable(parts), at]
    assert edges[::2] == edges[1::2], "each byte is written, and by one part"
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)


@pytest.mark.parametrize("block", [BLOCK, 4096])
def test_one_matrix_is_on_the_host_at_a_time(tmp_path: Path, block: int) -> None:
    """Also with many weights, and when the parts of blocks are written before the blocks."""
    rank, device = one_param(1 << 14), _Far()
    world = torch.rand(1 << 14)
    rank.states[rank.model.a]["param"] = world
    views = [matrix.t() for matrix in world.view(4, 64, 64)]
    written = _written(tmp_path / "file", device, rank, *views, block=block)
    assert torch.equal(written, torch.cat([view.reshape(-1) for view in views]))
    assert device.most == 64 * 64
    assert len(device.brought) <= 2 * len(views), "once for parts of blocks, and once for blocks"


def test_matrices_that_lie_in_each_other_are_brought_together(tmp_path: Path) -> None:
    """Each spans nearly all elements, and would copy them again."""
    rank, device = one_param(1 << 14), _Far()
    world = torch.rand(1 << 14)
    rank.states[rank.model.a]["param"] = world
    view = world.view(8, 32, 64).permute(2, 0, 1)
    assert torch.equal(_written(tmp_path / "file", device, rank, view, block=4096), view.reshape(-1))
    assert device.brought == [1 << 14]


def test_the_padding_between_params_is_zero_in_transposed_tensors_too(tmp_path: Path) -> None:
    rank, world = one_param(1 << 12), torch.rand(1 << 12)
    world[:64] = world[1000:1100] = world[-50:] = 0
    params = [(64, 1000), (1100, (1 << 12) - 50)]
    places = {torch.nn.Parameter(torch.empty(1)): place for place in params}
    rank.states.clear()
    for param, (begin, end) in places.items():
        rank.states[param] = dict.fromkeys(shards.KEYS, world[begin:end])
    named = {
        param: {"gbuf_local": types.SimpleNamespace(start=begin, end=end)}
        for param, (begin, end) in places.items()
    }
    rank.optimizer.gbuf_ranges = [{DTYPES: [{"param_map": named}]}]
    view = world.view(64, 64).t()
    assert torch.equal(_written(tmp_path / "file", Device(), rank, view), view.reshape(-1))

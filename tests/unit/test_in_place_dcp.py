"""A data file of torch.distributed.checkpoint, written jointly by its holders and loaded by torch."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from adaptor.checkpoint import (
    dcp,
    dcp_layout,
    file_parts,
    in_place,
    in_place_holder,
    manifest,
    publish,
    shards,
)
from adaptor.checkpoint.hashing import BLOCK, HashingFile
from adaptor.checkpoint.planned_tensors import CannotBePlanned, PlannedTensors, Source
from adaptor.checkpoint.shards import Exchange
from adaptor.errors import CheckpointError
from adaptor.protocol.naming import FileEntry
from tests.faults import sharded
from tests.unit.test_checkpoint_dump import Rank, together
from tests.unit.test_in_place import DTYPES, half, one_param, peak, same
from tests.unit.test_integrity import framework_checks

COUNT = 2


class PiecePlanner:
    """Saves pieces of tensors: for each key the full size, and the pieces by offset."""

    def __init__(
        self, tensors: Mapping[str, tuple[Sequence[int], dict[tuple[int, ...], Any]]], objects: Any
    ) -> None:
        self._data: dict[MetadataIndex, Any] = {}
        self._items = []
        for key, (size, pieces) in tensors.items():
            for offset, tensor in pieces.items():
                index = MetadataIndex(key, torch.Size(offset))
                chunk = ChunkStorageMetadata(torch.Size(offset), tensor.shape)
                about = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(size))
                self._add(WriteItem(index, WriteItemType.SHARD, tensor_data=about), tensor)
        for key, value in objects.items():
            torch.save(value, pickled := io.BytesIO())
            self._add(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), pickled)

    def _add(self, item: WriteItem, data: Any) -> None:
        self._items.append(item)
        self._data[item.index] = data

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, item: WriteItem) -> Any:
        return self._data[item.index]


def saved(world: Mapping[str, torch.Tensor], cast: Callable[[Any, torch.dtype], Any]) -> PiecePlanner:
    """Return the planner of one buffer's state, gathered or planned."""
    weights = cast(world["param"], torch.bfloat16)
    numel = weights.numel()
    rows = world["exp_avg"].view(-1, 64)
    first, second = torch.chunk(weights.view(2, -1), 2, 0)
    flat = {(0,): world["exp_avg_sq"][:100], (128,): world["exp_avg_sq"][128:]}
    # Between two params a framework fills a bucket with its own tensor.
    flat[(100,)] = torch.empty_like(flat[0,][:28])
    return PiecePlanner(
        {
            "gated": ((2, numel // 2), {(0, 0): first, (1, 0): second}),
            "rows": (rows.shape, {(0, 0): rows[:7], (7, 0): rows[7:]}),
            "optimizer.distributed.exp_avg_sq": ((numel,), dict(sorted(flat.items()))),
            "mask": ((3,), {(0,): torch.arange(9.0)[3:6]}),
            "bits": ((5,), {(0,): torch.tensor([True, False] * 4)[1:6]}),
            "none": ((0,), {(0,): torch.arange(9.0)[9:]}),
            "one": ((), {(): torch.arange(9.0)[7]}),
        },
        {"random states": {"seed": 7}, "empty": None},
    )


def ranks_of(numel: int) -> list[Rank]:
    """Return the holders of a state that is zero outside of the params."""
    ranks = [half(index, COUNT, numel) for index in range(COUNT)]
    (first,) = ranks[0].states.values()
    first["exp_avg_sq"][100:128] = 0
    return ranks


def world_of(ranks: Sequence[Rank]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([rank.states[rank.model.a][key] for rank in ranks]) for key in shards.KEYS}


def itself(value: Any) -> Any:
    return value


def in_both_ways(
    tmp_path: Path, ranks: Sequence[Rank], make_planner: Callable[..., PiecePlanner], *, verify: bool = False
) -> tuple[Path, Path]:
    """Return a checkpoint written in place by two holders, and one written by a rank with all shards.

    Args:
        tmp_path: the test's folder.
        ranks: the holders.
        make_planner: returns the planner for a state, a cast, and a function for pickled values.
        verify: write digests, as with the framework's `--verify-integrity`.
    """
    root = tmp_path / "iter_0000012_tmp"
    root.mkdir()

    def writer(group: Any) -> Any:
        exchange = Exchange(group, 0, [[0, 1]], folder=root)
        planned = PlannedTensors("meta")
        objects = dcp_layout.PlannedObjects(planned)
        world = planned.state_of(ranks[0].optimizer, 0)[0][DTYPES]
        with planned.follow_copies():
            part = dcp.RankPart(0, make_planner(world, planned.cast, objects.token_for))
            layout = dcp_layout.lay_out(part, planned, objects)
        small: dict[str, Callable[[Any], Any]] = {part.part_file: part.write_part}
        if verify:
            digest = dcp.sha256()
            layout.reader = digest.update
            small = dcp.with_integrity_part(small, 0, {part.data_file: digest.hexdigest})
        with in_place.InPlace({part.data_file: layout}, [ranks[0].optimizer], exchange, 1) as archives:
            assert archives.write()
            entries = archives.finish()
        return entries + _written(root, small)

    def holder(group: Any) -> Any:
        exchange = Exchange(group, 1, [[0, 1]], folder=root)
        return in_place_holder.take_part([ranks[1].optimizer], 0, exchange)

    written, gathers = together(tmp_path, [writer, holder])
    assert gathers is False, gathers
    assert not isinstance(written, Exception), written
    assert publish.publish(tmp_path, 12, written, {}, COUNT)
    own_folder = tmp_path / "iter_0000012"
    assert manifest.defects(own_folder) == []

    (gathered_tmp := tmp_path / "gathered/iter_0000012_tmp").mkdir(parents=True)
    part = dcp.RankPart(0, make_planner(world_of(ranks), torch.Tensor.to, itself))
    entries = _written(gathered_tmp, {part.data_file: part.write_data, part.part_file: part.write_part})
    publish.publish(gathered_tmp.parent, 12, entries, {}, COUNT)
    return own_folder, gathered_tmp.parent / "iter_0000012"


def _written(folder: Path, files: Mapping[str, Callable[[Any], Any]]) -> list[FileEntry]:
    entries = []
    for name, write in files.items():
        with HashingFile(folder / f"{name}.1") as file:
            write(file)
        entries.append(file.entry(name, 1))
    return entries


def assert_same(in_place: Mapping[str, Any], gathered: Mapping[str, Any]) -> None:
    assert list(in_place) == list(gathered)
    for key, value in gathered.items():
        assert same(in_place[key], value), key


def set_block(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    for module in (file_parts, in_place):
        monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr("adaptor.checkpoint.hashing.BLOCK", block)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("numel", "block"), [(1 << 12, BLOCK), (1 << 12, 64), (3 << 20, BLOCK)])
def test_torch_loads_the_same_values_as_from_a_gathered_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numel: int, block: int, verify: bool
) -> None:
    set_block(monkeypatch, block)
    folders = in_both_ways(tmp_path, ranks_of(numel), lambda *args: saved(*args[:2]), verify=verify)
    in_place, gathered = map(sharded.load, folders)
    gathered["optimizer.distributed.exp_avg_sq"][100:128] = 0  # torch.empty
    assert_same(in_place, gathered)
    if verify:
        assert framework_checks(folders[0]) == [".metadata", "__0_0.distcp"]


def test_a_byte_that_is_read_back_differently_fails_the_save(tmp_path: Path) -> None:
    """`--verify-integrity` reads the file once more: it must be as written."""
    rank = one_param(1 << 20)
    exchange = Exchange(None, 0, [[0]], folder=tmp_path)
    planned = PlannedTensors("meta")
    part = dcp.RankPart(0, saved(planned.state_of(rank.optimizer, 0)[0][DTYPES], planned.cast))
    layout = dcp_layout.lay_out(part, planned)
    layout.reader = dcp.sha256().update
    largest = max(layout.entries, key=lambda entry: entry.size)
    changed = -(-largest.begin // BLOCK) * BLOCK
    with in_place.InPlace({part.data_file: layout}, [rank.optimizer], exchange, 1) as archives:
        assert archives.write()
        with (tmp_path / f"{part.data_file}.1").open("r+b") as file:
            file.seek(changed + 5)
            file.write(b"?")
        with pytest.raises(CheckpointError, match=rf"1: other bytes are read at byte {changed} than were"):
            archives.finish()
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_saved_as_objects_are_written_in_place(tmp_path: Path) -> None:
    """As the framework saves the whole optimizer state (`dp_zero_gather_scatter`)."""

    def make_planner(world: Mapping[str, Any], cast: Any, saved_as: Callable[[Any], Any]) -> PiecePlanner:
        state = {
            "coalesced": True,
            0: {DTYPES: {key: world[key] for key in shards.KEYS} | {"numel": 1 << 12}},
        }
        part = [(world["param"][5:77].view(8, 9), torch.arange(3.0)), "text"]
        objects = {"state": [saved_as(state)], "part": [saved_as(part)], "other": [saved_as({"seed": 7})]}
        return PiecePlanner({}, objects)

    folders = in_both_ways(tmp_path, ranks_of(1 << 12), make_planner)
    in_place, gathered = map(sharded.load, folders)
    assert_same(in_place, gathered)
    (entry,) = [file for file in manifest.read(folders[0]).files if file.path == "__0_0.distcp"]
    assert entry.xxh3_128 is None, "no holder has the whole"


def test_frozen_tensors_are_not_copied(tmp_path: Path) -> None:
    """Parts of untrained tensors, which a framework saves by themselves, have 64 MB."""
    frozen = torch.full((2, 8 << 20), 0.5)
    exchange = Exchange(None, 0, [[0]], folder=tmp_path)
    planned = PlannedTensors("meta")
    planner = PiecePlanner({"gated": (frozen.shape, {(0, 0): frozen[:1], (1, 0): frozen[1:]})}, {})
    Path("/proc/self/clear_refs").write_text("5")
    peak_before = peak()
    part = dcp.RankPart(0, planner)
    layout = dcp_layout.lay_out(part, planned)
    with in_place.InPlace({part.data_file: layout}, [one_param(64).optimizer], exchange, 1) as archives:
        assert archives.write()
        (entry,) = archives.finish()
    assert peak() - peak_before < 32 << 20
    assert entry.bytes > frozen.nbytes
    with (tmp_path / entry.draft).open("rb") as file:
        (info,) = [entry for entry in layout.entries if entry.size == frozen.nbytes // 2][1:]
        file.seek(info.begin)
        assert file.read(info.size) == frozen[1].numpy().tobytes()


def test_writing_in_place_needs_no_memory_for_a_copy(tmp_path: Path) -> None:
    """The peak is reset first; the state has 96 MB, its copy with the weights would have 112 MB."""
    rank = one_param(8 << 20)
    exchange = Exchange(None, 0, [[0]], folder=tmp_path)
    Path("/proc/self/clear_refs").write_text("5")
    peak_before = peak()
    planned = PlannedTensors("meta")
    part = dcp.RankPart(0, saved(planned.state_of(rank.optimizer, 0)[0][DTYPES], planned.cast))
    layout = dcp_layout.lay_out(part, planned)
    with in_place.InPlace({part.data_file: layout}, [rank.optimizer], exchange, 1) as archives:
        assert archives.write()
        (entry,) = archives.finish()
    assert peak() - peak_before < 32 << 20
    assert entry.bytes > (2 + 4 + 4) * (8 << 20)  # the weights, and two of the states


@pytest.mark.parametrize("prefix", ["", "chained_0."])
def test_the_padding_of_a_bucket_is_known_for_each_optimizer_of_a_chain(prefix: str) -> None:
    planned = PlannedTensors("meta")
    world = planned.state_of(half(0, 1, 1 << 12).optimizer, 0)[0][DTYPES]["exp_avg"]
    pieces = {(0,): world[64:100], (36,): torch.empty_like(world[:28]), (64,): world[128:]}
    key = f"{prefix}optimizer.distributed.bucket_idx_1.exp_avg"
    part = dcp.RankPart(0, PiecePlanner({key: ((world.numel() - 64,), pieces)}, {}))
    sources = [entry.content for entry in dcp_layout.lay_out(part, planned).entries]
    ranges = [(source.begin, source.end) for source in sources if isinstance(source, Source)]
    assert ranges == [(64, 100), (100, 128), (128, world.numel())]


def _computed(world: Mapping[str, torch.Tensor]) -> PiecePlanner:
    return PiecePlanner({"a": (world["param"].shape, {(0,): world["param"] * 1})}, {})


def _turned(world: Mapping[str, torch.Tensor]) -> PiecePlanner:
    turned = world["param"].view(-1, 64).t()
    return PiecePlanner({"a": (turned.shape, {(0, 0): turned})}, {})


def _copied(world: Mapping[str, torch.Tensor]) -> PiecePlanner:
    turned = world["param"].view(-1, 64).t().contiguous()
    return PiecePlanner({"a": (turned.shape, {(0, 0): turned})}, {})


def _pickled(world: Mapping[str, torch.Tensor]) -> PiecePlanner:
    return PiecePlanner({}, {"a": [{"param": world["param"]}]})


def _of_two_buckets(world: Mapping[str, torch.Tensor]) -> PiecePlanner:
    param = world["param"]
    pieces = {(0,): param[:10], (10,): param[20:30], (20,): torch.empty_like(param[:5])}
    return PiecePlanner({"optimizer.distributed.a": ((25,), pieces)}, {})


@pytest.mark.parametrize("make_planner", [_computed, _turned, _copied, _pickled, _of_two_buckets])
def test_unknown_tensors_are_not_planned(make_planner: Callable[[Any], PiecePlanner]) -> None:
    planned = PlannedTensors("meta")
    world = planned.state_of(half(0, 1, 1 << 12).optimizer, 0)[0][DTYPES]
    with pytest.raises(CannotBePlanned):
        dcp_layout.lay_out(dcp.RankPart(0, make_planner(world)), planned)


def test_a_holder_sends_its_shards_where_nothing_can_be_laid_out(tmp_path: Path) -> None:
    ranks = ranks_of(1 << 12)

    def writer(group: Any) -> Any:
        exchange = Exchange(group, 0, [[0, 1]], folder=tmp_path)
        in_place.decline(exchange)
        return shards.gather(ranks[0].optimizer, 0, exchange), shards.acknowledge(
            [ranks[0].optimizer], 0, exchange
        )

    def holder(group: Any) -> Any:
        exchange = Exchange(group, 1, [[0, 1]], folder=tmp_path)
        gathers = in_place_holder.take_part([ranks[1].optimizer], 0, exchange)
        shards.send_shards([ranks[1].optimizer], 0, exchange)
        return gathers

    (state, _), gathers = together(tmp_path, [writer, holder])
    assert gathers is True
    for key, full in world_of(ranks).items():
        assert torch.equal(state[0][DTYPES][key], full)

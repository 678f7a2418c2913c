"""Parts of a torch.distributed.checkpoint: each written alone, joined by the publisher."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from adaptor.checkpoint import manifest, publish, tracker
from adaptor.checkpoint.dcp import METADATA, RankPart
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import CheckpointError
from adaptor.protocol.naming import FileEntry
from tests.faults import sharded

WHOLE = torch.arange(12, dtype=torch.float32).reshape(4, 3)


class Marked(SavePlan):
    """A framework's own kind of plan."""

    mcore_data: dict[str, Any]


@dataclass
class RowsPlanner:
    """The planner of a rank with some rows of WHOLE, as a view, and an object of its own."""

    rank: int
    rows: slice

    def create_local_plan(self) -> SavePlan:
        start, end, _ = self.rows.indices(len(WHOLE))
        offsets = torch.Size([start, 0])
        tensor = WriteItem(
            MetadataIndex("weight", offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, torch.Size([end - start, 3])),
                TensorProperties.create_from_tensor(WHOLE),
                WHOLE.shape,
            ),
        )
        plan = Marked([tensor, WriteItem(MetadataIndex(f"states/{self.rank}"), WriteItemType.BYTE_IO)])
        object.__setattr__(plan, "mcore_data", {f"of {self.rank}": {}})
        return plan

    def resolve_data(self, item: WriteItem) -> Any:
        if item.type == WriteItemType.SHARD:
            return WHOLE[self.rows]
        content = io.BytesIO()
        torch.save({"rank": self.rank}, content)
        return content


def write(folder: Path, parts: list[RowsPlanner], attempt: int = 1, prefix: str = "") -> list[FileEntry]:
    entries = []
    for planner in parts:
        part = RankPart(planner.rank, planner)
        assert part.has_data
        for name, act in ((part.data_file, part.write_data), (part.part_file, part.write_part)):
            with HashingFile(folder / f"{prefix}{name}.{attempt}", base_folder=folder) as file:
                act(file)
            entries.append(file.entry(f"{prefix}{name}", attempt))
    return entries


HALVES = [RowsPlanner(10, slice(2, 4)), RowsPlanner(2, slice(2))]


def test_parts_make_a_checkpoint_that_torch_loads(tmp_path: Path) -> None:
    folder = publish.prepare(tmp_path, 3)
    write(folder, HALVES, attempt=1)  # abandoned
    entries = write(folder, HALVES, attempt=2)
    assert publish.publish(tmp_path, 3, entries, {}, 11)
    final = tmp_path / "iter_0000003"
    names = [".metadata", "__10_0.distcp", "__2_0.distcp"]
    assert [entry.path for entry in manifest.read(final).files] == names
    assert sorted(path.name for path in final.iterdir()) == sorted([*names, "ttp_manifest.json"])
    assert manifest.defects(final) == []
    loaded = sharded.load(final)
    assert torch.equal(loaded["weight"], WHOLE)
    assert (loaded["states/2"], loaded["states/10"]) == ({"rank": 2}, {"rank": 10})
    metadata = FileSystemReader(final).read_metadata()
    assert metadata.mcore_data == {"of 2": {}, "of 10": {}}
    # Only the view's part of the memory is written.
    assert (final / "__2_0.distcp").stat().st_size == (final / "__10_0.distcp").stat().st_size


def test_parts_in_a_folder_below_make_a_checkpoint_there(tmp_path: Path) -> None:
    folder = publish.prepare(tmp_path, 3)
    outer, inner = (
        write(folder, [RowsPlanner(0, slice(4))], prefix="a/"),
        write(folder, HALVES, prefix="a/b/"),
    )
    assert publish.publish(tmp_path, 3, [*outer, *inner], {}, 11)
    final = tmp_path / "iter_0000003"
    assert manifest.defects(final) == []
    assert {path.name for path in (final / "a/b").iterdir()} == {METADATA, "__10_0.distcp", "__2_0.distcp"}
    for inside in ("a", "a/b"):
        assert torch.equal(sharded.load(final / inside)["weight"], WHOLE)


def test_a_hole_is_found_before_anything_is_named(tmp_path: Path) -> None:
    entries = write(publish.prepare(tmp_path, 3), [RowsPlanner(0, slice(1)), RowsPlanner(1, slice(2, 4))])
    with pytest.raises(CheckpointError, match="iter_0000003_tmp: the parts do not make a whole"):
        publish.publish(tmp_path, 3, entries, {}, 2)
    assert not (tmp_path / "iter_0000003").exists()


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a part that nobody reported was read",)


def test_only_reported_parts_are_read(tmp_path: Path) -> None:
    folder = publish.prepare(tmp_path, 3)
    entries = write(folder, HALVES)
    trap = pickle.dumps(Trap())
    (folder / entries[1].draft).write_bytes(trap)
    with pytest.raises(CheckpointError, match=r"\.metadata\.10\.1: .* bytes, the manifest says"):
        publish.publish(tmp_path, 3, entries, {}, 2)
    same_size = replace(entries[1], bytes=len(trap))
    with pytest.raises(CheckpointError, match=r"\.metadata\.10\.1: checksum differs"):
        publish.publish(tmp_path, 3, [entries[0], same_size, *entries[2:]], {}, 2)
    (folder / entries[1].draft).unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata\.10\.1: missing: it was reported as written"):
        publish.publish(tmp_path, 3, entries, {}, 2)


@pytest.mark.parametrize("last", ["_drop_others", "move_in", "_tell_tracker"])
def test_publishing_again_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """The parts are gone by then, and the joined files are not made again."""
    entries = write(publish.prepare(tmp_path, 3), HALVES)
    real = getattr(publish, last)

    def crashes(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, last, crashes)
    with pytest.raises(KeyboardInterrupt):
        publish.publish(tmp_path, 3, entries, {}, 2)
    monkeypatch.undo()
    publish.publish(tmp_path, 3, entries, {}, 2)
    final = tmp_path / "iter_0000003"
    assert manifest.defects(final) == []
    assert (final / METADATA).exists()
    assert torch.equal(sharded.load(final)["weight"], WHOLE)
    assert tracker.tracked_step(tmp_path) == 3

"""Only files that the check before a load has read are mapped; the framework gets the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from adaptor import context, patches, patching
from adaptor.checkpoint import hashing, publish, resume_check, tracker
from adaptor.checkpoint.divided_reading import CheckedFiles
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry

pytestmark = pytest.mark.usefixtures("group_of_one", "_patched")

NAME = "mp_rank_00/distrib_optim.pt"
OLDER, NEWER = 1, 2
LARGE = 1 << 19  # elements, 2 MiB: the smallest mapped size


@pytest.fixture(scope="module")
def _patched() -> Iterator[None]:
    patches.load("worker")
    patching.arm("worker")
    yield
    patching.disarm("worker")


@pytest.fixture(autouse=True)
def _loading() -> Iterator[None]:
    with context.part(CheckedFiles).loading():
        yield


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    large = torch.rand(2 * LARGE, generator=generator)
    return {
        "large": large[:LARGE],
        "its-storage-again": large[LARGE:].view(2, -1),
        "bfloat16": torch.rand(LARGE, generator=generator).to(torch.bfloat16),
        "small": torch.rand(7, generator=generator),
        "step": step,
    }


def save_torch(folder: Path, step: int) -> list[str]:
    (folder / NAME).parent.mkdir()
    torch.save(state(step), folder / NAME)
    return [NAME]


def save_torch_dist(folder: Path, step: int) -> list[str]:
    dcp.save(state(step), checkpoint_id=folder)
    return sorted(path.name for path in folder.iterdir())


def add(root: Path, step: int, save: Callable[[Path, int], list[str]], *, hashed: bool = True) -> Path:
    folder = publish.prepare(root, step)
    entries = [hashing.entry_of(folder / name, name) for name in save(folder, step)]
    if not hashed:
        entries = [FileEntry(entry.path, entry.bytes, None) for entry in entries]
    publish.publish(root, step, entries, {}, 1)
    return root / naming.final_name(step)


def load(folder: Path) -> dict[str, Any]:
    """Load as frameworks do: `torch_dist` into existing tensors."""
    if (folder / NAME).exists():
        return torch.load(folder / NAME, map_location="cpu")
    loaded = {key: value * 0 for key, value in state(0).items()}
    dcp.load(loaded, checkpoint_id=folder)
    return loaded


def assert_same(loaded: dict[str, Any], step: int) -> None:
    expected = state(step)
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value


def mapped() -> set[str]:
    """Return the names of checkpoint files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split("iter_", 1)[1] for line in lines if "iter_" in line}


class Planner(dcp.DefaultLoadPlanner):
    """Records the mapped files while a tensor is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped: set[str] = set()

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.mapped |= mapped()


def test_a_file_that_was_checked_is_mapped(tmp_path: Path) -> None:
    folder = add(tmp_path, NEWER, save_torch)
    resume_check.require_intact(tmp_path, tmp_path)
    loaded = load(folder)
    assert mapped() == {f"{NEWER:07}/{NAME}"}
    assert_same(loaded, NEWER)


def test_tensors_of_torch_dist_are_mapped_until_they_are_copied(tmp_path: Path) -> None:
    folder = add(tmp_path, NEWER, save_torch_dist)
    resume_check.require_intact(tmp_path, tmp_path)
    loaded, planner = {key: value * 0 for key, value in state(0).items()}, Planner()
    dcp.load(loaded, checkpoint_id=folder, planner=planner)
    assert planner.mapped == {f"{NEWER:07}/__0_0.distcp"}
    assert mapped() == set()
    assert_same(loaded, NEWER)


@pytest.mark.parametrize("save", [save_torch, save_torch_dist])
def test_writing_to_a_tensor_does_not_change_the_file(
    tmp_path: Path, save: Callable[[Path, int], list[str]]
) -> None:
    folder = add(tmp_path, NEWER, save)
    resume_check.require_intact(tmp_path, tmp_path)
    loaded = load(folder)
    loaded["large"].add_(1)
    loaded["its-storage-again"].zero_()
    resume_check.require_intact(tmp_path, tmp_path)  # otherwise it would go back, and find no step
    assert_same(load(folder), NEWER)


def test_tensors_outlive_their_file(tmp_path: Path) -> None:
    folder = add(tmp_path, NEWER, save_torch)
    resume_check.require_intact(tmp_path, tmp_path)
    loaded = load(folder)
    (folder / NAME).unlink()
    assert_same(loaded, NEWER)


def test_a_small_tensor_keeps_no_file(tmp_path: Path) -> None:
    folder = add(tmp_path, NEWER, save_torch)
    resume_check.require_intact(tmp_path, tmp_path)
    small = load(folder)["small"]
    assert mapped() == set()
    assert torch.equal(small, state(NEWER)["small"])


def test_a_file_checked_only_by_size_is_not_mapped(tmp_path: Path) -> None:
    folder = add(tmp_path, NEWER, save_torch, hashed=False)
    resume_check.require_intact(tmp_path, tmp_path)
    assert_same(load(folder), NEWER)
    loaded = load(folder)
    assert mapped() == set()
    assert_same(loaded, NEWER)


def test_a_file_that_was_not_checked_is_not_mapped(tmp_path: Path) -> None:
    older, newer = (add(tmp_path, step, save_torch) for step in (OLDER, NEWER))
    with context.part(CheckedFiles).loading():
        resume_check.require_intact(tmp_path, tmp_path)
        loaded = load(older)
        assert mapped() == set()
        assert_same(loaded, OLDER)
    loaded = load(newer)  # the load has ended
    assert mapped() == set()
    assert_same(loaded, NEWER)


@pytest.mark.parametrize("save", [save_torch, save_torch_dist])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_the_older_checkpoint_is_mapped_if_the_newer_is_damaged(
    tmp_path: Path, save: Callable[[Path, int], list[str]], damage: str
) -> None:
    older, newer = (add(tmp_path, step, save) for step in (OLDER, NEWER))
    large = max(newer.rglob("*.*"), key=lambda path: path.stat().st_size)
    content = bytearray(large.read_bytes())
    content[len(content) // 2] ^= 1
    large.write_bytes(content if damage == "flipped" else content[:-1])
    resume_check.require_intact(tmp_path, tmp_path)
    assert tracker.tracked_step(tmp_path) == OLDER
    loaded = load(older)
    assert mapped() <= {f"{OLDER:07}/{NAME}"}
    assert_same(loaded, OLDER)


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add(tmp_path, NEWER, save_torch)
    resume_check.require_intact(tmp_path, tmp_path)

    def refuse(*arguments: object) -> None:
        raise RuntimeError("unable to mmap 6292480 bytes from file: No such device (19)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    loaded = load(folder)
    assert mapped() == set()
    assert_same(loaded, NEWER)

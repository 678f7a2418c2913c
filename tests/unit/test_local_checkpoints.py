"""The uploader's view of the save folder; it lists the folder only after a change."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptor.checkpoint import regular_folder
from adaptor.protocol import naming
from adaptor.store.local_checkpoints import RELIST_S, SETTLED_S, SeenCheckpoints

_LISTED: list[Path] = []


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if event in ("os.listdir", "os.scandir") and isinstance(args[0], str | Path):
        _LISTED.append(Path(args[0]))


# An audit hook cannot be removed; it only appends.
sys.addaudithook(_heard)


class Looks:
    """An uploader that looks once a second."""

    def __init__(self, root: Path) -> None:
        self.now = 100.0
        self._root = root
        self._seen = SeenCheckpoints(root, lambda: self.now)

    def end(self) -> None:
        self._seen.look_anew()

    def look(self) -> tuple[list[int], int]:
        """Return the listed steps, and how often the folder was listed."""
        self.now += 1
        _LISTED.clear()
        steps = [checkpoint.step for checkpoint in self._seen.now()]
        return steps, _LISTED.count(self._root)


@contextlib.contextmanager
def set_clock(root: Path, visible_fields: Callable[[os.stat_result], tuple[int, ...]]) -> Iterator[None]:
    """Restrict the folder's stat to the fields of `visible_fields`."""
    fstat = os.fstat

    def stat(descriptor: int) -> Any:
        state = fstat(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").readlink() != root:
            return state
        device, time = visible_fields(state)
        return SimpleNamespace(st_dev=device, st_ino=1, st_mtime_ns=time, st_ctime_ns=time)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", stat)
        yield


def save(root: Path, step: int, generation: str = "0f3a5c21") -> None:
    saving = root / naming.regular_name(step, generation)
    saving.mkdir(parents=True)
    (saving / "shard.pt").write_bytes(b"x")
    regular_folder.publish_regular(root, step, generation)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "save"
    _LISTED.clear()


def test_a_folder_that_does_not_change_is_not_listed(root: Path) -> None:
    looks = Looks(root)
    assert looks.look() == ([], 0)
    save(root, 10)
    first, rare = round(SETTLED_S) + 1, round(RELIST_S)
    looked = [looks.look() for _ in range(first + 3 * rare)]
    assert looked == [([10], 1)] * first + ([([10], 0)] * (rare - 1) + [([10], 1)]) * 3
    save(root, 20)
    assert looks.look() == ([10, 20], 1)


def test_a_change_within_the_resolution_of_the_time_is_seen(root: Path) -> None:
    """The file system's times have a resolution of 2 s."""
    looks = Looks(root)
    save(root, 10)
    with set_clock(root, lambda state: (state.st_dev, 7)):
        assert looks.look()[0] == [10]
        save(root, 20)
        assert looks.look() == ([10, 20], 1)


def test_a_copy_that_sets_the_time_of_the_folder_is_seen(root: Path) -> None:
    """rsync -a gives the folder the time of its source, so the folder's time is unchanged."""
    looks = Looks(root)
    save(root, 10)
    state = root.stat()
    for _ in range(10):
        looks.look()
    save(root, 20)
    os.utime(root, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert looks.look() == ([10, 20], 1)


def test_a_client_that_answers_from_a_cache_is_asked_by_an_open(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client asks the server on opening a folder; a stat may be a minute old."""
    looks = Looks(root)
    save(root, 10)
    cached = root.stat()
    for _ in range(10):
        looks.look()
    save(root, 20)
    stat = os.stat

    def of_cache(path: Any, **options: Any) -> os.stat_result:
        return cached if path == root else stat(path, **options)

    monkeypatch.setattr(os, "stat", of_cache)
    assert root.stat() is cached
    assert looks.look() == ([10, 20], 1)


@pytest.mark.parametrize("moment", ["after a while", "at the end of the job"])
def test_a_file_system_that_knows_no_time_of_a_folder(root: Path, moment: str) -> None:
    """In a mounted bucket all folders have the same time."""
    uploader = Looks(root)
    save(root, 10)
    with set_clock(root, lambda state: (0, 0)):
        for _ in range(10):
            assert uploader.look()[0] == [10]
        save(root, 20)
        if moment == "at the end of the job":
            uploader.end()
            assert uploader.look() == ([10, 20], 1)
        else:
            assert [10, 20] in [uploader.look()[0] for _ in range(round(RELIST_S))]


def test_a_copied_checkpoint_is_seen_once_it_has_its_manifest(root: Path, tmp_path: Path) -> None:
    looks = Looks(root)
    save(root, 10)
    save(tmp_path / "other", 20)
    source = tmp_path / "other" / naming.final_name(20)
    copied = root / naming.final_name(20)
    copied.mkdir()
    for _ in range(10):
        assert looks.look()[0] == [10]
    (copied / naming.MANIFEST).write_bytes((source / naming.MANIFEST).read_bytes())
    assert [10, 20] in [looks.look()[0] for _ in range(round(RELIST_S))]


def test_a_step_that_is_saved_again_is_seen_as_another_one(root: Path) -> None:
    seen_checkpoints = SeenCheckpoints(root, iter(range(0, 1000, 10)).__next__)
    save(root, 10)
    (first,) = [checkpoint for _ in range(3) for checkpoint in seen_checkpoints.now()][-1:]
    save(root, 10, "a1b2c3d4")
    (second,) = seen_checkpoints.now()
    assert first.place != second.place


def test_steps_after_the_tracker_step_are_left_out(root: Path) -> None:
    for step in (10, 20, 30):
        save(root, step)
    (root / naming.TRACKER).write_text("10")
    looks = Looks(root)
    assert looks.look()[0] == [10]
    (root / naming.TRACKER).write_text("25")
    save(root, 20, "a1b2c3d4")
    save(root, 25, "a1b2c3d4")
    assert looks.look()[0] == [10, 20, 25]
    assert Looks(root).look()[0] == [10, 20, 25]


def test_a_step_that_the_tracker_does_not_name_yet_is_seen(root: Path) -> None:
    """The folder gets its final name before the tracker; the observer started in between."""
    for step in (10, 20):
        save(root, step)
    path = root / naming.TRACKER
    path.write_text("10")
    newer = (root / naming.final_name(20) / naming.MANIFEST).stat().st_mtime_ns
    os.utime(path, ns=(newer - 10**9, newer - 10**9))
    assert Looks(root).look()[0] == [10, 20]


def test_an_unreadable_manifest_is_read_again(root: Path) -> None:
    looks = Looks(root)
    save(root, 10)
    path = root / naming.final_name(10) / naming.MANIFEST
    text = path.read_bytes()
    path.write_bytes(b"{")
    assert [looks.look()[1] for _ in range(8)] == [1] * 8
    path.write_bytes(text)
    for _ in range(2):
        looks.look()
    assert looks.look() == ([10], 0)

"""What an uploader sees of the save folder: it lists the folder only where that has changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptor.checkpoint import regular_folder
from adaptor.protocol import naming
from adaptor.store.seen_checkpoints import SETTLED_S, SeenCheckpoints

_LISTED: list[Path] = []


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if event in ("os.listdir", "os.scandir") and isinstance(args[0], str | Path):
        _LISTED.append(Path(args[0]))


# It cannot be removed, and costs an append.
sys.addaudithook(_heard)


class Looks:
    """An uploader that looks each second."""

    def __init__(self, root: Path) -> None:
        self.now = 100.0
        self._root = root
        self._seen = SeenCheckpoints(root, lambda: self.now)

    def look(self) -> tuple[list[int], int]:
        """Return the steps that are seen, and how often the folder was listed for that."""
        self.now += 1
        _LISTED.clear()
        steps = [one.step for one in self._seen.now()]
        return steps, _LISTED.count(self._root)


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
    assert [looks.look() for _ in range(100)] == [([10], 1)] * (round(SETTLED_S) + 1) + [([10], 0)] * (
        99 - round(SETTLED_S)
    )
    save(root, 20)
    assert looks.look() == ([10, 20], 1)


def test_a_change_within_the_resolution_of_the_time_is_seen(root: Path) -> None:
    """The file system tells no two times within 2 s apart."""
    looks = Looks(root)
    save(root, 10)
    state = root.stat()
    assert looks.look()[0] == [10]
    save(root, 20)
    os.utime(root, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert looks.look() == ([10, 20], 1)


def test_a_step_that_is_saved_again_is_seen_as_another_one(root: Path) -> None:
    seen = SeenCheckpoints(root, iter(range(0, 1000, 10)).__next__)
    save(root, 10)
    (first,) = [one for _ in range(3) for one in seen.now()][-1:]
    save(root, 10, "a1b2c3d4")
    (second,) = seen.now()
    assert first.place != second.place


def test_what_cannot_be_read_is_read_again(root: Path) -> None:
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

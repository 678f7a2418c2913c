"""An agent's jobs on the save folder, where the disk hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptor.checkpoint import publish
from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.messages import Prepare, Prepared, Publish, Published
from adaptor.errors import CheckpointError
from adaptor.launchers import filing
from adaptor.launchers.filing import Filing
from tests.unit.threads import LONG_S


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hangs until it is set."""
    goes_on = threading.Event()

    def hang(*args: object) -> None:
        goes_on.wait(LONG_S)

    monkeypatch.setattr(publish, "clean", hang)
    monkeypatch.setattr(filing, "CLEAN_S", 0.01)
    yield goes_on
    goes_on.set()


def test_nobody_waits_for_a_disk_that_hangs(disk: threading.Event, tmp_path: Path) -> None:
    async def clean() -> None:
        works, before = Filing(), set(threading.enumerate())
        await works.clean(tmp_path, 0, "")
        assert works.busy, "nothing may be removed under it"
        (thread,) = [one for one in {*threading.enumerate()} - before if one.name == "ttp-filing"]
        assert thread.daemon, "it must not keep ttprun from its end"
        disk.set()
        while works.busy:  # until the loop has heard of it
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(clean(), LONG_S))


def test_what_the_disk_refuses_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save = str(tmp_path / "file" / "save")

    async def work() -> None:
        works = Filing()
        answer = await works.do(Prepare(1, save, 5, number=2), "")
        assert isinstance(answer, Prepared)
        assert (answer.folder, answer.number) == ("", 2)
        assert "Not a directory" in answer.reason
        assert not works.busy

    asyncio.run(work())


def test_how_far_a_publish_is_is_known(tmp_path: Path) -> None:
    """Thousands of files take a slow disk longer than anyone waits for one that hangs."""
    folder = publish.prepare(tmp_path, 5, generation="mine")
    entries = tuple(FileEntry(f"{name}.pt", 1, None, 1) for name in "abc")
    for entry in entries:
        (folder / entry.draft).write_bytes(b"x")

    async def work() -> None:
        works = Filing()
        answer = await works.do(Publish(1, str(tmp_path), 5, entries, {}, 2), "mine")
        assert answer == Published(1, 5, str(tmp_path))
        assert works.moved == len(entries)

    asyncio.run(work())


def test_an_error_reaches_who_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object) -> None:
        raise CheckpointError("no")

    monkeypatch.setattr(publish, "clean", refuse)
    with pytest.raises(CheckpointError, match="no"):
        asyncio.run(Filing().clean(tmp_path, 0, ""))

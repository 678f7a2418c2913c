"""Blocks that are written past the page cache, to real files."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptor.checkpoint import linux_calls
from adaptor.checkpoint.page_cache import DirectWriter
from tests.waiting import LONG_S

BLOCK = 64 << 10
COUNT = 40  # more than are on their way at the same time


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, COUNT * BLOCK)
    yield descriptor
    os.close(descriptor)


def _blocks() -> list[bytes]:
    return [random.Random(number).randbytes(BLOCK) for number in range(COUNT)]


def _write(file: int, blocks: list[bytes], shift: int = 0) -> list[bool]:
    with DirectWriter([file], BLOCK) as writer:
        taken = [
            writer.take(0, memoryview(block), number * BLOCK + shift) for number, block in enumerate(blocks)
        ]
        writer.settle()
        for number, block in enumerate(blocks):
            if not taken[number]:
                os.pwrite(file, block, number * BLOCK + shift)
    return taken


def test_what_is_taken_is_in_the_file(file: int) -> None:
    blocks = _blocks()
    taken = _write(file, blocks)
    assert set(taken) == {linux_calls.is_on_own_disk(file)}
    assert os.pread(file, COUNT * BLOCK, 0) == b"".join(blocks)


def test_a_disk_that_asks_for_larger_units_gets_it_through_the_cache(file: int) -> None:
    """As for a place that is no multiple of its unit: it says EINVAL to both."""
    blocks = _blocks()
    _write(file, blocks, shift=100)
    assert os.pread(file, COUNT * BLOCK, 100) == b"".join(blocks)


def test_memory_has_no_disk_to_write_to() -> None:
    descriptor = os.memfd_create("file")
    try:
        assert not linux_calls.is_on_own_disk(descriptor)
        assert not any(_write(descriptor, _blocks()))
    finally:
        os.close(descriptor)


def test_without_threads_nothing_is_taken(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not any(_write(file, _blocks()))


def test_whatever_ends_a_write_is_raised_where_its_block_is_waited_for(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, data: memoryview, at: int) -> int:
        raise MemoryError("no page")

    if not linux_calls.is_on_own_disk(file):
        pytest.skip("nothing is taken there")
    monkeypatch.setattr(os, "pwrite", refuse)
    with DirectWriter([file], BLOCK) as writer:
        assert writer.take(0, memoryview(_blocks()[0]), 0)
        with pytest.raises(MemoryError, match="no page"):
            writer.settle()


def test_it_leaves_no_descriptor_and_no_thread(file: int) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    _write(file, _blocks())
    assert set(Path("/proc/self/fd").iterdir()) == before
    for thread in threading.enumerate():
        if thread.name == "ttp-write":
            thread.join(LONG_S)  # it has been told
            assert not thread.is_alive()


_LIMITED = """
import os, resource, sys
from adaptor.checkpoint.page_cache import DirectWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * {block}, 2 * {block}))
file = os.open(sys.argv[1], os.O_RDWR)
with DirectWriter([file], {block}) as writer:
    try:
        for number in range({count}):
            if not writer.take(0, memoryview(bytes({block})), number * {block}):
                os.pwrite(file, bytes({block}), number * {block})
        writer.settle()
    except OSError as error:
        sys.exit(error.errno)
"""


def test_what_the_disk_refuses_is_told(file: int, tmp_path: Path) -> None:
    script = _LIMITED.format(block=BLOCK, count=COUNT)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], check=False)
    assert done.returncode == errno.EFBIG

"""Blocks that are written past the page cache, to real files."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptor.checkpoint import disk, hashing, page_cache, publish
from adaptor.checkpoint.page_cache import DirectWriter
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from tests.unit.launching import ONE, Launcher, launcher, zygote
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


def test_written_blocks_are_in_the_file(file: int) -> None:
    blocks = _blocks()
    taken = _write(file, blocks)
    assert set(taken) == {disk.is_on_own_disk(file)}
    assert os.pread(file, COUNT * BLOCK, 0) == b"".join(blocks)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_blocks_begin_at_a_huge_page(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    if refuses:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # no advice that a kernel knows
    memory = page_cache.huge_pages(4 * BLOCK)
    memory[:] = bytes(range(256)) * (BLOCK // 64)
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 << 20) == 0
    assert len(memory) == 4 * BLOCK


def test_a_disk_that_asks_for_larger_units_gets_it_through_the_cache(file: int) -> None:
    """The disk answers EINVAL, as for an offset that is no multiple of its unit."""
    blocks = _blocks()
    _write(file, blocks, shift=100)
    assert os.pread(file, COUNT * BLOCK, 100) == b"".join(blocks)


def test_memory_has_no_disk_to_write_to() -> None:
    descriptor = os.memfd_create("file")
    try:
        assert not disk.is_on_own_disk(descriptor)
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

    if not disk.is_on_own_disk(file):
        pytest.skip("nothing is taken there")
    monkeypatch.setattr(os, "pwrite", refuse)
    with DirectWriter([file], BLOCK) as writer:
        assert writer.take(0, memoryview(_blocks()[0]), 0)
        with pytest.raises(MemoryError, match="no page"):
            writer.settle()


def test_it_leaves_no_descriptor_and_no_thread(file: int) -> None:
    descriptors_before = set(Path("/proc/self/fd").iterdir())
    _write(file, _blocks())
    assert set(Path("/proc/self/fd").iterdir()) == descriptors_before
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


def test_an_error_of_the_disk_is_raised(file: int, tmp_path: Path) -> None:
    script = _LIMITED.format(block=BLOCK, count=COUNT)
    completed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], check=False)
    assert completed.returncode == errno.EFBIG


__all__ = ["launcher", "zygote"]

SIZE = 24 << 20  # more than the system reads for one request


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Make one whose files are not in memory."""
    folder = publish.prepare(tmp_path, 5)
    path = folder / "data.pt"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    disk.sync(path)
    publish.publish(tmp_path, 5, [hashing.entry_of(path, path.name)], {}, 1)
    descriptor = os.open(tmp_path / naming.final_name(5) / "data.pt", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return tmp_path / naming.final_name(5)


def _read_from_disk() -> int:
    """Return the bytes read from the disk for the thread, as the kernel counts them."""
    lines = Path(f"/proc/self/task/{threading.get_native_id()}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_all_of_it_is_read_once_where_the_disk_is_the_machines_own(checkpoint: Path) -> None:
    descriptor = os.open(checkpoint, os.O_RDONLY)
    expected = SIZE if disk.is_on_own_disk(descriptor) else 0
    os.close(descriptor)
    bytes_before = _read_from_disk()
    assert page_cache.read_ahead(checkpoint, SIZE) == expected
    assert _read_from_disk() - bytes_before >= expected
    bytes_before = _read_from_disk()
    (checkpoint / "data.pt").read_bytes()
    assert not expected or _read_from_disk() - bytes_before < SIZE // 10


def test_nothing_is_read_of_one_that_is_too_large(checkpoint: Path) -> None:
    bytes_before = _read_from_disk()
    assert page_cache.read_ahead(checkpoint, SIZE - 1) == 0
    assert _read_from_disk() - bytes_before < SIZE // 10


def test_a_missing_folder_is_raised_to_the_caller_and_stops_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError):
        page_cache.read_ahead(tmp_path / "missing", SIZE)
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    page_cache.begin_read_ahead(tmp_path / "missing")
    for thread in threading.enumerate():
        if thread.name == "ttp-read-ahead":
            thread.join()
    assert raised == []


# In ttprun's process: the files of checkpoints that it opens.
HEARS_OPENS = """
import os, sys
heard = os.open("opened", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def hear(event, arguments):
    if event == "open" and "/iter_" in str(arguments[0]):
        os.write(heard, f"{arguments[0]}\\n".encode())
sys.addaudithook(hear)
"""
# It fails in step 2, after step 1 was saved. When it starts again it loads when the file has been asked for.
SCRIPT = """
import os
from pathlib import Path
from adaptor.checkpoint import tracker
from adaptor.protocol.messages import Share
from adaptor.worker import runtime
from tests import waiting
from tests.unit.trainee import CountingTrainee, Loop
here, opened = Path.cwd(), Path("opened")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    waiting.until(lambda: "/iter_0000001/g.txt" in opened.read_text(), "ttprun reads what will be loaded")
step = tracker.tracked_step(here) or 0
loop = Loop(runtime.get().session, CountingTrainee(str(here), (Share("g", 0, 1),)))
loop.begin(step)
loop.step(step + 1)
if step == 0:
    raise ValueError("in step 2")
"""


@pytest.mark.parametrize("restarts", [1, 0])
def test_ttprun_reads_the_checkpoint_of_a_restart_ahead(restarts: int, launcher: Launcher) -> None:
    """ttprun reads while its workers start, and reads nothing if the job ends."""
    options = (*ONE, "--max-restarts", str(restarts))
    result = launcher.run(*options, launcher.script(SCRIPT), prelude=HEARS_OPENS, code=1 - restarts)
    assert "step 1 is saved" in result.log
    opened = (launcher.folder / "opened").read_text().splitlines()
    checkpoint = launcher.folder / naming.final_name(1)
    manifest = str(checkpoint / naming.MANIFEST)  # read by the publish, too, for further trackers
    expected = [manifest, *([manifest, str(checkpoint / "g.txt")] if restarts else [])]
    assert [path for path in opened if Path(path).parent == checkpoint] == expected

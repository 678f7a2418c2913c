"""Writes past the page cache, and reads ahead into it.

In the page cache each page of a file costs a new page of memory, a copy, and CPU time of the kernel's
writeback thread. A direct write (`DirectWriter`) takes its data from one of a few buffers, which are used
again and again, while the caller makes the next blocks. Only file systems on disks of this machine are
written to in this way: a shared file system gathers small requests in its cache, and has to inform other
machines. Otherwise, and without threads or memory, `take` returns False, and the caller writes.

So a restart has to read last words from the disk. While its workers import their modules, the disk is idle,
and the kernel reads ahead (`begin_read_ahead`). Reading ahead is a hint: the load reads the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from adaptor import host_memory
from adaptor.checkpoint import disk, manifest

# Two requests are at the disk, and two blocks wait or are being made.
_THREADS = 2
_SLOTS = 4
# Of memory, and of the place and the size in the file; disks require 512 or 4,096 bytes.
_ALIGNMENT = 4096
_HUGE = 2 << 20  # bytes of a huge page


def huge_pages(count: int) -> memoryview:
    """Return `count` bytes of memory, in huge pages where the system has some.

    A direct write finds and holds each page of its data: with small pages that is half of its CPU time.
    """
    memory = mmap.mmap(-1, count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE
    return memoryview(memory)[begin : begin + count]


class DirectWriter:
    """Writes blocks of files in threads; a context manager, after whose end no write is under way."""

    def __init__(self, files: Sequence[int], block: int) -> None:
        self._files = files
        self._block = block
        self._direct: dict[int, int | None] = {}  # by the number of the file; None without direct writes
        self._jobs: queue.SimpleQueue[tuple[int, int, memoryview, int] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[memoryview, Exception | None]] = queue.SimpleQueue()
        self._slots: list[memoryview] = []
        self._at_work = 0
        self._threads: list[threading.Thread] = []
        self._is_able = block % _ALIGNMENT == 0

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, *_ended: object) -> None:
        while self._at_work:
            with contextlib.suppress(Exception):
                self._wait()
        for _ in self._threads:
            self._jobs.put(None)
        self._threads, self._is_able = [], False
        for descriptor in self._direct.values():
            if descriptor is not None:
                os.close(descriptor)
        self._direct = {}

    def takes(self, file: int) -> bool:
        """Return True if blocks of the file with this number are written past the page cache."""
        return self._is_able and self._opened(file) is not None

    def take(self, file: int, data: memoryview, at: int) -> bool:
        """Copy a block and let a thread write it; return False if the caller has to write.

        `at` is a multiple of the block's size. Raises OSError if this block or an earlier one was refused.
        """
        if not self._is_able or (direct := self._opened(file)) is None or not self._prepare():
            return False
        if not self._slots:
            self._wait()
        slot = self._slots.pop()
        slot[:] = data
        self._at_work += 1
        self._jobs.put((direct, self._files[file], slot, at))
        return True

    def settle(self) -> None:
        """Wait until all taken blocks are in their files. Raises OSError."""
        while self._at_work:
            self._wait()

    def _wait(self) -> None:
        slot, error = self._done.get()
        self._at_work -= 1
        self._slots.append(slot)
        if error is not None:
            raise error

    def _opened(self, file: int) -> int | None:
        if file not in self._direct:
            self._direct[file] = _past_the_cache(self._files[file])
        return self._direct[file]

    def _prepare(self) -> bool:
        """Get threads and memory for the first block; return True if available."""
        if self._threads:
            return True
        try:
            memory = huge_pages(_SLOTS * self._block)
            for _ in range(_THREADS):
                thread = threading.Thread(target=self._serve, name="ttp-write", daemon=True)
                thread.start()
                self._threads.append(thread)
        except (OSError, RuntimeError):  # no thread can be had
            self._is_able = bool(self._threads)
        if self._is_able:
            self._slots = [
                memory[number * self._block : (number + 1) * self._block] for number in range(_SLOTS)
            ]
        return self._is_able

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            direct, through_cache, slot, at = job
            error: Exception | None = None
            try:
                _write(direct, through_cache, slot, at)
            except Exception as raised:  # of any kind: the caller waits for the block
                error = raised
            self._done.put((slot, error))


def _past_the_cache(descriptor: int) -> int | None:
    """Return a descriptor of the same file for direct writes; None if not possible."""
    if not disk.is_on_own_disk(descriptor):
        return None
    try:
        # By the descriptor: the open file, whatever its name means by now.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _write(direct: int, through_cache: int, data: memoryview, at: int) -> None:
    written = 0
    while written < len(data):
        try:
            written += os.pwrite(direct, data[written:], at + written)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the disk requires larger units, or has taken a part of a unit
                raise
            direct = through_cache


# The system takes few requests at a time, and leaves out the rest.
_PIECE = 1 << 20


def begin_read_ahead(folder: Path) -> None:
    """Start to read a checkpoint in a thread, without a wait."""

    def work() -> None:
        with contextlib.suppress(Exception):  # it only saves time
            read_ahead(folder, host_memory.available() // 2)

    with contextlib.suppress(RuntimeError):  # no thread can be had
        threading.Thread(target=work, name="ttp-read-ahead", daemon=True).start()


def read_ahead(folder: Path, limit_bytes: int) -> int:
    """Ask the kernel to read the files of a checkpoint on a disk of this machine; return the bytes.

    A file system that machines share is left alone: each machine would read what others load. A checkpoint
    above `limit_bytes` is not read. Raises CheckpointError without a manifest, OSError.
    """
    saved_manifest = manifest.read(folder)
    if sum(file.bytes for file in saved_manifest.files) > limit_bytes:
        return 0
    requested_bytes = 0
    for file in saved_manifest.files:
        descriptor = disk.open_regular(folder / file.path)
        try:
            if not disk.is_on_own_disk(descriptor):
                return requested_bytes
            for begin in range(0, file.bytes, _PIECE):
                os.posix_fadvise(descriptor, begin, _PIECE, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
        requested_bytes += file.bytes
    return requested_bytes

"""The checks of `ttp doctor` that try the folder of checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from adaptor.checkpoint import disk, folder_rights, linux_calls
from adaptor.launchers.finding import Finding

_BLOCK = 8 << 20


def save_folder(folder: Path, size: int, grace_s: float) -> Iterator[Finding]:
    """Try what a save needs: to write, to rename, to exchange two names, to lock, to reach the disk.

    Everything is made in a new folder in it, which is removed; so is the folder itself if it was not there.

    Args:
        folder: of the checkpoints.
        size: the bytes to write for its speed.
        grace_s: TTP_GRACE.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield from _tried(folder, size, grace_s)
    except OSError as error:
        words = f"{folder}: a save would fail there ({error.strerror})"
        yield Finding("save", "FAIL", words, "give this user the right and room, or name another --save")
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _tried(folder: Path, size: int, grace_s: float) -> Iterator[Finding]:
    status = folder_rights.probe(folder)
    room = shutil.disk_usage(folder).free
    owner = folder_rights.name_user(status.st_uid)
    yield Finding("save", "OK", f"{folder}: files are of {owner}; {room / 2**30:.1f} GiB free")
    place = folder / f"{folder_rights.PROBE}doctor_{secrets.token_hex(4)}"
    folder_rights.make_private(place)
    try:
        yield _rename(place)
        yield _exchange(place)
        yield _lock(place)
        yield _speed(place, min(size, room // 2), grace_s)
    finally:
        disk.remove(place)


def _rename(place: Path) -> Finding:
    one, other = place / "iter_tmp", place / "iter_0000001"
    one.mkdir()
    try:
        one.rename(other)
        disk.sync(place)
    except OSError as error:
        words = f"a folder cannot get its name, or not reach the disk ({error.strerror})"
        return Finding("rename", "FAIL", words, "use a file system that renames folders and syncs them")
    return Finding("rename", "OK", "a folder gets its name, and that is on disk")


def _exchange(place: Path) -> Finding:
    one, other = place / "a", place / "b"
    one.mkdir()
    other.mkdir()
    if linux_calls.exchange(one, other):
        return Finding("exchange", "OK", "two folders can exchange their names at once")
    words = "two folders cannot exchange their names at once (NFS cannot)"
    remedy = "a checkpoint of a step that was saved before is replaced in two steps: docs/promises.md"
    return Finding("exchange", "WARN", words, remedy)


def _lock(place: Path) -> Finding:
    path = place / "lock"
    with path.open("w") as one, path.open("w") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            words = f"flock does not work ({error.strerror})"
            return Finding("lock", "FAIL", words, "mount the file system with locks (Lustre: -o flock)")
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("lock", "OK", "flock keeps others out, on this node")
    return Finding("lock", "FAIL", "two locks on one file are held at once", "mount it with working locks")


def _speed(place: Path, size: int, grace_s: float) -> Finding:
    block = os.urandom(min(_BLOCK, max(size, 1)))
    began = time.monotonic()
    with (place / "data").open("wb", buffering=0) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        os.fsync(file)
        written = file.tell()
    rate = written / max(time.monotonic() - began, 1e-9)
    words = (
        f"{written / 2**20:.0f} MiB were written and synced at {rate / 1e6:.0f} MB/s:"
        f" {rate * grace_s / 1e9:.1f} GB in TTP_GRACE ({grace_s:.0f} s)"
    )
    return Finding("speed", "OK", words, "set TTP_GRACE to more than the last words of this node take")

"""The checks of `ttp doctor` that try the folder of checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from adaptor.checkpoint import disk, folder_rights, linux_calls
from adaptor.checkpoint.hashing import HashingFile
from adaptor.config import Config
from adaptor.launchers.doctor import doctor_job
from adaptor.launchers.doctor.doctor_job import Job, Speed
from adaptor.launchers.doctor.finding import Finding

_BLOCK = 8 << 20


def save_folder(folder: Path, size: int, job: Job, settings: Config) -> Iterator[Finding]:
    """Try what a save needs: to write, to rename, to exchange two names, to lock, to reach the disk.

    Everything is made in a new folder in it, which is removed; so is the folder itself if it was not there.

    Args:
        folder: of the checkpoints.
        size: the bytes to write for its speed.
        job: that is to save there.
        settings: with the times that a save may take.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield from _tried(folder, size, job, settings)
    except OSError as error:
        description = f"{folder}: a save would fail there ({error.strerror})"
        yield Finding(
            "save", "FAIL", description, "give this user the right and room, or name another --save"
        )
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _tried(folder: Path, size: int, job: Job, settings: Config) -> Iterator[Finding]:
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
        speed, finding = _speed(place, min(size, room // 2))
        yield finding
        yield from doctor_job.times(speed, job.save(folder), room, settings)
    finally:
        disk.remove(place)


def _rename(place: Path) -> Finding:
    first_path, second_path = place / "iter_tmp", place / "iter_0000001"
    first_path.mkdir()
    try:
        first_path.rename(second_path)
        disk.sync(place)
    except OSError as error:
        description = f"a folder cannot get its name, or not reach the disk ({error.strerror})"
        return Finding("rename", "FAIL", description, "use a file system that renames folders and syncs them")
    return Finding("rename", "OK", "a folder gets its name, and that is on disk")


def _exchange(place: Path) -> Finding:
    first_path, second_path = place / "a", place / "b"
    first_path.mkdir()
    second_path.mkdir()
    if linux_calls.exchange(first_path, second_path):
        return Finding("exchange", "OK", "two folders can exchange their names at once")
    description = "two folders cannot exchange their names at once (NFS cannot)"
    remedy = "a checkpoint of a step that was saved before is replaced in two steps: docs/promises.md"
    return Finding("exchange", "WARN", description, remedy)


def _lock(place: Path) -> Finding:
    path = place / "lock"
    with path.open("w") as first_file, path.open("w") as second_file:
        try:
            fcntl.flock(first_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            description = f"flock does not work ({error.strerror})"
            return Finding("lock", "FAIL", description, "mount the file system with locks (Lustre: -o flock)")
        try:
            fcntl.flock(second_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("lock", "OK", "flock keeps others out, on this node")
    return Finding("lock", "FAIL", "two locks on one file are held at once", "mount it with working locks")


def _speed(place: Path, size: int) -> tuple[Speed, Finding]:
    """Write as a save does, which syncs its files while it writes them, and see how fast that goes."""
    block = os.urandom(min(_BLOCK, max(size, 1)))
    moved = [time.monotonic()]
    with HashingFile(place / "data", lambda count: moved.append(time.monotonic())) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
    moved.append(time.monotonic())
    speed = Speed(
        file.bytes / max(moved[-1] - moved[0], 1e-9),
        max(moved_after - moved_before for moved_before, moved_after in pairwise(moved)),
    )
    description = f"{file.bytes / 2**20:.0f} MiB were written and synced at {speed.rate / 1e6:.0f} MB/s"
    return speed, Finding("speed", "OK", description)

"""Reads and replaces the tracker, which names the step to load; the steps and the lock of a save folder.

The tracker is replaced atomically, under the lock of the save folder. The tracker goes backwards only from a
checkpoint that is damaged, gone, or not whole on every node (`resume_selection`).

The lock is for processes of all machines: both sides of a cut network may publish into the folder. It is on a
file of its own, which exists only while a process holds the lock or waits for it. The lock ends with its
process, and never has to be broken. Only this user can open the file, so no other user with read permission
for the folder can hold the lock; a file of another user is removed. Where a file system has no locks, every
process holds the lock at once: see docs/assumptions.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from adaptor.checkpoint import disk, manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming

# The lock is held for some renames and fsyncs of a folder: a slow disk needs seconds. An NFSv4 server frees
# the lock of a dead client when its lease ends, after 90 s. A process that holds the lock for longer is
# stopped, or its disk hangs, and a save that waits without end is worse than a save that fails with a line.
PATIENCE_S = 100.0
# flock has no time-out: the pause between two tries.
_AGAIN_S = 0.05
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# In bytes: a step, with spaces and line ends that a person may have added.
_LONGEST_TRACKER = 256


@contextlib.contextmanager
def locked(save_folder: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock of the save folder. Raises CheckpointError after `patience_s`, OSError."""
    lock = save_folder / naming.LOCK
    descriptor = _take(lock, time.monotonic() + patience_s, patience_s)
    try:
        try:
            yield
        except Exception:
            _drop(descriptor, lock)
            raise
        _drop(descriptor, lock)
    finally:
        os.close(descriptor)


def _take(lock: Path, until: float, patience_s: float) -> int:
    while True:
        descriptor = _open(lock)
        try:
            if _is_locked(descriptor):
                if _bears(lock, descriptor):  # otherwise the former holder has removed the file
                    return descriptor
            elif not _is_of_this_user(lock.parent, descriptor):
                disk.remove(lock)
            elif time.monotonic() >= until:
                raise CheckpointError(
                    f"{lock}: {_holder(descriptor)} has held it for {patience_s:g} s, so nothing is"
                    " published: it is stopped, or its disk hangs"
                )
            else:
                time.sleep(_AGAIN_S)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(lock: Path) -> int:
    """Open the lock's file, made if missing; a file that this user cannot open is removed."""
    try:
        descriptor = os.open(lock, _OPEN | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise
        if not os.path.lexists(lock):
            raise  # the folder refuses
        disk.remove(lock)
        return os.open(lock, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # processes do not share a FIFO
        os.close(descriptor)
        disk.remove(lock)
        return os.open(lock, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
    return descriptor


def _is_locked(descriptor: int) -> bool:
    """Take the lock, unless another process has it; return True if taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _HAS_NO_LOCKS:
            raise
    return True


def _is_of_this_user(save_folder: Path, descriptor: int) -> bool:
    """Return True if the file has the owner and the rights of a file that this process makes there."""
    probe_status, lock_status = disk.probe_rights(save_folder), os.fstat(descriptor)
    return (probe_status.st_uid, probe_status.st_mode) == (lock_status.st_uid, lock_status.st_mode)


def _holder(descriptor: int) -> str:
    """Return the name of the process that holds a lock on the file, as far as this machine knows."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            lock_fields = line.split()
            if lock_fields[1] == "FLOCK" and lock_fields[5].endswith(inode):
                return f"process {lock_fields[4]}"
    return "a process of another machine"


def _bears(lock: Path, descriptor: int) -> bool:
    """Return True if `lock` still names this file; opened, because NFS may remember a name alone."""
    try:
        lock_descriptor = os.open(lock, _OPEN)
    except OSError:  # gone, or replaced
        return False
    try:
        return os.path.sameopenfile(lock_descriptor, descriptor)
    finally:
        os.close(lock_descriptor)


def _drop(descriptor: int, lock: Path) -> None:
    if _bears(lock, descriptor):
        lock.unlink()


def tracked_step(save_folder: Path) -> int | None:
    """Return the step in the tracker; None if it is missing, empty, damaged, or says `release`."""
    text = tracker_text(save_folder)
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def tracker_text(save_folder: Path) -> str:
    """Return the text of the tracker; "" if missing, unreadable, or too long."""
    try:
        return disk.read(save_folder / naming.TRACKER, _LONGEST_TRACKER).decode().strip()
    except (OSError, ValueError):
        return ""


@disk.one_line
def advance(save_folder: Path, step: int) -> bool:
    """Let the tracker name `step`, unless it names a later one, not `release`; return True if changed."""
    with locked(save_folder):
        return advance_under_lock(save_folder, step)


def advance_under_lock(save_folder: Path, step: int) -> bool:
    """Do what `advance` does, under a lock that is held."""
    named = tracked_step(save_folder)
    if named is not None and named >= step:
        return False
    set_under_lock(save_folder, step)
    return True


def set_under_lock(save_folder: Path, step: int) -> None:
    """Let the tracker name `step`, whatever it names, under a lock that is held."""
    remove_drafts(save_folder)  # of a process that died with the lock
    tracker = save_folder / naming.TRACKER
    if tracker.is_dir() and not tracker.is_symlink():  # a file cannot replace a folder
        tracker.rename(disk.free_name(save_folder, lambda number: f"aside_{naming.TRACKER}.{number}"))
    disk.replace(save_folder, naming.TRACKER, str(step).encode())


def remove_drafts(save_folder: Path, names: Iterable[str] = (naming.TRACKER, naming.LEASE)) -> None:
    """Remove the drafts of small files that dead processes have left, under a lock that is held."""
    for name in names:
        for draft in save_folder.glob(f"{name}.*{disk.DRAFT}"):
            disk.remove(draft)


def entry_names(save_folder: Path) -> list[str]:
    """Return the names in the save folder, in order; empty if the folder is missing."""
    return sorted(path.name for path in save_folder.iterdir()) if disk.is_folder(save_folder) else []


def steps(save_folder: Path) -> list[int]:
    """Return the steps with a folder, in order."""
    return sorted(step for name in entry_names(save_folder) if (step := naming.step_of(name)) is not None)


def has_manifest(save_folder: Path, step: int) -> bool:
    """Return True if the checkpoint of `step` was saved with the adaptor, intact or not."""
    return os.path.lexists(save_folder / naming.final_name(step) / naming.MANIFEST)


def is_complete(save_folder: Path, step: int) -> bool:
    """Return True if `iter_N` is a checkpoint that can be loaded.

    A checkpoint is complete if its manifest agrees with its files, or if the tracker names the step, or a
    later step. Checksums are not computed again: a manifest gets a final name only after every file was on
    disk.
    """
    folder = save_folder / naming.final_name(step)
    if not disk.is_folder(folder):
        return False
    if not manifest.defects(folder, checksums=False, step=step):
        return True
    named = tracked_step(save_folder)
    return named is not None and named >= step


def is_of_generation(save_folder: Path, step: int, generation: str) -> bool:
    """Return True if a complete checkpoint of `step` by this generation of workers exists."""
    return _generation_of(save_folder / naming.final_name(step)) == generation and is_complete(
        save_folder, step
    )


def are_last_words(save_folder: Path, step: int) -> bool:
    """Return True if the checkpoint of `step` was written after a failure: its manifest names the groups."""
    try:
        return bool(manifest.read(save_folder / naming.final_name(step)).groups)
    except CheckpointError:
        return False


def _generation_of(folder: Path) -> str:
    """Return the generation of workers that made a checkpoint; "" if the framework alone made it."""
    try:
        return manifest.read(folder).generation
    except CheckpointError:
        return ""

"""Rights and owners of folders: a checkpoint is made in a folder into which no other user can write."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import secrets
import stat
from pathlib import Path

from adaptor.errors import CheckpointError

PRIVATE = 0o700  # of a folder that is being written: nobody else can put anything into it
PROBE = ".ttp-"  # begins the names of what is made and removed at once, to see its owner and its rights


def make_private(folder: Path) -> None:
    """Make a folder into which only this user can put anything, until `share`."""
    folder.mkdir(PRIVATE)


def ensure_private(folder: Path) -> None:
    """Make a folder as `make_private` does, unless another process of this user has.

    Raises:
        CheckpointError: what is there is a link or a file, or belongs to another user.
    """
    try:
        make_private(folder)
        return
    except FileExistsError:
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{folder}: is not a folder, so nothing is written there; remove it")
    if status.st_uid != _owner_below(folder.parent, os.geteuid()):
        raise CheckpointError(f"{folder}: belongs to user {status.st_uid}, so nothing is written there")


@functools.lru_cache
def _owner_below(root: Path, user: int) -> int:
    """Return the owner of what a process of `user` makes in `root`; tried out once, not at each save."""
    return probe(root).st_uid


def probe(folder: Path) -> os.stat_result:
    """Return what the system says of a file that this process makes in `folder`: its owner and its rights.

    The user number of the process does not tell: a server may give another one to root, and know no rights.
    """
    path = folder / f"{PROBE}{secrets.token_hex(4)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def name_user(number: int) -> str:
    """Return `number` and the name that this machine has for it, for a person."""
    try:
        return f"user {number} ({pwd.getpwuid(number).pw_name})"
    except (KeyError, OSError):
        return f"user {number}"


def share(folder: Path) -> None:
    """Give a folder the rights that it would have had if it had been made as others are.

    An empty folder in it has them: the umask is not all, the folder above may give default rights (ACL) to
    all below it. A file system without rights, or with troubles, changes nothing: nothing is lost for its
    rights.
    """
    with contextlib.suppress(OSError):
        sample = folder / f"{PROBE}rights"
        with contextlib.suppress(FileExistsError):  # of a process that has died in here
            sample.mkdir(0o777)
        try:
            rights = sample.lstat().st_mode & 0o777
        finally:
            sample.rmdir()
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o777 | rights)

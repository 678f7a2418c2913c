"""Small disks that fill up, fail, slow down or become read-only."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# For the faults `disk` and `disk-mended`: the failure and the disk's folder.
VARIABLE = "TTP_TEST_DISK"
_MIB = 1 << 20
_INODES = 200  # of a disk in memory
_FILLING = "filling-"


@dataclass(frozen=True)
class Disk:
    """A mounted disk.

    Attributes:
        place: the mount point.
        device: the block device, if any.
        below: the folder of the file behind the device, with less room than the device claims.
    """

    place: Path
    device: Path | None = None
    below: Path | None = None

    def will(self, trouble: str) -> Mapping[str, str]:
        """Return the environment of a job in which the fault `disk` breaks this disk.

        Args:
            trouble: `fail`, `read-only`, `full`, or `inodes` (no inodes are left).
        """
        return {VARIABLE: f"{trouble} {self.below if trouble == 'fail' else self.place}"}


@contextmanager
def memory(place: Path, size: int, *unmount_flags: str) -> Iterator[Disk]:
    """Mount a disk of `size` bytes in memory. Raises OSError without the permission to mount."""
    place.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={_INODES}", "tmpfs", str(place))
    try:
        yield Disk(place)
    finally:
        _run("umount", *unmount_flags, str(place))


@contextmanager
def block(place: Path, room: int) -> Iterator[Disk]:
    """Mount a disk whose block device claims to be larger than its `room` bytes."""
    backing_folder = place.with_name(f"{place.name}-below")
    # A mount namespace that another test makes meanwhile also has the device mounted. Therefore the file
    # behind the device is closed only when that namespace ends.
    with memory(backing_folder, room, "--lazy"):
        file = backing_folder / "file"
        with file.open("wb") as sparse:
            sparse.truncate(4 * room)
        # Without a journal, a failed write does not make the whole disk read-only.
        _run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", str(file))
        device = _run("losetup", "--find", "--show", str(file)).strip()
        try:
            place.mkdir()
            _run("mount", device, str(place))
            try:
                (place / "lost+found").rmdir()
                yield Disk(place, Path(device), backing_folder)
            finally:
                _run("umount", str(place))
        finally:
            _run("losetup", "--detach", device)


def worsen() -> None:
    """Break the disk named in the environment of the process."""
    trouble, _, place = os.environ[VARIABLE].partition(" ")
    if trouble == "read-only":
        _run("mount", "-o", "remount,ro", place)
        return
    if trouble == "full":
        _fill(Path(place) / f"{_FILLING}0")
        return
    if trouble == "inodes":
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (Path(place) / f"{_FILLING}{number}").touch()
        return
    # The device accepts writes beyond the room below it, and fails when they are synced.
    _fill(Path(place) / "other")


def _fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(_MIB)):
            pass


def mend() -> None:
    """Make the disk named in the environment of the process writable again."""
    trouble, _, place = os.environ[VARIABLE].partition(" ")
    if trouble == "read-only":
        _run("mount", "-o", "remount,rw", place)
    else:
        for path in Path(place).glob(f"{_FILLING}*"):
            path.unlink()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from None

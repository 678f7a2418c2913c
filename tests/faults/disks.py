"""Small disks on this machine that fill up, fail, slow down or may not be written any more."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# For the faults `disk` and `disk-mended`: what is to become of it, and its folder.
VARIABLE = "TTP_TEST_DISK"
_MIB = 1 << 20
_INODES = 200  # of a disk in memory
_FILLING = "filling-"


@dataclass(frozen=True)
class Disk:
    """Mounted at `place`.

    device  the block device, where it has one
    below   the folder of the file behind the device: it holds less than the disk seems to
    """

    place: Path
    device: Path | None = None
    below: Path | None = None

    def will(self, what: str) -> Mapping[str, str]:
        """Return the environment of a job in which the fault `disk` makes it `fail`, `read-only` or `full`.

        Another value of `what` is `inodes`: the disk has none left.
        """
        return {VARIABLE: f"{what} {self.below if what == 'fail' else self.place}"}


@contextmanager
def memory(place: Path, size: int, *how: str) -> Iterator[Disk]:
    """A disk of `size` bytes; raises OSError where this user may not mount one. `how`: flags of umount."""
    place.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={_INODES}", "tmpfs", str(place))
    try:
        yield Disk(place)
    finally:
        _run("umount", *how, str(place))


@contextmanager
def block(place: Path, room: int) -> Iterator[Disk]:
    """A disk with a block device that seems to be larger than the `room` bytes that it has."""
    below = place.with_name(f"{place.name}-below")
    # A mount namespace that another test makes meanwhile has the device mounted, too. So the file behind it
    # is closed when that namespace ends.
    with memory(below, room, "--lazy"):
        file = below / "file"
        with file.open("wb") as sparse:
            sparse.truncate(4 * room)
        # Without a journal: a write that fails does not make the whole disk read-only.
        _run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", str(file))
        device = _run("losetup", "--find", "--show", str(file)).strip()
        try:
            place.mkdir()
            _run("mount", device, str(place))
            try:
                (place / "lost+found").rmdir()
                yield Disk(place, Path(device), below)
            finally:
                _run("umount", str(place))
        finally:
            _run("losetup", "--detach", device)


def worsen() -> None:
    """From inside: what the environment says happens to the disk."""
    what, _, place = os.environ[VARIABLE].partition(" ")
    if what == "read-only":
        _run("mount", "-o", "remount,ro", place)
        return
    if what == "full":
        _fill(Path(place) / f"{_FILLING}0")
        return
    if what == "inodes":
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (Path(place) / f"{_FILLING}{number}").touch()
        return
    # What the disk below has no room for, the device cannot take: that is known when it is synced.
    _fill(Path(place) / "other")


def _fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(_MIB)):
            pass


def mend() -> None:
    """From inside: the disk of the environment can be written again."""
    what, _, place = os.environ[VARIABLE].partition(" ")
    if what == "read-only":
        _run("mount", "-o", "remount,rw", place)
    else:
        for path in Path(place).glob(f"{_FILLING}*"):
            path.unlink()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from None

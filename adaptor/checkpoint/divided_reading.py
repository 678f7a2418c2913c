"""Divides the files of a checkpoint among the ranks that check them.

The files that a rank is about to load are read by the ranks of its node, and by the ranks of other nodes that
load the same files: the load then finds the files in the memory of the node. Files that no rank is known to
load are divided among all ranks. The knowledge only saves reading: in any case all files are checked. Ranks
that do not see the same folder, because each node has a copy of its own, divide nothing with each other: each
copy is checked.

`CheckedFiles` has the names of the intact files, which the load may map into memory.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptor.checkpoint import disk, hashing
from adaptor.context import Context
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry

_BEGINNING = 256  # bytes of a manifest, with the step and the time


@dataclass(frozen=True)
class Reader:
    """A rank that reads.

    Attributes:
        loads: the beginnings of the paths, below the checkpoint, of the files for the rank
        view: equal for all ranks with the same folder
        is_other: whether the rank certainly sees another save of the step
        unnamed: why a whole save on the disk of the rank could not be renamed to its final name, or ""
    """

    node: int
    loads: tuple[str, ...]
    view: tuple[int, ...] = ()
    is_there: bool = True
    is_other: bool = False
    unnamed: str = ""

    @property
    def lacks(self) -> bool:
        """Return True if the rank does not see this save."""
        return self.is_other or not self.is_there


def in_blocks(file: FileEntry) -> bool:
    """Return True if a file has a checksum of its blocks, so that several ranks read a part each."""
    return file.xxh3_128_blocks is not None


class Division:
    """The part of one rank, a number in `readers`, in the reading of a checkpoint."""

    def __init__(self, rank: int, readers: Sequence[Reader]) -> None:
        self._rank = rank
        self._same = [number for number, reader in enumerate(readers) if reader.view == readers[rank].view]
        self._on: dict[int, list[int]] = {}
        self._nodes: dict[str, set[int]] = {}
        for number in self._same:
            reader = readers[number]
            self._on.setdefault(reader.node, []).append(number)
            for prefix in reader.loads:
                self._nodes.setdefault(prefix, set()).add(reader.node)
        self._lengths = sorted({len(prefix) for prefix in self._nodes})
        self._known: dict[frozenset[int], list[int]] = {}

    def whole_files(self, files: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the files that the rank compares: each file has one reader, spread over all ranks."""
        whole_file_list = []
        for number, file in enumerate(files):
            ranks = self._ranks_of(file)
            if ranks[number * len(ranks) // len(files)] == self._rank:
                whole_file_list.append(file)
        return whole_file_list

    def blocks(self, file: FileEntry) -> tuple[int, int]:
        """Return the first block of a file for the rank, and the number behind the last; empty: no block."""
        ranks = self._ranks_of(file)
        place = bisect.bisect_left(ranks, self._rank)
        if place == len(ranks) or ranks[place] != self._rank:
            return 0, 0
        count = hashing.blocks_of(file)
        return count * place // len(ranks), count * (place + 1) // len(ranks)

    def _ranks_of(self, file: FileEntry) -> list[int]:
        """Return the ranks that read a file, in order, among the ranks that see the same folder."""
        # By the lengths of the beginnings, because there may be as many files as ranks, and thousands.
        parts = (file.path[:length] for length in self._lengths)
        nodes = frozenset(node for part in parts for node in self._nodes.get(part, ()))
        if nodes not in self._known:
            self._known[nodes] = sorted(rank for node in nodes for rank in self._on[node]) or self._same
        return self._known[nodes]


def views(readers: Sequence[Reader]) -> list[list[int]]:
    """Return the ranks that see the same folder, in order, for each folder."""
    ranks_by_view: dict[tuple[int, ...], list[int]] = {}
    for rank, reader in enumerate(readers):
        ranks_by_view.setdefault(reader.view, []).append(rank)
    return list(ranks_by_view.values())


def unlike(readers: Sequence[Reader]) -> frozenset[int]:
    """Return the ranks that do not see the checkpoint of rank 0: no checkpoint, or another checkpoint."""
    return frozenset(rank for rank, reader in enumerate(readers) if is_unlike(reader.view, readers[0].view))


def is_unlike(first_view: tuple[int, ...], second_view: tuple[int, ...]) -> bool:
    """Return True if two views are of different manifests, whatever inodes the machines see."""
    return first_view[:2] != second_view[:2]


def apart(readers: Sequence[Reader]) -> frozenset[int]:
    """Return the ranks that certainly see another disk than rank 0: another manifest of the same step.

    A rank that sees no manifest may see the same disk, as the disk was some seconds ago.
    """
    return frozenset(rank for rank in unlike(readers) if readers[rank].view)


def view(folder: Path) -> tuple[int, ...]:
    """Return the identity of a copy of a checkpoint; empty if this rank sees no checkpoint.

    The identity is the time of the last change of the manifest, its beginning, and its inode. The beginning
    has the time of the manifest in microseconds: some file systems know full seconds, in which two nodes name
    their parts. All machines of a file system see the same identity; where the file system gives each machine
    inodes of its own (some in user space do), each machine checks everything, as if it had a copy.
    """
    path = folder / naming.MANIFEST
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, _beginning(path), status.st_ino


def _beginning(path: Path) -> int:
    """Return a checksum of the first bytes; 0 if unreadable, which the comparison reports."""
    try:
        with os.fdopen(disk.open_regular(path), "rb") as file:
            return zlib.crc32(file.read(_BEGINNING))
    except OSError:
        return 0


class CheckedFiles:
    """The names of intact files, a part of the context: from the end of a check to the end of the load."""

    def __init__(self, context: Context) -> None:
        self._paths: set[Path] = set()

    def add(self, folder: Path, files: Iterable[FileEntry]) -> None:
        """Add compared files; a file without a checksum stays out, because only its size was compared."""
        self._paths.update(
            (folder / file.path).absolute()
            for file in files
            if file.xxh3_128 is not None or file.xxh3_128_blocks is not None
        )

    def __contains__(self, path: str) -> bool:
        return Path(path).absolute() in self._paths

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Check and load in this block; afterwards no file counts as checked any more."""
        try:
            yield
        finally:
            self._paths.clear()

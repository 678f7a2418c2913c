"""Divides the files of a checkpoint among the ranks that check them.

What a rank is about to load is read by the ranks of its node, and by those of other nodes that load it, too:
it is in the memory of the node then, and the load finds it there. What nobody is known to load is divided
among all ranks. To know better only saves reading: whoever reads, all is checked. Ranks that do not see the
same folder, because each node has a copy of its own, divide nothing with each other: each copy is checked.
"""

from __future__ import annotations

import bisect
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptor.checkpoint import disk, hashing
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry

_BEGINNING = 256  # bytes of a manifest: the step and the time are among them


@dataclass(frozen=True)
class Reader:
    """A rank that reads.

    Attributes:
        node: the number of its node
        loads: with what the paths of files begin, below the checkpoint, that it is about to load
        view: what is the same for all who see the same folder
        is_there: whether it sees the folder of the checkpoint at all
        is_other: whether what it sees is certainly another save of the step
        unnamed: why a save that was written on its disk cannot get its name
    """

    node: int
    loads: tuple[str, ...]
    view: tuple[int, ...] = ()
    is_there: bool = True
    is_other: bool = False
    unnamed: str = ""

    @property
    def lacks(self) -> bool:
        """Return whether it does not see this save."""
        return self.is_other or not self.is_there


def in_blocks(file: FileEntry) -> bool:
    """Return whether a file has a checksum of its blocks, so that several ranks read a part of it each."""
    return file.xxh3_128_blocks is not None


class Division:
    """The part of one rank in the reading of a checkpoint.

    Args:
        rank: a number in `readers`.
        readers: all ranks.
    """

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
        """Return the files that the rank compares: each has one reader, who are spread over all ranks."""
        whole_file_list = []
        for number, file in enumerate(files):
            ranks = self._ranks_of(file)
            if ranks[number * len(ranks) // len(files)] == self._rank:
                whole_file_list.append(file)
        return whole_file_list

    def blocks(self, file: FileEntry) -> tuple[int, int]:
        """Return the first of the blocks of a file that the rank reads, and the number behind the last one.

        The ranks have them in their order; one that reads none has an empty part.

        Args:
            file: with a checksum of its blocks.
        """
        ranks = self._ranks_of(file)
        place = bisect.bisect_left(ranks, self._rank)
        if place == len(ranks) or ranks[place] != self._rank:
            return 0, 0
        count = hashing.blocks_of(file)
        return count * place // len(ranks), count * (place + 1) // len(ranks)

    def _ranks_of(self, file: FileEntry) -> list[int]:
        """Return the ranks that read a file, in order; of those that see the same folder as this one."""
        # By the lengths of what they begin with, for there may be as many files as ranks, and thousands.
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
    """Return the ranks that do not see the checkpoint that rank 0 sees: none, or another one."""
    return frozenset(rank for rank, reader in enumerate(readers) if is_unlike(reader.view, readers[0].view))


def is_unlike(first_view: tuple[int, ...], second_view: tuple[int, ...]) -> bool:
    """Return whether two views are of different manifests, whatever inodes machines see."""
    return first_view[:2] != second_view[:2]


def apart(readers: Sequence[Reader]) -> frozenset[int]:
    """Return the ranks that certainly see another disk than rank 0: another manifest of the same step.

    One that sees none may see the same disk, as it was some seconds ago.
    """
    return frozenset(rank for rank in unlike(readers) if readers[rank].view)


def view(folder: Path) -> tuple[int, ...]:
    """Return what distinguishes the copies of a checkpoint; nothing where this rank sees none.

    That is the time of the last change of the manifest, its beginning, and its inode. The beginning says to
    the microsecond when it was made: some file systems know full seconds, in which two nodes name their
    parts. All who share a file system see the same; where it gives each machine inodes of its own (some in
    user space do), each machine checks everything, as if it had a copy.
    """
    path = folder / naming.MANIFEST
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, _beginning(path), status.st_ino


def _beginning(path: Path) -> int:
    """Return a checksum of the first bytes; 0 where they cannot be read, which the comparison says."""
    try:
        with os.fdopen(disk.open_regular(path), "rb") as file:
            return zlib.crc32(file.read(_BEGINNING))
    except OSError:
        return 0

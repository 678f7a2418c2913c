"""Divides the files of a checkpoint among the ranks that check them.

What a rank is about to load is read by the ranks of its node, and by those of other nodes that load it, too:
it is in the memory of the node then, and the load finds it there. What nobody is known to load is divided
among all ranks. To know better only saves reading: whoever reads, all is checked. Ranks that do not see the
same folder, because each node has a copy of its own, divide nothing with each other: each copy is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptor.checkpoint import hashing
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry


@dataclass(frozen=True)
class Reader:
    """A rank that reads.

    Attributes:
        node: the number of its node
        loads: with what the paths of files begin, below the checkpoint, that it is about to load
        view: what is the same for all who see the same folder
    """

    node: int
    loads: tuple[str, ...]
    view: tuple[int, ...] = ()


def in_blocks(file: FileEntry) -> bool:
    """Return whether a file has a checksum of its blocks, so that several ranks read a part of it each."""
    return file.xxh3_128_blocks is not None


def whole_files(files: Sequence[FileEntry], rank: int, readers: Sequence[Reader]) -> list[FileEntry]:
    """Return the files that `rank` compares: each has one reader, who are spread over all ranks and nodes.

    Args:
        files: of the checkpoint.
        rank: a number in `readers`.
        readers: all ranks.
    """
    found = []
    for number, file in enumerate(files):
        ranks = _ranks_of(file, rank, readers)
        if ranks[number * len(ranks) // len(files)] == rank:
            found.append(file)
    return found


def blocks(file: FileEntry, rank: int, readers: Sequence[Reader]) -> tuple[int, int]:
    """Return the first of the blocks of a file that `rank` reads, and the number behind the last one.

    The ranks have them in their order; one that reads none has an empty part.

    Args:
        file: with a checksum of its blocks.
        rank: a number in `readers`.
        readers: all ranks.
    """
    ranks = _ranks_of(file, rank, readers)
    if rank not in ranks:
        return 0, 0
    place, count = ranks.index(rank), hashing.blocks_of(file)
    return count * place // len(ranks), count * (place + 1) // len(ranks)


def views(readers: Sequence[Reader]) -> list[list[int]]:
    """Return the ranks that see the same folder, in order, for each folder."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, reader in enumerate(readers):
        found.setdefault(reader.view, []).append(rank)
    return list(found.values())


def are_copies(readers: Sequence[Reader]) -> bool:
    """Return whether it is certain that not all ranks see the same folder."""
    return len({reader.view[:1] for reader in readers}) > 1


def view(folder: Path) -> tuple[int, ...]:
    """Return what distinguishes the copies of a checkpoint; nothing where this rank sees none.

    That is the time of the last change of the manifest, and its inode. All who share a file system see the
    same; where it gives each machine inodes of its own (some in user space do), each machine checks
    everything, as if it had a copy.
    """
    try:
        status = (folder / naming.MANIFEST).stat()
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, status.st_ino


def _ranks_of(file: FileEntry, rank: int, readers: Sequence[Reader]) -> list[int]:
    """Return the ranks that read a file as `rank` sees it, in order."""
    same = [number for number, reader in enumerate(readers) if reader.view == readers[rank].view]
    nodes = {readers[number].node for number in same if file.path.startswith(readers[number].loads)}
    return [number for number in same if readers[number].node in nodes] or same

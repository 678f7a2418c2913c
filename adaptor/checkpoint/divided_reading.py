"""Divides the files of a checkpoint among the ranks that check them.

What a rank is about to load is read by the ranks of its node, and by those of other nodes that load it, too:
it is in the memory of the node then, and the load reads it from there. What nobody is known to load is
divided among all ranks. This only saves reading: whoever reads, all is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptor.checkpoint import hashing
from adaptor.protocol.file_entry import FileEntry


@dataclass(frozen=True)
class Reader:
    """A rank that reads.

    Attributes:
        node: the number of its node
        loads: with what the paths of files begin, below the checkpoint, that it is about to load
    """

    node: int
    loads: tuple[str, ...]


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
        ranks = _ranks_of(file, readers)
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
    ranks = _ranks_of(file, readers)
    if rank not in ranks:
        return 0, 0
    place, count = ranks.index(rank), hashing.blocks_of(file)
    return count * place // len(ranks), count * (place + 1) // len(ranks)


def _ranks_of(file: FileEntry, readers: Sequence[Reader]) -> list[int]:
    """Return the ranks that read a file, in order."""
    nodes = {reader.node for reader in readers if file.path.startswith(reader.loads)}
    return [rank for rank, reader in enumerate(readers) if reader.node in nodes] or list(range(len(readers)))

"""The description of a checkpoint file, from its writer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        path: below the checkpoint folder, with `/`
        bytes: its size
        xxh3_128: in hexadecimal, of a file that was written front to back; else None
        attempt: the attempt that wrote the file, until it is published; None once the file has its name
        xxh3_128_blocks: of a large file, and of a file that several ranks have written in place: the xxh3-128
            of the xxh3-128 of its blocks of 1 MiB, in order (`hashing.BlockDigest`). With neither checksum
            only the size is known
        tracker: the name of a copy in the save folder, which names the step for the framework; None: no copy
    """

    path: str
    bytes: int
    xxh3_128: str | None
    attempt: int | None = None
    xxh3_128_blocks: str | None = None
    tracker: str | None = None

    @property
    def draft(self) -> str:
        """Return the path during the write; no two attempts write to the same path."""
        return self.path if self.attempt is None else f"{self.path}.{self.attempt}"

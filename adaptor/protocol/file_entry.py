"""The description of a checkpoint file that its writer reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        path: below the checkpoint folder, with `/`
        bytes: its size
        xxh3_128: in hexadecimal, of a file that was written front to back; else None
        attempt: which attempt wrote it, while it has not been published; None when it has its name already
        xxh3_128_blocks: of a large file, and of one that several ranks have written in place: the xxh3-128
            of the xxh3-128 of its blocks of 1 MiB, in order (`hashing.BlockDigest`). Without either only the
            size is known
        tracker: the name of its copy in the save folder, which tells the framework what to load; None: it has
            no copy
    """

    path: str
    bytes: int
    xxh3_128: str | None
    attempt: int | None = None
    xxh3_128_blocks: str | None = None
    tracker: str | None = None

    @property
    def draft(self) -> str:
        """The path under which it was written; no two attempts write to the same."""
        return self.path if self.attempt is None else f"{self.path}.{self.attempt}"

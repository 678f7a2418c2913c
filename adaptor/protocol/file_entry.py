"""The description of a checkpoint file that its writer reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        path: below the checkpoint folder, with `/`
        bytes: its size
        xxh3_128: in hexadecimal, None where only the size is known
        attempt: which attempt wrote it, while it has not been published; None when it has its name already
    """

    path: str
    bytes: int
    xxh3_128: str | None
    attempt: int | None = None

    @property
    def draft(self) -> str:
        """The path under which it was written; no two attempts write to the same."""
        return self.path if self.attempt is None else f"{self.path}.{self.attempt}"

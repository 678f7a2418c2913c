"""The files that the check before a load has found intact: what is read again may be mapped into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from adaptor.context import Context
from adaptor.protocol.file_entry import FileEntry


class CheckedFiles:
    """The names of these files, a part of the context: from the end of a check to the end of the load."""

    def __init__(self, context: Context) -> None:
        self._paths: set[Path] = set()

    def add(self, folder: Path, files: Iterable[FileEntry]) -> None:
        """Add what was compared: of a file without a checksum this was only its size, so it stays out.

        Args:
            folder: of the checkpoint.
            files: with paths below it.
        """
        self._paths.update(
            (folder / file.path).absolute()
            for file in files
            if file.xxh3_128 is not None or file.xxh3_128_blocks is not None
        )

    def __contains__(self, path: str) -> bool:
        return Path(path).absolute() in self._paths

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Check and load in this block; after it, nothing counts as checked any more."""
        try:
            yield
        finally:
            self._paths.clear()

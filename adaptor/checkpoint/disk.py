"""What is done to a disk: files and folders that are on it for sure when a function returns."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from adaptor.errors import CheckpointError

_F = TypeVar("_F", bound=Callable[..., Any])


def one_line(function: _F) -> _F:
    """Lets `function` raise CheckpointError where it met an OSError."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            place = error.filename or args[0]
            raise CheckpointError(f"{place}: {error.strerror or error} ({function.__name__})") from error

    return guarded  # type: ignore[return-value]


def files(folder: Path) -> Iterator[Path]:
    """All files below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            yield Path(place, name)


def write(path: Path, content: bytes) -> None:
    """A file with this content, on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """fsync of a folder and of those below it."""
    for place, _, _ in os.walk(folder, topdown=False):
        sync(Path(place))


def remove(path: Path) -> None:
    """A folder and what is below it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)

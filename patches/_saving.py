"""The one regular save that this process may be in."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from adaptor.checkpoint import naming, publish
from adaptor.control import runtime


@dataclass
class _Save:
    root: Path
    step: int
    thread: int
    draft: Path | None = None  # of the tracker, on the rank that writes it


_save: _Save | None = None


def _current() -> _Save | None:
    """A dump runs beside the main thread, and is no regular save."""
    return _save if _save is not None and _save.thread == threading.get_ident() else None


@contextlib.contextmanager
def regular(root: str, step: int) -> Iterator[None]:
    """While the framework saves `step` below `root`."""
    global _save
    save = _save = _Save(Path(root), step, threading.get_ident())
    try:
        yield
        if save.draft is not None:
            draft = save.draft
            runtime.get().session.publishing(lambda: publish.adopt_tracker(save.root, draft))
    finally:
        _save = None


def renamed(path: str) -> str:
    """The path below the folder of the running save, if it is one."""
    save = _current()
    if save is None:
        return path
    final = str(save.root / naming.final_name(save.step))
    if path != final and not path.startswith(final + os.sep):
        return path
    return str(save.root / naming.regular_name(save.step)) + path[len(final) :]


def tracker(path: str) -> str:
    """Where the running save writes its tracker: every rank has written, so its folder is published first.

    Rank 0 writes it; other ranks ask for its name in passing.
    """
    save = _current()
    if save is None or runtime.get().rank != 0:
        return path
    if save.draft is None:
        publish.sync_regular(save.root, save.step)
        runtime.get().session.publishing(lambda: publish.publish_regular(save.root, save.step))
        save.draft = Path(f"{path}.{save.step}.saving")
        if Path(path).exists():  # the framework reads the old one, too
            shutil.copyfile(path, save.draft)
    return str(save.draft)

"""Checks of the save folder before a job begins."""

from __future__ import annotations

import errno
import os
import platform
import re
import tempfile
from pathlib import Path

from adaptor import context, output
from adaptor.checkpoint import disk, tracker
from adaptor.errors import ConfigError
from adaptor.protocol import naming
from adaptor.protocol.environment import WorkerPlace

# The beginning of an object store's name, such as msc://profile/folder; pathlib turns `//` into `/`.
_STORE = re.compile(r"\w+:/")
_CREDENTIALS = re.compile(r"(:/+)[^/@]*@")  # before the host


def require_writable(save: str | Path | None) -> None:
    """Refuse a job without a place for its last words; the folder is made.

    Raises:
        ConfigError: no folder is named, the folder is in an object store, or cannot be written.
    """
    folder = _require_folder(save)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        node, user = context.part(WorkerPlace).node, disk.name_user(os.geteuid())
        raise ConfigError(
            f"--save is {save}: it cannot be written ({error.strerror}) by {user} on node {node}"
            f" ({platform.node()})"
        ) from None


def require_possible(save: str | Path | None) -> None:
    """Refuse a folder like `require_writable`, as far as possible without writing anything.

    Raises:
        ConfigError: as `require_writable`.
    """
    folder = _require_folder(save).absolute()
    nearest_existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest_existing.is_dir():
        raise ConfigError(f"--save is {save}: it cannot be written ({os.strerror(errno.ENOTDIR)})")
    if not os.access(nearest_existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--save is {save}: it cannot be written ({os.strerror(errno.EACCES)})")


def _require_folder(save: str | Path | None) -> Path:
    if not save:
        raise ConfigError(
            "--save is missing: a folder for the checkpoint after a failure, e.g. --save checkpoints"
        )
    # A framework with support for object stores would get a path of this machine instead.
    if _STORE.match(str(save)):
        shown = _CREDENTIALS.sub(r"\1...@", str(save))
        raise ConfigError(
            f"--save is {shown}: the checkpoint after a failure needs a folder of a file system,"
            " not an object store"
        )
    return Path(save)


def is_same(first: str | Path | None, second: str | Path | None) -> bool:
    """Return whether two options name the same folder; False if an option is missing."""
    return first is not None and second is not None and Path(first).resolve() == Path(second).resolve()


def require_no_later_step(save: str | Path, step: int) -> None:
    """Refuse a run whose save folder holds a step after `step`: a restart would resume from the later step.

    Raises:
        ConfigError: the tracker names a later step.
    """
    saved = tracker.tracked_step(Path(save))
    if saved is None and context.part(WorkerPlace).rank == 0:
        _tell_of_untracked(Path(save), step)
    if saved is not None and saved > step:
        back = ""
        if os.path.lexists(Path(save) / naming.final_name(step)):
            back = f"; to go back to step {step}, write {step} into {Path(save) / naming.TRACKER}"
        raise ConfigError(
            f"--save {save} holds step {saved}, but training begins at step {step}: "
            f"load step {saved}, or choose another folder{back}"
        )


def _tell_of_untracked(save: Path, step: int) -> None:
    newer = [
        later_step
        for later_step in tracker.steps(save)
        if later_step > step and tracker.has_manifest(save, later_step)
    ]
    if newer:
        output.tell(
            f"[ttp] {save} holds checkpoints up to step {newer[-1]} that no tracker names: training begins at"
            f" step {step}, and they stay; to go on from them, load from that folder",
            to="stdout",
        )

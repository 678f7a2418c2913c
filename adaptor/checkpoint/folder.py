"""What a save folder has to be before a job begins."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from adaptor.checkpoint.publish import tracked_step
from adaptor.errors import ConfigError

# What names an object store, such as msc://profile/folder; a Path has lost the second slash.
_STORE = re.compile(r"\w+:/")


def require_writable(save: str | Path | None) -> None:
    """Refuse a job that has no place for its last words.

    Raises:
        ConfigError: there is no folder, it is in an object store, or nothing can be written there.
    """
    if not save:
        raise ConfigError("--save is missing: last words need a folder, e.g. --save checkpoints")
    # A framework may know of it, and would then be given a path of this machine.
    if _STORE.match(str(save)):
        raise ConfigError(f"--save is {save}: last words need a folder of a file system, not an object store")
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save):
            pass
    except OSError as error:
        raise ConfigError(f"--save is {save}: it cannot be written ({error.strerror})") from None


def require_newest(save: str | Path, step: int) -> None:
    """Refuse a run whose save folder holds a step after `step`: a restart would resume from that one.

    Raises:
        ConfigError: the tracker names a later step.
    """
    saved = tracked_step(Path(save))
    if saved is not None and saved > step:
        raise ConfigError(
            f"--save {save} holds step {saved}, but training begins at step {step}: "
            "load from it, or choose another folder"
        )

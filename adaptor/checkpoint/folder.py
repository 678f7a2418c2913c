"""What a save folder has to be before a job begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from adaptor.checkpoint.publish import tracked_step
from adaptor.errors import ConfigError


def require_writable(save: str | Path | None) -> None:
    """Refuse a job that has no place for its last words.

    Raises:
        ConfigError: there is no folder, or nothing can be written there.
    """
    if not save:
        raise ConfigError("--save is missing: last words need a folder, e.g. --save checkpoints")
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

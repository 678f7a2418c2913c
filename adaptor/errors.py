"""The exceptions of the adaptor. Each message is one line that names the thing, its value and what would be
right.

AdaptorError
├── ConfigError      a setting makes no sense
├── StartError       the adaptor was enabled too late, or outside of ttprun
├── DriftError       a patched function of the framework no longer matches its declaration
├── LayoutError      the parallel layout cannot be protected
├── ResumeError      a checkpoint is damaged, and there is none to go on from in its place
└── CheckpointError  a checkpoint cannot be written, published or trusted
"""

from __future__ import annotations

import sys
from types import TracebackType


class AdaptorError(Exception):
    """Base of all errors that a user of the adaptor can cause or meet."""


class ConfigError(AdaptorError):
    """A setting makes no sense; the message names the variable, its value and the range."""


class StartError(AdaptorError):
    """`enable()` was called too late, or the worker was not started by `ttprun`."""


class DriftError(AdaptorError):
    """A patched function of the framework does not have the signature that its patch declares."""


class LayoutError(AdaptorError):
    """The parallel layout, or a mode of the framework, cannot be protected."""


class ResumeError(AdaptorError):
    """What the job was to go on from is damaged, and it is not for the adaptor to choose something else."""


class CheckpointError(AdaptorError):
    """A checkpoint cannot be written, published or trusted."""


def say_in_one_line() -> None:
    """A user never reads a traceback for a mistake of their own: one that leaves the script is one line."""
    previous = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, AdaptorError):
            print(f"adaptor: error: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = say

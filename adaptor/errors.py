"""The exceptions of the adaptor.

Each message is one line that names the thing, its value, and the right value.

AdaptorError
├── ConfigError      a setting makes no sense
├── StartError       the adaptor was enabled too late, or outside of ttprun
├── StepError        the steps of a training loop do not follow each other
├── DriftError       a patched function of the framework no longer matches its declaration
├── UnsupportedError the parallel layout, or a mode, cannot be protected
├── ResumeError      a checkpoint is damaged, and there is none to go on from in its place
├── CheckpointError  a checkpoint cannot be written, published or trusted
└── StoreError       an object store is not named well, refuses, or does not answer
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


class StepError(AdaptorError):
    """The step numbers of a training loop do not follow each other."""


class DriftError(AdaptorError):
    """A patched function of the framework does not have the signature declared by its patch."""


class UnsupportedError(AdaptorError):
    """The parallel layout, or a mode of the framework, cannot be protected."""


class ResumeError(AdaptorError):
    """The checkpoint to resume from is damaged, and no other checkpoint may be used in its place."""


class CheckpointError(AdaptorError):
    """A checkpoint cannot be written, published or trusted."""


class StoreError(AdaptorError):
    """An object store has a wrong name, refuses, does not answer, or has no usable content."""


def say_in_one_line() -> None:
    """Print an AdaptorError that leaves the script as one line, without a traceback."""
    previous = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, AdaptorError):
            # Imported here: with ENABLE_TTP=False it must not be imported, because it registers a fork hook.
            from adaptor import output

            output.tell(f"adaptor: error: {error}")
        else:
            previous(kind, error, trace)

    sys.excepthook = say

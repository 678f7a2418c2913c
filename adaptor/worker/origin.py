"""The origin of an exception: an identity, which the controller compares, and whether a restart can help."""

from __future__ import annotations

import argparse
import importlib.util
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from adaptor import text
from adaptor.errors import StepError
from adaptor.protocol.messages import Origin, ScriptStage


def _folders() -> Iterator[str]:
    """Yield the folders of the adaptor's parts in a checkout."""
    for name in ("adaptor.launchers", "adaptor.patches"):
        spec = importlib.util.find_spec(name)
        yield from (spec.submodule_search_locations or ()) if spec is not None else ()


# Code other than the user's: Python's own, installed packages, and the adaptor, also in a checkout.
_OTHERS = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).resolve().parents[1]), *_folders()}
    | {"<frozen "}
)
# torch's messages about a missing accelerator; torch has no exception type for the case.
_NO_DEVICE = (
    "Found no NVIDIA driver",
    "The NVIDIA driver on your system is too old",
    "No CUDA GPUs are available",
    "Torch not compiled with CUDA enabled",
)
# Types of errors in the code, its arguments or a checkpoint.
_LASTING = (
    *(AssertionError, TypeError, AttributeError, NameError, KeyError, IndexError, ValueError),
    *(ImportError, NotImplementedError, SyntaxError),
)
# The same in errors of other types: torch's about shapes, Megatron-LM's about a checkpoint.
_LASTING_WORDS = (
    *("Error(s) in loading state_dict", "size mismatch", "Global shape mismatch"),
    *("shapes cannot be multiplied", "is invalid for input of size"),
)
# Errors of a device or of the system, which libraries also wrap in the lasting types.
_OF_THE_SYSTEM = (
    *("CUDA error", "CUDA out of memory", "NPU error", "NPU out of memory"),
    *("allocate memory", "can't start new thread"),
)
# argparse's exit code for refused arguments.
_USAGE = 2


def origin_of(error: BaseException, finished: int, stage: int, *, trains: bool, is_restart: bool) -> Origin:
    """Return the identity of `error`, which has left the script.

    Args:
        finished: the step that this rank has finished, -1 before training.
    """
    # In training the steps of a loop that calls the adaptor wrongly; no start, and no repetition, mends that.
    mistake = not is_restart and (isinstance(error, StepError) if trains else _is_a_mistake(error))
    lasting = (not trains or stage != ScriptStage.TRAINING) and _is_lasting(error)
    kind, may_be_echo = type(error).__name__, may_be_an_echo(error)
    return Origin(kind, _where(error), finished, mistake, lasting, may_be_echo)


def calls_of(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each call, the innermost last; no file is read, for its disk may hang."""
    walk = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in walk]


# Of an exception, in the report of an incident: each rank of thousands may send them.
INNERMOST = 20


def outline(error: BaseException) -> str:
    """Return the calls and the message of `error` as in a traceback, without source lines."""
    return text.encodable("\n".join([*_lines(calls_of(error)), text.describe(error)]), text.PAGE)


def innermost(error: BaseException) -> str:
    """Return the innermost calls of `error`, the last one last."""
    return text.encodable("\n".join(_lines(calls_of(error)[-INNERMOST:])), text.PAGE)


def _lines(calls: list[tuple[str, int]]) -> list[str]:
    return [f'  File "{path}", line {line}' for path, line in calls]


def may_be_an_echo(error: BaseException) -> bool:
    """Return whether `error` may be no more than another rank's death, as a collective tells of it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = text.say(error)
    return any(name in message for name in ("gloo", "NCCL", "HCCL"))


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    calls = calls_of(error)
    own_calls = [call for call in calls if not call[0].startswith(_OTHERS)]
    return "".join(f"{Path(path).name}:{line}" for path, line in (own_calls or calls)[-1:])


def _is_a_mistake(error: BaseException) -> bool:
    if isinstance(error, ImportError | SyntaxError):
        return True
    if isinstance(error, SystemExit):
        return error.code == _USAGE and any(path == argparse.__file__ for path, _ in calls_of(error))
    return any(phrase in text.say(error) for phrase in _NO_DEVICE)


def _is_lasting(error: BaseException) -> bool:
    """Return whether `error` shows that the code, its arguments or a checkpoint are wrong.

    Any other cause may have passed at the next start, even if the script has raised another exception because
    of the first.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return all(map(_depends_on_the_job, chain))


def _depends_on_the_job(error: BaseException) -> bool:
    message = text.say(error)
    if (
        isinstance(error, OSError)
        or may_be_an_echo(error)
        or any(phrase in message for phrase in _OF_THE_SYSTEM)
    ):
        return False
    is_failure = isinstance(error, Exception)
    return isinstance(error, _LASTING) or (is_failure and any(phrase in message for phrase in _LASTING_WORDS))

"""Decides, when a script parses Megatron-LM's arguments, whether a protected training loop will run.

Only then is the job claimed (`adaptor.patching.claim`): a framework with its own training loop may use the
parser, too. The parser runs before process groups are made, and before the loop is called. So names decide:
code on the call stack of the parser has the loop among its names, because the code is the module of the loop
(`pretrain` calls the parser) or has imported the loop to call it.
"""

from __future__ import annotations

import sys
import traceback

from adaptor import patching
from adaptor.patching import is_gone

_LOOP = "megatron.training.training"
_ENTRIES = ("pretrain", "train")
# Frameworks that use Megatron-LM's parser, and whose scripts have no loop but theirs, which is protected.
_OTHERS = ("mindspeed_llm.training.training", "modellink.training")


def claim_if_protected() -> bool:
    """Claim the job if its script will run a protected training loop; called from the parser.

    Returns:
        True if the job is claimed.

    Raises:
        DriftError: a patch does not fit the framework.
    """
    if not patching.is_claimed("ttp") and _will_be_protected():
        patching.claim("ttp")
    return patching.is_claimed("ttp")


def _will_be_protected() -> bool:
    if any(name in sys.modules for name in _OTHERS):
        return True
    loop = sys.modules.get(_LOOP)
    if loop is None:
        return is_gone(_LOOP)  # a version that has moved the loop is refused
    entries = {id(vars(loop)[name]) for name in _ENTRIES if name in vars(loop)}
    frame = sys._getframe().f_back
    while frame is not None:
        for names in (frame.f_globals, frame.f_locals):
            if not entries.isdisjoint(map(id, names.values())):
                return True
        frame = frame.f_back
    return False


_CALLS_OF_PRETRAIN = tuple(
    {(module, "pretrain")} for module in ("megatron.training.training", "flagscale.train.train")
)
_PACKAGES = ("megatron.", "flagscale.")
_LOGGERS = "megatron.training.one_logger_utils"


def loggers_are_the_cause(error: BaseException) -> bool:
    """Return whether a logger has raised `error`, behind the last save and the last evaluation.

    After its training loop `pretrain` saves, evaluates, ends the run of W&B, waits for an asynchronous save,
    and ends the run of one_logger. Exceptions of loggers come from `pretrain` itself, not from another
    function of the framework. An asynchronous save may not be whole at the end of W&B's run: then the answer
    is no.
    """
    from megatron.training import get_args

    if getattr(get_args(), "async_save", False):
        return False
    calls = [
        (str(frame.f_globals.get("__name__")), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    of_the_framework = {call for call in calls if call[0].startswith(_PACKAGES) and call[0] != _LOGGERS}
    return of_the_framework in _CALLS_OF_PRETRAIN

"""Distinguishes exceptions of Megatron-LM's loggers after training from exceptions of a save or an
evaluation.

After its training loop `pretrain` saves, evaluates, ends the run of W&B, waits for an asynchronous save, and
ends the run of one_logger. Exceptions of loggers come from `pretrain` itself, not from another function of
the framework.
"""

from __future__ import annotations

import traceback

_OWN = tuple({(module, "pretrain")} for module in ("megatron.training.training", "flagscale.train.train"))
_PACKAGES = ("megatron.", "flagscale.")
_LOGGERS = "megatron.training.one_logger_utils"


def are_the_cause(error: BaseException) -> bool:
    """Return whether a logger has raised `error`, behind the last save and the last evaluation.

    An asynchronous save may not be whole at the end of W&B's run: then the answer is no.
    """
    from megatron.training import get_args

    if getattr(get_args(), "async_save", False):
        return False
    calls = [
        (str(frame.f_globals.get("__name__")), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    of_the_framework = {call for call in calls if call[0].startswith(_PACKAGES) and call[0] != _LOGGERS}
    return of_the_framework in _OWN

"""Wrappers that keep the data for the log line of a step, for frameworks with online recovery.

An exception, or a death, between the update and the line would lose the data
(`adaptor/frameworks/step_log.py`).
"""

from __future__ import annotations

from typing import Any


def norms_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps functions that return the norm of the gradients."""
    from adaptor.frameworks import loop_recovery

    norm = wrapped(*args, **kwargs)
    if (log := loop_recovery.log_of_this_process()) is not None:
        log.add_norm(norm=float(norm or 0.0))
    return norm


def overflows_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps functions that return whether an overflow skips the step."""
    from adaptor.frameworks import loop_recovery

    overflows = wrapped(*args, **kwargs)
    if overflows and (log := loop_recovery.log_of_this_process()) is not None:
        log.skip()
    return overflows

"""MindSpeed-LLM's training loop in an online recovery. Armed only where TTP_ONLINE is not 0."""

from __future__ import annotations

import sys
from typing import Any

from adaptor import patching
from adaptor.frameworks.tested_versions import MINDSPEED

_LOOP = "mindspeed_llm"  # the package with such a loop

online = patching.Unit("mindspeed-llm-online", framework="mindspeed_llm", tested=MINDSPEED, group="online")


@online.patch(
    "mindspeed_llm.training.training:num_floating_point_operations",
    why="the loop counts operations from 0 when it is called again after an incident, and saves the count",
    optional=True,
    unless_imported=True,  # since 2.3 it has one of its own
)
@online.patch(
    "megatron.training.training:num_floating_point_operations",
    why="before MindSpeed-LLM 2.3 the loop counts operations with Megatron's function",
    optional=True,
)
def operations_are_not_forgotten(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    counted = wrapped(*args, **kwargs)
    if _LOOP not in sys.modules:  # Megatron-LM's own loop calls it several times in a step, and forgets none
        return counted
    from adaptor.frameworks import megatron_online

    return counted + megatron_online.missing_operations()


@online.patch(
    "mindspeed_llm.tasks.utils.error_utils:check_equal",
    why="fine-tuning counts the ranks that have come to the indices of the data; a new process comes alone",
    optional=True,
)
def newcomers_come_alone(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.online import rejoin

    if rejoin.is_newcomer() and args and type(args[0]) is int and args[0] == 1:
        return None
    return wrapped(*args, **kwargs)

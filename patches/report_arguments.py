"""Stops a script for `python -m adaptor report`, once its framework has validated its arguments."""

from __future__ import annotations

from typing import Any

from adaptor import patching, preflight
from adaptor.frameworks import megatron_training
from adaptor.frameworks.tested_versions import MEGATRON_SPECIFIER, MODELLINK

megatron = patching.Unit("report", framework="megatron-lm", tested=MEGATRON_SPECIFIER, group="report")
ascendspeed = patching.Unit("ascendspeed-report", framework="ascendspeed", tested=MODELLINK, group="report")


@megatron.patch(
    "megatron.training.global_vars:set_global_variables",
    why="the arguments are final here, and nothing has been built",
    accepts="(args, ...)",
    optional=True,
)
def megatrons_arguments_are_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if patching.is_claimed("ttp"):
        megatron_training.examine(args[0] if args else kwargs["args"])
    raise preflight.Stop


@ascendspeed.patch(
    "ascendspeed.global_vars:set_global_variables",
    why="the arguments are final here, and nothing has been built",
    optional=True,
)
def modellinks_arguments_are_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    raise preflight.Stop

"""Megatron-LM in an online recovery: how a process that takes the place of another starts.

Armed only where TTP_ONLINE is not 0. It builds model and data as at any start, with process groups in which
it is alone, loads nothing, and takes from a survivor where the job is. `training_can_be_saved` does the rest.
"""

from __future__ import annotations

from typing import Any

from adaptor import patching
from adaptor.patches._versions import MEGATRON

newcomer = patching.Unit("newcomer", framework="megatron-lm", tested=MEGATRON, group="online")


@newcomer.patch(
    "megatron.training.training:setup_model_and_optimizer",
    why="a new process among survivors loads no checkpoint, and knows the step before it builds its data",
    accepts="(...)",
    optional=True,
)
def newcomers_load_nothing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    from adaptor.frameworks import megatron_online

    if not megatron_online.is_newcomer():
        return wrapped(*args, **kwargs)
    with megatron_online.loads_nothing(get_args()):
        made = wrapped(*args, **kwargs)
    megatron_online.take_place(get_args())
    return made


@newcomer.patch(
    "megatron.training.training:build_train_valid_test_data_iterators",
    why="what ranks tell each other of their data, a new process among survivors is told by one of them",
    accepts="(...)",
    optional=True,
)
def newcomers_are_told_of_data(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import megatron_online

    made = wrapped(*args, **kwargs)
    if megatron_online.is_newcomer():
        megatron_online.take_answers()
    return made

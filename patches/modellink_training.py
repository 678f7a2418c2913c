"""ModelLink 1.2, on Megatron-core 0.6: its training loop has its own name.

The other patches for ModelLink 1.2 are patches on Megatron-LM, by MindSpeed's classes (`mindspeed.py`).
"""

from __future__ import annotations

from typing import Any

from adaptor import patching
from adaptor.frameworks import megatron_training
from adaptor.worker import runtime

training = patching.Unit("modellink", framework="modellink", tested="1.2")


@training.patch(
    "modellink.training:train",
    why="the framework has a training loop of its own, and the training state is complete here",
    accepts="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
)
def its_training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # It counts its floating-point operations from 0, also where it goes on from a checkpoint.
    megatron_training.begin_training(args, kwargs, operations=0)
    trained = wrapped(*args, **kwargs)
    runtime.get().session.end_training()
    return trained

"""Megatron-core's schedules: another rank repeats the first micro-batch of a step (TTP_REPLAY_EVERY)."""

from __future__ import annotations

from typing import Any

from adaptor import context, patching
from adaptor.frameworks import state_comparison
from adaptor.frameworks.tested_versions import MEGATRON_SPECIFIER

replay = patching.Unit("replay", framework="megatron-core", tested=MEGATRON_SPECIFIER)


@replay.patch(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    why="a wrong gradient is found before the update, by another rank that computes it again",
    accepts="(...)",
    optional=True,
)
def micro_batches_are_repeated(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return state_comparison.with_replays(wrapped(*args, **kwargs))


@replay.patch(
    "megatron.core.pipeline_parallel.schedules:backward_step",
    why="behind the first backward pass the buffers have the gradients of one micro-batch",
    accepts="(...)",
    optional=True,
)
def gradients_are_summed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if context.get().settings.replay_every:
        from adaptor.frameworks.megatron_replay import Replays  # torch, which is for the script to import

        context.part(Replays).after_backward()
    return result


@replay.patch(
    "megatron.core.pipeline_parallel.schedules:forward_step",
    why="a repeated micro-batch has the share in the loss that it had in its step",
    accepts="(forward_step_func, data_iterator, model, num_microbatches, ...)",
    optional=True,
)
def losses_are_divided_alike(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if context.get().settings.replay_every:
        from adaptor.frameworks.megatron_replay import Replays

        if number := context.part(Replays).micro_batches:
            if "num_microbatches" in kwargs:
                kwargs = {**kwargs, "num_microbatches": number}
            else:
                args = (*args[:3], number, *args[4:])
    return wrapped(*args, **kwargs)

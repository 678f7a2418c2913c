"""The training state of a script that uses Megatron-core as a library, and its checkpoint from host copies.

The script loads checkpoints by itself, and announces the load by `adaptor.write_host_copies`, right before it
looks for what to load. A copy has the entries of `extra` as they were behind its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from adaptor import context, devices
from adaptor.checkpoint import step_record
from adaptor.checkpoint.training_state import (
    CheckpointContents,
    CheckpointPlacement,
    TrainingState,
    in_format,
    place_of,
    unwrapped,
)
from adaptor.context import Context
from adaptor.devices.device import Device
from adaptor.errors import UnsupportedError
from adaptor.host_copy import rebuild, start
from adaptor.protocol.environment import Generation
from adaptor.protocol.naming import model_parallel_folder
from adaptor.replica import twin


class CopiesAsked:
    """A mark in the context of a process.

    Attributes:
        asked: its script has asked for a checkpoint from host copies
    """

    def __init__(self, _context: Context) -> None:
        self.asked = False


def require_asked() -> None:
    """Refuse TTP_HOST_COPY in a script that would not go on from the copies. Raises UnsupportedError."""
    if context.get().settings.host_copy and not context.part(CopiesAsked).asked:
        raise UnsupportedError(
            "TTP_HOST_COPY is set: a loop of your own goes on from copies in host memory only where it calls"
            " adaptor.write_host_copies before it loads; do so, or leave it out"
        )


def folder_of_rank() -> str:
    """Return the name of the folder of this rank's files in a checkpoint."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    experts = parallel_state.get_expert_model_parallel_world_size()
    return model_parallel_folder(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank() if stages > 1 else None,
        parallel_state.get_expert_model_parallel_rank() if experts > 1 else None,
    )


def training_state(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    extra: Mapping[str, Any] | None,
    place: CheckpointPlacement,
    format: str,
    contents: CheckpointContents,
) -> TrainingState:
    """Return this rank's part of a checkpoint.

    Args:
        model: the chunks of the model.
        optimizer: the chain of optimizers.
        scheduler: of the learning rate; None: no scheduler.
        extra: further entries.
        place: the place of this rank in checkpoints.
        format: of the checkpoint.
        contents: the further contents of the framework's checkpoints.
    """
    state = TrainingState(
        model=[unwrapped(chunk) for chunk in model],
        optimizer=optimizer,
        scheduler=scheduler,
        folder=folder_of_rank(),
        extra=extra or {},
        stored=place.stored,
        keeps=contents.keeps,
        contents=contents,
        writes_common=place.first == 0,
    )
    return in_format(format, state, place.first, "format")


def write_host_copies(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    save: Path,
    extra: Mapping[str, Any] | None,
    format: str,
    contents: CheckpointContents,
) -> int | None:
    """Implement `adaptor.write_host_copies` in a process that trains with others.

    Args:
        model, optimizer, scheduler, extra, format, contents: see `training_state`.
        save: the save folder.
    """
    context.part(CopiesAsked).asked = True
    if context.get().settings.host_copy == 0 or not context.part(Generation).is_restart:
        return None
    none_mirrored = (None,) * len(step_record.chain(optimizer))

    def describe() -> tuple[TrainingState, CheckpointPlacement, Device]:
        everyone = dist.group.WORLD
        assert everyone is not None
        mains = (
            param
            for inner_optimizer in step_record.inner(optimizer)
            for param in twin.params(inner_optimizer)
        )
        weights = (param for chunk in model for param in chunk.parameters())
        device = devices.of(itertools.chain(mains, weights), context.get().settings.device)
        place = place_of(optimizer, none_mirrored, folder_of_rank(), everyone)
        state = training_state(model, optimizer, scheduler, extra, place, format, contents)
        return state, place, device

    written = rebuild.write_newest(save.resolve(), optimizer, describe)
    start.require_training()
    return written

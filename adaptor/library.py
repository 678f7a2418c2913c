"""For scripts that use Megatron-core as a library, and have a training loop of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptor.control.session import Session


class Protection:
    """What `adaptor.protect` returns: tell it when a step begins."""

    def __init__(self, session: Session | None) -> None:
        self._session = session

    def begin_step(self, step: int) -> None:
        """`step` (from 1) begins on this rank; optimizer and scheduler are done with the one before."""
        if self._session is not None:
            self._session.begin_step(step)


def protect(
    *,
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    step: int = 0,
    scheduler: Any = None,
    samples_per_step: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> Protection:
    """See `adaptor.protect`."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.package_info import __version__

    from adaptor import patching
    from adaptor.checkpoint import folder, publish, records
    from adaptor.checkpoint.megatron import TrainingState, unwrapped
    from adaptor.checkpoint.naming import model_parallel_folder
    from adaptor.checkpoint.rng import RandomStates
    from adaptor.checkpoint.trainee import MegatronTrainee, local_copy_of, place_of, replicas_of
    from adaptor.control import runtime
    from adaptor.errors import LayoutError
    from adaptor.replica import group, layout

    patching.check("ttp")
    if not hasattr(parallel_state, "get_expert_data_parallel_world_size"):
        raise LayoutError(
            f"Megatron-core is {__version__}: adaptor.protect needs 0.10 or later; set ENABLE_TTP=False"
        )
    layout.require_protected(optimizer.config, model[0].config, model[0].ddp_config)
    if model[0].config.num_moe_experts is not None:
        layout.require_folders_for_experts(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
    folder.require_writable(save)
    folder.require_newest(save, step)
    if torch.distributed.get_rank() == 0:
        publish.clean(Path(save))
    where = model_parallel_folder(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank()
        if parallel_state.get_pipeline_model_parallel_world_size() > 1
        else None,
        parallel_state.get_expert_model_parallel_rank()
        if parallel_state.get_expert_model_parallel_world_size() > 1
        else None,
    )
    everyone = group.of_everyone()
    mirrors = replicas_of(
        optimizer,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_world_size(),
    )
    place = place_of(optimizer, mirrors, where, everyone)
    trainee = MegatronTrainee(
        state=TrainingState(
            model=[unwrapped(chunk) for chunk in model],
            optimizer=optimizer,
            scheduler=scheduler,
            folder=where,
            extra=extra or {},
            stored=place.stored,
        ),
        save=str(Path(save).resolve()),
        shares=place.shares,
        random=RandomStates(tensor_parallel.get_cuda_rng_tracker()),
        counters=dict,
        growth=dict,
        increment=lambda: samples_per_step,
        barrier=lambda: torch.distributed.barrier(group=everyone),
        mirrors=mirrors,
        local_copy=local_copy_of(optimizer, mirrors),
    )
    session = runtime.get().session
    session.begin_training(trainee, records.inner(optimizer), step)
    return Protection(session)

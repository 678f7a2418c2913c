"""Megatron-LM's checkpoints: complete under their final names, or absent; intact when loaded.

While `save_checkpoint` runs, its folder has a temporary name. The framework asks for the name of the tracker
file when every rank has written: at this moment rank 0 gives the folder its final name and replaces the
tracker. An asynchronous save gets its name when the framework finds that every rank has written.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from adaptor import context, patching
from adaptor.checkpoint.divided_reading import CheckedFiles
from adaptor.frameworks import adapter_base, checkpoint_load, megatron_restart, state_comparison
from adaptor.frameworks.failed_saves import SaveFailedError
from adaptor.frameworks.megatron_restart import ChosenStep
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.frameworks.tested_versions import MEGATRON_SPECIFIER, SINCE_0_7
from adaptor.worker import runtime

checkpointing = patching.Unit("checkpointing", framework="megatron-lm", tested=MEGATRON_SPECIFIER)


@checkpointing.patch(
    "megatron.training.checkpointing:save_checkpoint",
    why="a regular save that is cut short must not leave half a checkpoint under a final name",
    accepts="(iteration, model, optimizer, opt_param_scheduler, ...)",
)
def regular_saves_are_complete(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    iteration = args[0] if args else kwargs["iteration"]
    asynchronous = bool(getattr(get_args(), "async_save", False))
    saves, session = context.part(RegularSaves), runtime.get().session
    with contextlib.suppress(SaveFailedError), session.phase("save"):  # after a failed save all ranks go on
        session.before_save()
        with saves.regular(
            get_args().save, iteration, asynchronous, may_fail=True, agree=state_comparison.agree
        ):
            with saves.noting():
                adapter_base.write_beside(get_args().save, iteration)
            return wrapped(*args, **kwargs)


@checkpointing.patch(
    "megatron.training.checkpointing:get_checkpoint_name",
    why="a regular save goes to a folder of its own until every rank has written",
    accepts="(checkpoints_path, iteration, release=, ...)",
)
def regular_saves_have_a_name_of_their_own(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(RegularSaves).renamed(wrapped(*args, **kwargs))


@checkpointing.patch(
    "megatron.training.checkpointing:get_checkpoint_tracker_filename",
    why="every rank has written: the folder gets its final name before the tracker names it",
    accepts="(checkpoints_path)",
)
def the_tracker_comes_last(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(RegularSaves).tracker(wrapped(*args, **kwargs))


@checkpointing.patch(
    "megatron.training.async_utils:schedule_async_save",
    why="an asynchronous save gets its final name when the last file is written",
    accepts="(async_request)",
    optional=SINCE_0_7,
)
def asynchronous_saves_are_named_at_their_end(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    import torch.distributed as dist
    from megatron.training import get_args

    # The last rank tells Weights & Biases, and rank 0 gives the name.
    meet = dist.barrier if getattr(get_args(), "wandb_project", "") else lambda: None
    context.part(RegularSaves).scheduled(args[0] if args else kwargs["async_request"], meet)
    return wrapped(*args, **kwargs)


@checkpointing.patch(
    "megatron.training.async_utils:maybe_finalize_async_save",
    why="an asynchronous save that has failed is no fault of the step in which that is found",
    optional=True,
)
def asynchronous_saves_may_fail(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(RegularSaves).finalize(lambda: wrapped(*args, **kwargs))


@checkpointing.patch(
    "megatron.training.wandb_utils:on_save_checkpoint_success",
    why="Weights & Biases looks into the folder of a save, and keeps its name: it has the final one by then",
    accepts="(checkpoint_path, tracker_filename, save_dir, iteration)",
    optional=True,  # since 0.11
)
def wandb_is_told_the_final_name(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    names = ("checkpoint_path", "tracker_filename", "save_dir", "iteration")
    call_arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    path, tracker, *further_arguments = (call_arguments[name] for name in names)
    context.part(RegularSaves).tell(path, tracker, lambda *named: wrapped(*named, *further_arguments))


@checkpointing.patch(
    "megatron.training.checkpointing:load_checkpoint",
    why="a checkpoint that was damaged after its save is set aside; the newest intact one is loaded",
    accepts=(
        "(ddp_model, optimizer, opt_param_scheduler, load_arg=, ...)",
        "(model, optimizer, opt_param_scheduler, load_arg=, ...)",  # up to 0.11
    ),
)
def what_is_loaded_is_intact(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with runtime.get().session.pace.loading(), context.part(CheckedFiles).loading():
        return checkpoint_load.load(wrapped, args, kwargs)


@checkpointing.patch(
    "megatron.training.checkpointing:read_metadata",
    why="--ckpt-step names the step of the distributed optimizer too: the framework asks the tracker for it",
    accepts="(tracker_filename)",
)
def the_chosen_step_is_loaded_whole(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    step = context.part(ChosenStep).instead_of(args[0] if args else kwargs["tracker_filename"])
    return wrapped(*args, **kwargs) if step is None else (step, False)


@checkpointing.patch(
    "megatron.training.checkpointing:_load_base_checkpoint",
    why="adapters are loaded with the base that they name, and a save without optimizer without one",
    accepts="(load_dir, ...)",
    optional=True,  # only with LoRA and --no-save-optim, and then missed where it is not there
)
def incomplete_checkpoints_are_loaded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    loaded = adapter_base.load_with_base(wrapped, args, kwargs)
    megatron_restart.accept_what_is_missing(loaded[0])
    return loaded


_CORE = "megatron.core.dist_checkpointing"
_WRITER = f"{_CORE}.strategies.filesystem_async:FileSystemWriterAsync"

# A separate unit: a custom training loop on Megatron-core imports these writers, and nothing of Megatron-LM's
# `save_checkpoint`.
dist_checkpointing = patching.Unit("dist-checkpointing", framework="megatron-core", tested=MEGATRON_SPECIFIER)


@dist_checkpointing.patch(
    f"{_WRITER}.write_preloaded_data",
    why="the tensors of a regular save get checksums where they are written, before the save goes on",
    optional=True,  # up to 0.6; without it, tensors of torch_dist have no checksums
)
def tensors_of_a_regular_save_are_hashed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # In a process or thread of the framework's own, of several that write at the same time.
    if kwargs.get("write_bucket") is None or kwargs.get("results_queue") is None:
        return wrapped(*args, **kwargs)
    (path, _, (_, tensors)), results = kwargs["write_bucket"], kwargs["results_queue"]
    sums = partial(state_comparison.sums_of, path, tensors)
    hashing = context.part(RegularSaves).hashing(path, results, sums)
    return wrapped(*args, **{**kwargs, "results_queue": hashing})


@dist_checkpointing.patch(
    f"{_WRITER}.prepare_write_data",
    why="the tensors of a regular save are compared with the state in memory, and with what is written later",
    accepts="(plan, planner)",
    optional=True,
)
def planned_tensors_are_compared(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    planned = wrapped(*args, **kwargs)
    with context.part(RegularSaves).noting():
        state_comparison.plan(instance, args[1] if len(args) > 1 else kwargs["planner"])
    return planned


@dist_checkpointing.patch(
    f"{_WRITER}.retrieve_write_results",
    why="a rank whose writers have failed joins the gather of results, in which all other ranks wait for it",
    accepts="()",
    optional=True,
)
def failed_writers_have_no_results(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    saves = context.part(RegularSaves)
    with saves.noting():
        results = wrapped(*args, **kwargs)  # up to 0.13 and in 0.15.0rc5 it raises; else it returns the error
        if saves.notes_errors and isinstance(results, tuple):
            raise results[0]
        state_comparison.require_written(instance.checkpoint_dir)
        return results
    return []


def errors_of_storage_are_noted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with context.part(RegularSaves).noting():
        return wrapped(*args, **kwargs)


for _unit, _target, _what in (
    (checkpointing, "megatron.training.checkpointing:ensure_directory_exists", "a folder that is not made"),
    (dist_checkpointing, f"{_WRITER}.finish", "metadata that cannot be written"),
    (dist_checkpointing, f"{_CORE}.core:save_config", "a file of the format that cannot be written"),
):
    _unit.patch(
        _target,
        why=f"{_what} is noted on this rank: all ranks learn it at the next barrier of the save",
        optional=True,
    )(errors_of_storage_are_noted)

"""Megatron-LM's checkpoints: complete under their final names, or absent; intact when loaded.

While `save_checkpoint` runs, its folder has a temporary name. The framework asks for the name of the tracker
file when every rank has written: at this moment rank 0 gives the folder its final name and replaces the
tracker. An asynchronous save gets its name when the framework finds that every rank has written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptor import context, hooks, patching
from adaptor.checkpoint import resume_check
from adaptor.checkpoint.divided_reading import CheckedFiles
from adaptor.frameworks import adapter_base, compared_save, loaded_state, megatron_restart
from adaptor.frameworks.failed_saves import SaveFailedError
from adaptor.frameworks.megatron_restart import ChosenStep
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.patches._versions import MEGATRON, SINCE_0_7
from adaptor.protocol.environment import Generation, HeldCopies
from adaptor.worker import runtime

checkpointing = patching.Unit("checkpointing", framework="megatron-lm", tested=MEGATRON)


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
            get_args().save, iteration, asynchronous, may_fail=True, agree=compared_save.agree
        ):
            with saves.noting():
                adapter_base.write_beside(get_args().save, iteration)
            return wrapped(*args, **kwargs)


@checkpointing.patch(
    "megatron.training.checkpointing:ensure_directory_exists",
    why="where a rank cannot make a folder of its save, all ranks learn it at the next barrier",
    accepts="(filename, ...)",
    optional=True,
)
def folders_that_cannot_be_made_are_noted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with context.part(RegularSaves).noting():
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
    accepts="(...)",
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
        return _load(wrapped, args, kwargs)


def _load(wrapped: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    from adaptor.host_copy import start  # torch, which is for the script to import

    megatron_args = get_args()
    load_arg = args[3] if len(args) > 3 else kwargs.get("load_arg", "load")
    model, optimizer, scheduler = _loaded_into(args, kwargs)
    if optimizer is None and getattr(megatron_args, "stage", None) == "dpo":
        return wrapped(*args, **kwargs)  # the reference model, also in a restart from its own folder
    is_restart, may_have = context.part(Generation).is_restart, bool(context.part(HeldCopies).paths)
    copies = may_have and is_restart and load_arg == "load"
    if copies:
        _write_host_copies(model, optimizer, scheduler)
        start.require_training()

    def check() -> None:
        _require_intact(load_arg, optimizer)

    def write() -> None:
        if copies:  # where the newest checkpoint was damaged, they may be newer than the one that is loaded
            _write_host_copies(model, optimizer, scheduler)

    if load_arg == "load":
        megatron_restart.settle(megatron_args, check, write)
    else:
        check()
    if load_arg == "load" and megatron_args.load:
        for hook in hooks.of_worker():
            hook.before_load(megatron_args)
    load = getattr(megatron_args, load_arg)
    is_filtered = adapter_base.is_filtered(megatron_args)
    if is_filtered:
        adapter_base.settle(Path(load), Path(megatron_args.save))
    all_of_it = megatron_restart.load_what_is_saved(megatron_args, scheduler)
    chosen = context.part(ChosenStep).loading(megatron_args, None if is_filtered else load)

    def load_once() -> Any:
        return wrapped(*args, **kwargs)

    def refuse(step: int, reason: str) -> None:
        _require_intact(load_arg, optimizer, {step: reason})

    with chosen, all_of_it if load_arg == "load" else contextlib.nullcontext():
        if load_arg == "load":
            loaded = loaded_state.load(load_once, refuse, model, optimizer, scheduler)
        else:
            loaded = load_once()
    if is_filtered:
        adapter_base.require_added()
    return loaded


@checkpointing.patch(
    "megatron.training.checkpointing:read_metadata",
    why="--ckpt-step names the step of the distributed optimizer too: the framework asks the tracker for it",
    accepts="(tracker_filename)",
)
def the_chosen_step_is_loaded_whole(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    step = context.part(ChosenStep).instead_of(args[0] if args else kwargs["tracker_filename"])
    return wrapped(*args, **kwargs) if step is None else (step, False)


def _require_intact(load_arg: str, optimizer: Any, refused: Mapping[int, str] | None = None) -> None:
    from megatron.training import get_args
    from megatron.training.checkpointing import checkpoint_exists

    from adaptor.frameworks.loaded_files import loaded_here  # torch, which is for the script to import

    megatron_args = get_args()
    pretrained = getattr(megatron_args, "pretrained_checkpoint", None)
    for folder in filter(
        None, (getattr(megatron_args, load_arg), pretrained)
    ):  # the second where the first is empty
        chosen = getattr(megatron_args, "ckpt_step", None) or None
        loads = loaded_here(folder, optimizer)
        resume_check.require_intact(Path(folder), Path(megatron_args.save), chosen, loads, refused)
        if checkpoint_exists(folder):
            break


def _write_host_copies(model: Any, optimizer: Any, scheduler: Any) -> None:
    from adaptor.frameworks import megatron_lm

    if optimizer is not None:
        megatron_lm.write_host_copies(model, optimizer, scheduler)


def _loaded_into(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return model, optimizer and scheduler from the arguments of the framework's `load_checkpoint`."""
    names = ("ddp_model", "optimizer", "opt_param_scheduler")
    call_arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    model = call_arguments["ddp_model"] if "ddp_model" in call_arguments else call_arguments["model"]
    return model, call_arguments.get("optimizer"), call_arguments.get("opt_param_scheduler")


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

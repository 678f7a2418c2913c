"""Megatron-Bridge: `train` is called again after a fault, and last words have the layout of saves.

A checkpoint of Megatron-Bridge is `torch_dist` with `train_state.pt` and `run_config.yaml`. A load reads the
copy `latest_train_state.pt` in the save folder first.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import adaptor
from adaptor import patching

bridge = patching.Unit("megatron-bridge", framework="megatron-bridge", tested=">=0.3,<0.4")

TRACKER = "latest_checkpointed_iteration.txt"
COUNTERS = (
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"),
    "floating_point_operations_so_far",
)
_TRAIN = (
    *("forward_step_func", "model", "optimizer", "scheduler"),
    *("train_data_iterator", "valid_data_iterator", "global_state"),
)


@bridge.patch(
    "megatron.bridge.training.setup:setup",
    why="options that cannot be protected are refused before anything is built; a restart uses its saves",
    accepts="(state, ...)",
)
def a_restart_loads_what_was_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    state = args[0] if args else kwargs["state"]
    for refusal in refused(state.cfg):
        raise adaptor.UnsupportedError(f"{refusal}; change it, or set ENABLE_TTP=False")
    adaptor.enable()  # before process groups are made
    _load_own_saves(state.cfg.checkpoint)
    state.cfg.optimizer.ttp_state = state  # `copies_become_a_checkpoint` is called without the state
    return wrapped(*args, **kwargs)


def _load_own_saves(checkpoint: Any) -> None:
    """Let a restart load the newest checkpoint of the job, if the job has saved."""
    if adaptor.is_restart() and (Path(checkpoint.save) / TRACKER).exists():
        checkpoint.load, checkpoint.finetune, checkpoint.ckpt_step = checkpoint.save, False, None
        checkpoint.load_optim, checkpoint.load_rng = True, True
        checkpoint.load_main_params_from_ckpt = False


@bridge.patch(
    "megatron.bridge.training.optim:setup_optimizer",
    why="copies in host memory become a checkpoint, which is loaded next",
    accepts="(optimizer_config, scheduler_config, model, ...)",
)
def copies_become_a_checkpoint(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    config = args[0] if args else kwargs["optimizer_config"]
    model = kwargs["model"] if "model" in kwargs else args[2]
    state = config.__dict__.pop("ttp_state", None)
    optimizer, scheduler = wrapped(*args, **kwargs)
    if state is not None:
        adaptor.write_host_copies(**_parts(state, model, optimizer, scheduler))
        _load_own_saves(state.cfg.checkpoint)
    return optimizer, scheduler


def _parts(state: Any, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the common arguments of `protect` and `write_host_copies`."""
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "save": state.cfg.checkpoint.save,
        "format": "torch_dist",
        "contents": _contents(state, model),
    }


def refused(cfg: Any) -> Iterator[str]:
    """Yield the reasons against the protection of a job, each with its option."""
    checkpoint, optimizer, model = cfg.checkpoint, cfg.optimizer, cfg.model
    if not checkpoint.save:
        yield "checkpoint.save is None: last words need a folder"
    if checkpoint.ckpt_format != "torch_dist":
        yield f"checkpoint.ckpt_format is {checkpoint.ckpt_format!r}: last words are in torch_dist alone"
    for name in ("save_optim", "save_rng"):
        if not getattr(checkpoint, name, True):
            yield f"checkpoint.{name} is False: a restart needs all of a save"
    for owner, names in (
        (cfg.dist, ("use_megatron_fsdp", "use_torch_fsdp2", "use_decentralized_pg")),
        (getattr(cfg, "ddp", None), ("use_megatron_fsdp",)),
        (cfg.rng, ("data_parallel_random_init",)),
        (cfg.train, ("iterations_to_skip",)),
        (optimizer, ("optimizer_cuda_graph",)),
        (model, ("restore_modelopt_state", "qk_clip")),
        (checkpoint, ("non_persistent_save_interval",)),
        (cfg, ("peft",)),
    ):
        for name in names:
            if getattr(owner, name, None):
                yield f"{name} is set: training with it is not protected"
    for section, switch in (("inprocess_restart", "enabled"), ("ft", "enable_ft_package")):
        if getattr(getattr(cfg, section, None), switch, False):
            yield f"{section} is on: it would handle failures, too"
    if "energon" in type(cfg.dataset).__module__.lower() + type(cfg.dataset).__name__.lower():
        yield "the dataset is Energon's: its place in the data is not in last words"


@bridge.patch(
    "megatron.bridge.training.checkpointing:load_checkpoint",
    why="a process in the place of a failed one gets its state from the others",
    accepts="(state, ...)",
)
def newcomers_load_nothing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return (0, 0) if adaptor.is_newcomer() else wrapped(*args, **kwargs)


@bridge.patch(
    "megatron.bridge.data.loaders:setup_data_iterators",
    why="data are read again after the step to which the job goes back",
    accepts="(cfg, train_state, ...)",
)
def data_can_be_read_again(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    train_state = kwargs["train_state"] if "train_state" in kwargs else args[1]
    train_state.ttp_read_again = lambda: wrapped(*args, **kwargs)
    return wrapped(*args, **kwargs)


@bridge.patch(
    "megatron.bridge.training.train:train",
    why="the training state is complete here: from now on it can be saved, and the loop be called again",
    accepts=f"({', '.join(_TRAIN)}, ...)",
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    call = {**dict(zip(_TRAIN, args, strict=False)), **kwargs}
    further = args[len(_TRAIN) :]
    state = call["global_state"]
    cfg, train_state = state.cfg, state.train_state
    protection = state.ttp_protection = adaptor.protect(
        **_parts(state, call["model"], call["optimizer"], call["scheduler"]),
        step=train_state.step,
        samples_per_step=lambda: _batch(cfg),
    )
    config = call["model"][0].config
    param_sync_func = config.param_sync_func

    def go_back(step: int, counters: Mapping[str, int | float]) -> None:
        train_state.step = step
        for name, value in counters.items():
            setattr(train_state, name, value)
        config.param_sync_func = param_sync_func  # None during the first step of a call
        _reset_loop(state, call["model"])
        call["train_data_iterator"], call["valid_data_iterator"], _ = train_state.ttp_read_again()

    def loop() -> Any:
        by_position = [call[name] for name in _TRAIN[: len(args)]]
        by_name = {name: value for name, value in call.items() if name not in _TRAIN[: len(args)]}
        return wrapped(*by_position, *further, **by_name)

    try:
        result = protection.run_loop(loop, go_back, why_not_online(cfg))
    except SystemExit:  # the loop has come to an end that was asked for
        protection.end_training()
        raise
    protection.end_training()
    return result


def _contents(state: Any, model: Any) -> adaptor.CheckpointContents:
    """Return the contents of Megatron-Bridge's checkpoints besides model, optimizer and scheduler."""
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.state import TrainState
    from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
    from megatron.bridge.training.utils.pg_utils import get_pg_collection
    from megatron.core.num_microbatches_calculator import (
        get_current_global_batch_size,
        get_current_running_global_batch_size,
    )

    cfg, train_state = state.cfg, state.train_state
    flags = {name: getattr(train_state, name) for name in ("do_train", "do_valid", "do_test")}
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        cfg.to_yaml(file.name)
        run_config = Path(file.name).read_bytes()

    def growth() -> dict[str, int | float]:
        step, train = train_state.step + 1, cfg.train
        evaluates = flags["do_valid"] and train.eval_interval and step % train.eval_interval == 0
        return {
            "consumed_train_samples": _batch(cfg),
            "skipped_train_samples": get_current_global_batch_size()
            - get_current_running_global_batch_size(),
            "consumed_valid_samples": train.eval_iters * train.global_batch_size if evaluates else 0,
            "floating_point_operations_so_far": num_floating_point_operations(cfg, _batch(cfg)),
        }

    def files_of(step: int, counters: Mapping[str, int | float]) -> dict[str, bytes]:
        import torch

        saved = TrainState(step=step, **flags, **counters).state_dict()
        operations = saved["floating_point_operations_so_far"]
        saved["floating_point_operations_so_far"] = operations.to(torch.float32)  # as in regular saves
        content = io.BytesIO()
        torch.save(saved, content)
        return {"train_state.pt": content.getvalue(), "run_config.yaml": run_config}

    groups = get_pg_collection(model)
    metadata = checkpointing._build_sharded_state_dict_metadata(
        cfg.optimizer.use_distributed_optimizer, cfg.checkpoint
    )
    return adaptor.CheckpointContents(
        counters=lambda: {name: getattr(train_state, name) for name in COUNTERS},
        growth=growth,
        files_of=files_of,
        trackers={"latest_train_state.pt": "train_state.pt"},
        metadata={**metadata, "dp_cp_group": groups.dp_cp},
        random=checkpointing.get_rng_state(False, "torch_dist", pg_collection=groups),
    )


def _batch(cfg: Any) -> int:
    """Return the number of samples in the running step."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return int(get_num_microbatches() * cfg.train.micro_batch_size * cfg.data_parallel_size)


def _reset_loop(state: Any, model: Any) -> None:
    """Reset hooks, timers, the rerun state machine and batch sizes, as the loop asserts when called."""
    from megatron.core.num_microbatches_calculator import update_num_microbatches
    from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

    for chunk in model:
        if chunk.ddp_config.overlap_param_gather and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()
    for timer in list(state.timers._timers.values()):
        timer.reset()
    machine = get_rerun_state_machine()
    machine.state = RerunState.NOT_RUNNING_YET
    rerun = getattr(state.cfg, "rerun_state_machine", None)
    machine.set_mode(RerunMode(rerun.rerun_mode if rerun else "disabled"))  # an evaluation disables it
    update_num_microbatches(state.train_state.consumed_train_samples, consistency_check=False)


def why_not_online(cfg: Any) -> str:
    """Return why the loop cannot be called again after a fault; empty: the loop can be."""
    if cfg.checkpoint.async_save:
        return "checkpoint.async_save keeps saves of its own open"
    if getattr(cfg.model, "cuda_graph_impl", "none") not in (None, "none"):
        return f"model.cuda_graph_impl is {cfg.model.cuda_graph_impl}: graphs hold the groups of the start"
    if cfg.train.exit_interval:
        return "train.exit_interval could be passed over"
    if cfg.dataset.dataloader_type not in ("single", "cyclic"):
        return f"dataset.dataloader_type {cfg.dataset.dataloader_type} has not been tested with it"
    return ""


@bridge.patch(
    "megatron.bridge.training.train:train_step",
    why="a step begins, and ends",
    accepts="(forward_step_func, data_iterator, model, optimizer, scheduler, global_state, ...)",
)
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    state = kwargs["global_state"] if "global_state" in kwargs else args[5]
    with state.ttp_protection.step(state.train_state.step + 1):
        return wrapped(*args, **kwargs)


def _in_phase(name: str, wrapped: Any, args: Any, kwargs: Any) -> Any:
    protection = getattr(args[0] if args else kwargs["state"], "ttp_protection", None)
    if protection is None:  # before training
        return wrapped(*args, **kwargs)
    with protection.phase(name):
        return wrapped(*args, **kwargs)


@bridge.patch(
    "megatron.bridge.training.checkpointing:save_checkpoint",
    why="a save takes longer than a step, and a rank that hangs in it has a limit of its own",
    accepts="(state, ...)",
)
def saves_are_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return _in_phase("save", wrapped, args, kwargs)


@bridge.patch(
    "megatron.bridge.training.eval:evaluate_and_print_results",
    why="an evaluation takes longer than a step, and a rank that hangs in it has a limit of its own",
    accepts="(state, ...)",
)
def evaluations_are_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return _in_phase("evaluation", wrapped, args, kwargs)

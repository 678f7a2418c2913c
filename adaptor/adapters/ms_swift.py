"""ms-swift (`megatron pt`, `sft`, `rlhf`): the trainer's method for a step is called again after a fault.

A checkpoint of ms-swift is a folder `checkpoint-N` with a separate tracker, and `iter_N` in `torch_dist`. The
folder `last_words` has the same form, and a restart loads the newest checkpoint of all folders.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import adaptor
from adaptor import patching

_TESTED = ">=4.6,<4.7"
swift = patching.Unit("ms-swift", framework="ms-swift", tested=_TESTED)
packing = patching.Unit("ms-swift-packing", framework="ms-swift", tested=_TESTED)
# ms-swift imports the module of this unit for grpo and gkd alone.
rollouts = patching.Unit("ms-swift-rollouts", framework="ms-swift", tested=_TESTED)

TRACKER = "latest_checkpointed_iteration.txt"
LAST_WORDS = "last_words"
NOTE = "ms-swift-output"
LORA = "lora"
# Kinds of training whose data are sampled from the model (rollouts).
_SAMPLED = ("grpo", "gkd")
_PROTECTION = "_ttp_protection"


@swift.patch(
    "swift.megatron.utils.megatron_lm_utils:initialize_megatron",
    why="the job is claimed before process groups are made, and unprotected options are refused",
    accepts="(args)",
)
def options_are_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    options = args[0] if args else kwargs["args"]
    for refusal in refused(options):
        raise adaptor.UnsupportedError(f"{refusal}; change it, or set ENABLE_TTP=False")
    adaptor.enable()
    return wrapped(*args, **kwargs)


def refused(options: Any) -> Iterator[str]:
    """Yield the reasons against the protection of a job, each with its option."""
    if getattr(options, "tuner_type", "full") not in ("full", LORA):
        yield f"--tuner_type is {options.tuner_type}: ms-swift's own checkpoints of it lack the adapters"
    if _samples(options) and getattr(options, "vllm_mode", None) == "server":
        yield "--vllm_mode is server: the server keeps its connection to the processes of the first start"
    for name in ("use_megatron_fsdp", "data_parallel_random_init"):
        if getattr(options, name, False):
            yield f"--{name} is set: training with it is not protected"
    if getattr(options, "streaming", False):
        yield "--streaming is true: its place in the data is not in last words"


def why_not_online(options: Any) -> str:
    """Return why a job is not recovered online; empty: it is."""
    return "the engine of rollouts has communicators of its own" if _samples(options) else ""


def _samples(options: Any) -> bool:
    return getattr(options, "rlhf_type", None) in _SAMPLED


@swift.patch(
    "swift.megatron.arguments.sft_args:MegatronSftArguments._init_output_dir",
    why="with --add_version each start has a folder of its own, and a restart would find nothing there",
    accepts="()",
)
def all_starts_have_one_output_folder(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Note the name of the folder on each node; a later node receives the name from the others."""
    adaptor.enable()
    folder = adaptor.node_folder()
    if folder is None or not instance.add_version:
        wrapped()
        return
    import torch.distributed as dist
    from swift.megatron.arguments import sft_args

    instance.add_version = False
    wrapped()  # makes the process groups
    instance.add_version = True
    note = folder / NOTE
    noted = note.read_text() if note.exists() else ""
    if not noted and adaptor.is_newcomer():
        raise adaptor.StartError("--add_version is true, and this node does not know the output folder")
    gathered = [""] * dist.get_world_size()
    dist.all_gather_object(gathered, noted)
    name = next(filter(None, gathered), "") or sft_args.add_version_to_work_dir(instance.output_dir)
    instance.output_dir = name
    Path(name).mkdir(parents=True, exist_ok=True)
    partial = folder / f"{NOTE}-{os.getpid()}"
    partial.write_text(name)
    partial.rename(note)  # ranks of the node write the same


@swift.patch(
    "swift.megatron.trainers.base:BaseMegatronTrainer._load_checkpoint",
    why="a restart goes on from the newest checkpoint; a new process gets its state from the others",
    accepts="()",
)
def a_restart_loads_the_newest(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if adaptor.is_newcomer():
        return None
    options = instance.args
    adaptor.write_host_copies(**_state_of(instance))
    is_whole = not getattr(options, "no_save_optim", False)
    if adaptor.is_restart() and (newest := _newest(Path(options.output_dir), is_whole)) is not None:
        # Of LoRA a checkpoint has the adapters alone; the model is loaded as at the first start.
        name = "mcore_adapter" if options.tuner_type == LORA else "mcore_model"
        setattr(options, name, str(newest))
        options.finetune = options.no_load_optim = options.no_load_rng = False
        with _saves_all(options):
            return wrapped(*args, **kwargs)
    return wrapped(*args, **kwargs)


@contextlib.contextmanager
def _saves_all(options: Any) -> Iterator[None]:
    """Let ms-swift load all of last words: it expects in a checkpoint what its options let it save."""
    names = ("no_save_optim", "no_save_rng")
    values_before = {name: getattr(options, name, False) for name in names}
    vars(options).update(dict.fromkeys(names, False))
    try:
        yield
    finally:
        vars(options).update(values_before)


def _newest(output: Path, is_whole: bool = True) -> Path | None:
    """Return the folder below `output` whose tracker names the latest step; None: no folder has a tracker.

    Args:
        is_whole: regular saves contain the optimizer; otherwise only last words do.
    """
    trackers = output.glob(f"{'*' if is_whole else LAST_WORDS}/{TRACKER}")
    steps = {tracker.parent: int(tracker.read_text()) for tracker in trackers}
    return max(steps, key=lambda folder: steps[folder], default=None)


@packing.patch(
    "swift.dataset.packing:PackingDataset.__init__",
    why="rank 0 packs the samples for all; a process in the place of a failed one comes alone",
    accepts="(template, dataset, ...)",
)
def newcomers_pack_by_themselves(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Let a new process pack as rank 0 does: the same lengths give the same packs."""
    if not adaptor.is_newcomer():
        wrapped(*args, **kwargs)
        return
    from swift.dataset import packing as module

    flags_before = module.is_master, module.is_dist
    module.is_master, module.is_dist = lambda: True, lambda: False
    try:
        wrapped(*args, **kwargs)
    finally:
        module.is_master, module.is_dist = flags_before


@swift.patch(
    "swift.megatron.trainers.base:BaseMegatronTrainer.train",
    why="the training state is complete here, and the loop makes its steps by run_steps",
    accepts="(train_dataset, val_dataset)",
)
def steps_are_made_by_run_steps(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    trainer, options = instance, instance.args
    data = list(trainer.setup_training(*args, **kwargs))
    protection = adaptor.protect(
        **_state_of(trainer), step=trainer.state.iteration, samples_per_step=options.global_batch_size
    )
    save, evaluate = trainer.save_checkpoint, trainer.evaluate

    def save_checkpoint() -> Any:
        with protection.phase("save"):
            return save()

    def evaluate_in_phase(*args: Any, **kwargs: Any) -> Any:
        with protection.phase("evaluation"):
            return evaluate(*args, **kwargs)

    def go_back(step: int, _counters: Mapping[str, int | float]) -> None:
        _set_to_step(trainer, step)
        data[:] = _read_again(trainer, *args, **kwargs)

    trainer.save_checkpoint, trainer.evaluate = save_checkpoint, evaluate_in_phase

    def loop() -> None:
        while trainer.state.iteration < options.train_iters:
            with protection.step(trainer.state.iteration + 1):
                trainer.run_train_step(*data)

    setattr(trainer, _PROTECTION, protection)
    protection.run_loop(loop, go_back, why_not_online(options))
    protection.end_training()
    return trainer.finalize_training()


@rollouts.patch(
    "swift.megatron.trainers.rollout_mixin:MegatronRolloutMixin._replace_data_iterator",
    why="rollouts have a duration of their own, and only some steps have any",
    accepts="(data_iterator)",
)
def rollouts_are_a_phase(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with _protection_of(instance).phase("rollouts"):
        return wrapped(*args, **kwargs)


@rollouts.patch(
    "swift.megatron.trainers.rollout_mixin:MegatronRolloutMixin.offload_context",
    why="the state moves to the host and back, but not while last words are written",
    accepts="()",
)
@contextlib.contextmanager
def state_is_moved_between_incidents(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Iterator[None]:
    protection = _protection_of(instance)
    with contextlib.ExitStack() as offloaded:
        with protection.moving_state():
            offloaded.enter_context(wrapped(*args, **kwargs))
        try:
            yield
        finally:
            with protection.moving_state():
                offloaded.close()


def _protection_of(trainer: Any) -> adaptor.Protection:
    """Return the protection of a trainer; before its loop one that does nothing."""
    return getattr(trainer, _PROTECTION, None) or adaptor.Protection(None)


def _set_to_step(trainer: Any, step: int) -> None:
    """Set the trainer to `step` as `setup_training` does, on survivors and in a new process alike.

    Hooks are off for a step.
    """
    options, state = trainer.args, trainer.state
    state.iteration, state.consumed_train_samples = step, step * options.global_batch_size
    state.should_log = state.should_eval = state.should_save = False
    trainer._train_metrics = {}
    trainer._start_iteration, trainer._pre_hook_enabled = step, False
    for chunk in trainer.wrapped_models:
        chunk.train()  # an interrupted evaluation leaves the mode of evaluation
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)
    if hasattr(trainer, "_saved_param_sync_func"):  # the first step sets it again
        trainer.config.param_sync_func = None


def _read_again(trainer: Any, train_dataset: Any, val_dataset: Any) -> Any:
    """Return iterators over the data after the trainer's step, made as in `setup_training`."""
    chunks = trainer.args.virtual_pipeline_model_parallel_size
    pairs = [trainer._prepare_data_iterator(train_dataset, val_dataset) for _ in range(chunks or 1)]
    return pairs[0] if chunks is None else tuple(map(list, zip(*pairs, strict=True)))


def _state_of(trainer: Any) -> dict[str, Any]:
    """Return the common arguments of `protect` and `write_host_copies`."""
    return {
        "model": trainer.wrapped_models,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.opt_param_scheduler,
        "save": Path(trainer.args.output_dir) / LAST_WORDS,
        "format": "torch_dist",
        "contents": _contents(trainer),
    }


def _contents(trainer: Any) -> adaptor.CheckpointContents:
    """Return the contents of ms-swift's checkpoints besides model, optimizer and scheduler."""
    from swift.megatron.utils import megatron_lm_utils
    from swift.utils import check_json_format

    options = trainer.args
    saved = dict(check_json_format(vars(options)))
    saved.update(no_save_optim=False, no_save_rng=False)  # last words have both

    def entries_of(step: int, counters: Mapping[str, int | float]) -> dict[str, Any]:
        consumed = step * options.global_batch_size
        return {"args": Namespace(**{**saved, "consumed_train_samples": consumed})}

    def is_of_adapters(name: str) -> bool:
        tree: dict[str, Any] = {"model": {name: None}}
        megatron_lm_utils._filter_adapter_state_dict(tree, True)
        return bool(tree["model"])

    return adaptor.CheckpointContents(
        entries_of=entries_of,
        metadata=megatron_lm_utils.get_sharded_sd_metadata(options),
        random=megatron_lm_utils._get_rng_state(),
        keeps=is_of_adapters if options.tuner_type == LORA else None,
    )

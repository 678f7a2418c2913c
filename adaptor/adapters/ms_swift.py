"""ms-swift (`megatron pt`, `megatron sft`): its trainer makes a step by one method, which is called again.

A checkpoint of ms-swift is a folder `checkpoint-N` with a tracker of its own and `iter_N` in `torch_dist`.
Last words are in such a folder, `last_words`, and a restart loads the newest of all.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import adaptor
from adaptor import patching

swift = patching.Unit("ms-swift", framework="ms-swift", tested=">=4.6,<4.7")

TRACKER = "latest_checkpointed_iteration.txt"
LAST_WORDS = "last_words"


@swift.patch(
    "swift.megatron.utils.megatron_lm_utils:initialize_megatron",
    why="the job is claimed before process groups are made, and what cannot be protected is refused",
    accepts="(args)",
)
def options_are_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    options = args[0] if args else kwargs["args"]
    for refusal in refused(options):
        raise adaptor.UnsupportedError(f"{refusal}; change it, or set ENABLE_TTP=False")
    adaptor.enable()
    return wrapped(*args, **kwargs)


def refused(options: Any) -> Iterator[str]:
    """Yield what cannot be protected."""
    if getattr(options, "tuner_type", "full") != "full":
        yield f"--tuner_type is {options.tuner_type}: only --tuner_type full is protected"
    if getattr(options, "rlhf_type", None):
        yield f"--rlhf_type is {options.rlhf_type}: only pt and sft are protected"
    for name in ("use_megatron_fsdp", "data_parallel_random_init", "fp8_param_gather"):
        if getattr(options, name, False):
            yield f"--{name} is set: training with it is not protected"
    if getattr(options, "add_version", False):
        yield "--add_version is true: each start has a folder of its own, and a restart finds nothing there"
    if getattr(options, "streaming", False):
        yield "--streaming is true: its place in the data is not in last words"


@swift.patch(
    "swift.megatron.trainers.base:BaseMegatronTrainer._load_checkpoint",
    why="a restart goes on from the newest checkpoint; a new process gets its state from the others",
    accepts="()",
)
def a_restart_loads_the_newest(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if adaptor.is_newcomer():
        return None
    options = instance.args
    is_whole = not getattr(options, "no_save_optim", False)
    if adaptor.is_restart() and (newest := _newest(Path(options.output_dir), is_whole)) is not None:
        options.mcore_model, options.finetune = str(newest), False
        options.no_load_optim = options.no_load_rng = False
    return wrapped(*args, **kwargs)


def _newest(output: Path, is_whole: bool = True) -> Path | None:
    """Return the folder below `output` whose tracker names the latest step; None: there is none.

    Args:
        is_whole: saves have the optimizer; otherwise only last words have it.
    """
    trackers = output.glob(f"{'*' if is_whole else LAST_WORDS}/{TRACKER}")
    steps = {tracker.parent: int(tracker.read_text()) for tracker in trackers}
    return max(steps, key=lambda folder: steps[folder], default=None)


@swift.patch(
    "swift.megatron.trainers.base:BaseMegatronTrainer.train",
    why="the training state is complete here, and the loop makes its steps by run_steps",
    accepts="(train_dataset, val_dataset)",
)
def steps_are_made_by_run_steps(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    trainer, options = instance, instance.args
    data = list(trainer.setup_training(*args, **kwargs))
    protection = adaptor.protect(
        model=trainer.wrapped_models,
        optimizer=trainer.optimizer,
        scheduler=trainer.opt_param_scheduler,
        save=Path(options.output_dir) / LAST_WORDS,
        step=trainer.state.iteration,
        samples_per_step=options.global_batch_size,
        format="torch_dist",
        contents=_contents(trainer),
    )
    save, evaluate = trainer.save_checkpoint, trainer.evaluate

    def save_checkpoint() -> Any:
        with protection.phase("save"):
            return save()

    def evaluate_in_phase(*args: Any, **kwargs: Any) -> Any:
        with protection.phase("evaluation"):
            return evaluate(*args, **kwargs)

    def go_back(step: int) -> None:
        _put_back(trainer, step)
        data[:] = _read_again(trainer, *args, **kwargs)

    trainer.save_checkpoint, trainer.evaluate = save_checkpoint, evaluate_in_phase
    protection.run_steps(lambda step: trainer.run_train_step(*data), options.train_iters, go_back)
    protection.end_training()
    return trainer.finalize_training()


def _put_back(trainer: Any, step: int) -> None:
    """Set what `setup_training` sets, alike on survivors and in a new process: hooks are off for a step."""
    options, state = trainer.args, trainer.state
    state.iteration, state.consumed_train_samples = step, step * options.global_batch_size
    state.should_log = state.should_eval = state.should_save = False
    trainer._train_metrics = {}
    trainer._start_iteration, trainer._pre_hook_enabled = step, False
    for chunk in trainer.wrapped_models:
        chunk.train()  # an evaluation that was cut off has changed it
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)
    if hasattr(trainer, "_saved_param_sync_func"):  # the first step sets it again
        trainer.config.param_sync_func = None


def _read_again(trainer: Any, train_dataset: Any, val_dataset: Any) -> Any:
    """Return iterators over the data behind the step of the trainer, as its `setup_training` makes them."""
    chunks = trainer.args.virtual_pipeline_model_parallel_size
    pairs = [trainer._prepare_data_iterator(train_dataset, val_dataset) for _ in range(chunks or 1)]
    return pairs[0] if chunks is None else tuple(map(list, zip(*pairs, strict=True)))


def _contents(trainer: Any) -> adaptor.CheckpointContents:
    """Return what ms-swift's checkpoints contain besides model, optimizer and scheduler."""
    from swift.megatron.utils import megatron_lm_utils
    from swift.utils import check_json_format

    options = trainer.args
    saved = dict(check_json_format(vars(options)))
    saved.update(no_save_optim=False, no_save_rng=False)  # last words have both

    def entries_of(step: int, counters: Mapping[str, int | float]) -> dict[str, Any]:
        consumed = step * options.global_batch_size
        return {"args": Namespace(**{**saved, "consumed_train_samples": consumed})}

    return adaptor.CheckpointContents(
        entries_of=entries_of,
        metadata=megatron_lm_utils.get_sharded_sd_metadata(options),
        random=megatron_lm_utils._get_rng_state(),
    )

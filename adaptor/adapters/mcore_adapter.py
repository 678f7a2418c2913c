"""mcore_adapter (`McaTrainer`, LLaMA-Factory's backend): the trainer's loop is called again after a fault.

A checkpoint of mcore_adapter is a folder with files of the Hugging Face Trainer and with `iter_0000001`:
archives of the model, and a distributed checkpoint of the optimizer alone. Last words have this form, each
step in a folder below `last_words`, which `resume_from_checkpoint` can name.

Invariant: the number of a step fixes its data. An epoch of mcore_adapter has one step more than whole steps
fit into a pass over the data, because the end of a pass is noticed at the next batch: that step takes the
rest of the pass, then batches from its beginning. The trainer's own resume does not count that step, and
repeats the rest of a pass; here no start does so.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adaptor
from adaptor import patching

if TYPE_CHECKING:
    from adaptor.checkpoint.archive_layout import FileLayout
    from adaptor.checkpoint.format_torch import TorchFormat
    from adaptor.checkpoint.format_torch_dist import Sharding
    from adaptor.checkpoint.planned_tensors import PlannedTensors, Source
    from adaptor.checkpoint.training_state import Files, TrainingState
    from adaptor.checkpoint.weights import TensorSlot

mca = patching.Unit("mcore_adapter", framework="mcore_adapter", tested=">=0.10.0.dev0,<0.11")

TRACKER = "latest_checkpointed_iteration.txt"
LAST_WORDS = "last_words"
TRAINER_STATE = "trainer_state.json"
SCHEDULER = "scheduler.pt"
_ITERATION = "iter_0000001"  # the only iteration in a folder of mcore_adapter
_OPTIMIZER = f"{_ITERATION}/dist_optimizer"
_MODEL = "model_optim_rng.pt"
_STATE = "_ttp_state"
_LOOP = ("batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval")


@mca.patch(
    "mcore_adapter.trainer.trainer:McaTrainer.train",
    why="a restart goes on from the newest checkpoint; a new process gets its state from the others",
    accepts="(resume_from_checkpoint=, ...)",
)
def a_restart_loads_the_newest(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    trainer = instance
    for refusal in refused(trainer):
        raise adaptor.UnsupportedError(f"{refusal}; change it, or set ENABLE_TTP=False")
    resume = args[0] if args else kwargs.pop("resume_from_checkpoint", None)
    if adaptor.is_newcomer():
        resume = None
    else:
        optimizer = trainer.create_optimizer()  # copies in host memory need it before the load
        trainer.create_optimizer = lambda: optimizer
        _note_state(trainer, trainer.state)
        adaptor.write_host_copies(**_parts(trainer))
        newest = _newest(Path(trainer.args.output_dir), trainer.args.world_size)
        if adaptor.is_restart() and newest is not None:
            resume = str(newest)
    return wrapped(resume, *args[1:], **kwargs)


def refused(trainer: Any) -> Iterator[str]:
    """Yield the reasons against the protection of a job, each with its option."""
    from mcore_adapter.trainer import trainer as module

    options = trainer.args
    peft = getattr(module, "PeftModel", None)
    if peft is not None and isinstance(trainer.model[0], peft):
        yield "the model is a PeftModel (LoRA): last words of adapters alone are not written"
    if options.ignore_data_skip:
        yield "ignore_data_skip is True: a restart would read other data"
    if options.auto_find_batch_size:
        yield "auto_find_batch_size is True: the number of a step would not fix its data"
    if not hasattr(trainer.train_dataset, "__len__"):
        yield "the train dataset has no length (streaming): its place in the data is not in last words"


def why_not_online(trainer: Any) -> str:
    """Return why the loop cannot be called again after a fault; empty: the loop can be."""
    from mcore_adapter.trainer.trainer import ExportableState

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            return f"{type(callback).__name__} has a state of its own on each rank"
    return ""


def _newest(output: Path, world_size: int) -> Path | None:
    """Return the folder in `output` with the latest step that a job of `world_size` ranks can resume from."""
    steps = {folder: _saved_step(folder, world_size) for folder in output.glob("checkpoint-*")}
    tracker = output / LAST_WORDS / TRACKER
    if tracker.exists():
        step = int(tracker.read_text())
        steps[output / LAST_WORDS / f"iter_{step:07d}"] = step
    # Of two folders of a step the last words: they are atomic.
    newest = max(reversed(list(steps)), key=lambda folder: steps[folder], default=None)
    return newest if newest is not None and steps[newest] else None


def _saved_step(folder: Path, world_size: int) -> int:
    """Return the step of a save, 0 where mcore_adapter cannot resume from it: it lacks the optimizer, was cut
    off, or has the model in `torch_dist`."""
    is_whole = (folder / SCHEDULER).exists() and len(list(folder.glob("rng_state*.pth"))) == world_size
    if not is_whole or (folder / _ITERATION / "dist_model").exists():
        return 0
    try:
        return int(json.loads((folder / TRAINER_STATE).read_text())["global_step"])
    except (OSError, ValueError):
        return 0


@mca.patch(
    "mcore_adapter.trainer.trainer:McaTrainer._inner_training_loop",
    why="the training state is complete here: from now on it can be saved, and the loop be called again",
    accepts="(batch_size=, args=, resume_from_checkpoint=, ...)",
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    trainer = instance
    call = {**dict(zip(_LOOP, args, strict=False)), **kwargs}
    prepared = trainer._prepare_train_loop(**call)
    vars(trainer).pop("create_optimizer", None)
    place = _Place(trainer, prepared[2], call)
    _note_state(trainer, trainer.state)
    protection = adaptor.protect(**_parts(trainer), step=trainer.state.global_step, samples_per_step=1)

    def go_back(step: int, _counters: Mapping[str, int | float]) -> None:
        call["resume_from_checkpoint"] = None
        _set_to_step(trainer, step)
        place.read_again()

    replaced = {
        "_prepare_train_loop": lambda *_, **__: place.of_loop(prepared),
        "_get_train_cyclic_iterator": place.batches,
        "_get_step_iterator_and_seq_length": place.batches_of_step,
        "_load_rng_state": place.load_random_states,
        "training_step": partial(_one_step, trainer, protection, trainer.training_step),
        "evaluate": partial(_in_phase, protection, "evaluation", trainer.evaluate),
        "_save_checkpoint": partial(_in_phase, protection, "save", trainer._save_checkpoint),
    }
    values_before = {name: value for name, value in vars(trainer).items() if name in replaced}
    vars(trainer).update(replaced)
    try:
        result = protection.run_loop(lambda: wrapped(**call), go_back, why_not_online(trainer))
    finally:
        for name in replaced:
            vars(trainer).pop(name)
        vars(trainer).update(values_before)
    protection.end_training()
    return result


def _one_step(
    trainer: Any, protection: adaptor.Protection, make: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    _note_state(trainer, trainer.state)
    with protection.step(trainer.state.global_step + 1):
        return make(*args, **kwargs)


def _in_phase(
    protection: adaptor.Protection, name: str, act: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with protection.phase(name):
        return act(*args, **kwargs)


class _Place:
    """The place of a trainer in its data, which follows from the number of the step alone.

    Args:
        data: the loader of the batches of one pass.
        call: the arguments of the loop.
    """

    def __init__(self, trainer: Any, data: Any, call: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._data = data
        self._call = call
        self._rest: Iterator[Any] | None = None  # of the pass, begun before random states are put back
        # As the class has them: a trainer gets replacements of its own.
        self._pass = trainer._get_train_cyclic_iterator
        self._next = trainer._get_step_iterator_and_seq_length
        self._load = trainer._load_rng_state

    def _epoch_and_step(self) -> tuple[int, int]:
        """Return the finished epochs, and the finished steps of the present epoch."""
        step: int = self._trainer.state.global_step
        return divmod(step, _steps_of_epoch(self._trainer, len(self._data)))

    def _skipped(self) -> int:
        """Return the batches of the present pass that finished steps have read."""
        return self._epoch_and_step()[1] * int(self._trainer.args.gradient_accumulation_steps)

    def of_loop(self, prepared: Sequence[Any]) -> tuple[Any, ...]:
        """Return what `_prepare_train_loop` has returned, with the place after the last finished step."""
        return (self._epoch_and_step()[0], *prepared[1:4], self._skipped(), *prepared[5:])

    def read_again(self) -> None:
        """Begin the rest of the pass after the last finished step."""
        from mcore_adapter.trainer.trainer import skip_first_batches

        self._rest = None
        if skipped := self._skipped():
            if hasattr(self._data, "set_epoch"):
                self._data.set_epoch(self._epoch_and_step()[0])
            self._rest = _begun(skip_first_batches(self._data, skipped))

    def batches(self, data: Any) -> Iterator[Any]:
        """Yield the batches of an epoch; `data` is the loader of a whole pass, or of the rest of a pass."""
        if data is not self._data:
            rest, self._rest = self._rest or _begun(data), None
            # An undisturbed run draws nothing here; at the end of the pass it does.
            if self._call.get("resume_from_checkpoint") is not None:
                self._load(self._call["resume_from_checkpoint"])
            yield from rest
            self._trainer.control.should_epoch_stop = True
        yield from self._pass(self._data)

    def batches_of_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step; none after the last step, whose last words a restart has loaded."""
        state = self._trainer.state
        return (None, 0, 0) if state.global_step >= state.max_steps else self._next(*args, **kwargs)

    def load_random_states(self, checkpoint: Any) -> None:
        """Load random states between two epochs; inside an epoch `batches` has loaded them."""
        if self._skipped() == 0:
            self._load(checkpoint)


def _begun(data: Any) -> Iterator[Any]:
    """Return an iterator over the batches of `data` that has read its first: a loader draws a seed there."""
    batches = (batch for batch in data if batch is not None)
    return chain(list(islice(batches, 1)), batches)


def _steps_of_epoch(trainer: Any, batches: int) -> int:
    return batches // int(trainer.args.gradient_accumulation_steps) + 1


def _set_to_step(trainer: Any, step: int) -> None:
    """Set the trainer to the end of `step`, on survivors and in a new process alike."""
    from mcore_adapter.trainer.trainer import clear_aux_losses_tracker

    trainer.state.global_step = trainer._globalstep_last_logged = step
    trainer.control = type(trainer.control)()
    for chunk in trainer.models_wrapped:
        if chunk.ddp_config.overlap_param_gather and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()  # the loop asserts it
    clear_aux_losses_tracker()
    # What the first save has agreed on among all ranks: a new process lacks it.
    trainer._validate_access_integrity = True
    if trainer.args.use_distributed_optimizer:
        trainer.save_strategy.cached_distribution = None


def _note_state(trainer: Any, state: Any) -> None:
    """Keep a copy of the trainer's state, which the main thread does not change."""
    noted_state = copy.copy(state)
    noted_state.log_history = list(state.log_history)
    setattr(trainer, _STATE, noted_state)


def _parts(trainer: Any) -> dict[str, Any]:
    """Return the common arguments of `protect` and `write_host_copies`."""
    return {
        "model": trainer.models_wrapped,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "save": Path(trainer.args.output_dir) / LAST_WORDS,
        "format": "mcore_adapter",
        "contents": _contents(trainer),
    }


def _contents(trainer: Any) -> adaptor.CheckpointContents:
    """Return the contents of mcore_adapter's checkpoints besides model, optimizer and scheduler."""
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    options = trainer.args
    batches = len(trainer.get_train_dataloader())
    steps_of_epoch = _steps_of_epoch(trainer, batches)
    updates = max(batches // options.gradient_accumulation_steps, 1)
    last = options.max_steps if options.max_steps > 0 else math.ceil(options.num_train_epochs * updates)
    small_files = {**_files_of_trainer(trainer), TRACKER: b"1"}

    def files_of(step: int, _counters: Mapping[str, int | float]) -> dict[str, bytes]:
        state = copy.copy(getattr(trainer, _STATE))
        state.global_step, state.epoch = step, step / steps_of_epoch
        state.log_history = [line for line in state.log_history if line.get("step", 0) <= step]
        state.compute_steps(options, last)
        state.is_local_process_zero = state.is_world_process_zero = True
        text = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True)
        return {**small_files, TRAINER_STATE: f"{text}\n".encode()}

    rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    return adaptor.CheckpointContents(
        files_of=files_of,
        metadata=trainer.ckpt_sharding_metadata if options.use_distributed_optimizer else None,
        random=ShardedObject("rng_state", None, (1,), (0,), replica_id=rank),
    )


def _files_of_trainer(trainer: Any) -> dict[str, bytes]:
    """Return the files of a save that are equal at each step, by path: configurations and the tokenizer."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        trainer.model.config.save_pretrained(folder)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        torch.save(trainer.args, Path(folder) / "training_args.bin")
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@dataclasses.dataclass(frozen=True)
class _Format:
    """The form of mcore_adapter's checkpoints, a `CheckpointFormat`.

    Attributes:
        archives: writes the model, and an optimizer without shards
        sharding: writes a distributed optimizer; None: the optimizer has no shards
        random_files: the files with the random states of the ranks of the group
    """

    archives: TorchFormat
    sharding: Sharding | None
    random_files: tuple[str, ...]

    def model(self, chunks: Mapping[str, Any]) -> dict[str, Any]:
        return self.archives.model(chunks)

    def places(self, saved: Any) -> list[TensorSlot]:
        return self.archives.places(saved)

    def optimizer(
        self, state: TrainingState, model: Mapping[str, Any], states: Sequence[Any], gathered: Sequence[Any]
    ) -> Any:
        if self.sharding is None:
            return self.archives.optimizer(state, model, states, gathered)
        return self.sharding.optimizer(state, self.sharding.model(state.chunks), states, gathered)

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any:
        (of_all,) = states
        return of_all

    def files(self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any]) -> Files:
        from adaptor.checkpoint.format_torch import save

        folder, files = f"{_ITERATION}/{state.folder}", self._further_files(state, body)
        if self.sharding is None:
            files[f"{folder}/optimizer.pt"] = partial(save, body["optimizer"])
        else:
            written = self.sharding.written(body["optimizer"])
            files |= {f"{_OPTIMIZER}/{name}": write for name, write in written.items()}
        files[f"{folder}/{_MODEL}"] = partial(save, {key: body[key] for key in state.chunks})
        return files

    def planned_tensors(self) -> PlannedTensors:
        return (self.sharding or self.archives).planned_tensors()

    def planned_files(
        self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any], planned: PlannedTensors
    ) -> tuple[dict[str, FileLayout[Source]], Files]:
        from adaptor.checkpoint import dcp_layout
        from adaptor.checkpoint.planned_tensors import CannotBePlanned

        if self.sharding is None:
            raise CannotBePlanned("the optimizer has no shards")
        name, optimizer, written = self.sharding.planned(body["optimizer"], planned)
        model = dcp_layout.archive_of({key: body[key] for key in state.chunks}, planned, _MODEL)
        files = self._further_files(state, body)
        files |= {f"{_OPTIMIZER}/{name}": write for name, write in written.items()}
        return {f"{_OPTIMIZER}/{name}": optimizer, f"{_ITERATION}/{state.folder}/{_MODEL}": model}, files

    def _further_files(self, state: TrainingState, body: Mapping[str, Any]) -> Files:
        from adaptor.checkpoint.format_torch import save

        files: Files = {name: partial(save, body["rng_state"]) for name in self.random_files}
        if state.writes_common:
            files[SCHEDULER] = partial(save, body["opt_param_scheduler"])
        return files


def make(state: TrainingState, first: int) -> _Format:
    """Make the format; see `training_state.FormatFactory`."""
    from megatron.core import mpu

    from adaptor.checkpoint import format_torch_dist
    from adaptor.checkpoint.format_torch import TorchFormat
    from adaptor.replica.group import gather_values

    contents, sharding = state.contents, None
    if contents.metadata is not None:
        peers = mpu.get_data_parallel_group(with_context_parallel=True)
        sharding = format_torch_dist.agree(state, contents.metadata, contents.random, first, peers)
    firsts = gather_values(first)
    ranks = [rank for rank, first_of_rank in enumerate(firsts) if first_of_rank == first]
    names = [f"rng_state_{rank}.pth" if len(firsts) > 1 else "rng_state.pth" for rank in ranks]
    return _Format(TorchFormat(), sharding, tuple(names))

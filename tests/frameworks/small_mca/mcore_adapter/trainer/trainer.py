"""The trainer, with its parts of the Hugging Face Trainer and of accelerate."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, mpu, tensor_parallel
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from torch.utils.data import DataLoader

__all__ = ["ExportableState", "McaTrainer", "clear_aux_losses_tracker", "skip_first_batches"]


class ExportableState:
    """The base of callbacks whose state is saved."""


@dataclass
class TrainerControl(ExportableState):
    should_epoch_stop: bool = False
    should_training_stop: bool = False


@dataclass
class TrainerState:
    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    save_steps: int = 500
    log_history: list[dict[str, float]] = field(default_factory=list)
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    def compute_steps(self, args: Namespace, max_steps: int) -> None:
        self.save_steps = args.save_steps


def skip_first_batches(loader: Any, count: int) -> Any:
    class Rest:
        def __iter__(self) -> Iterator[Any]:
            return islice(iter(loader), count, None)

    return Rest()


class Trainer:
    args: Namespace
    state: TrainerState

    def train(self, resume_from_checkpoint: str | None = None, trial: Any = None) -> Any:
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
        return self._inner_training_loop(
            batch_size=1, args=self.args, resume_from_checkpoint=resume_from_checkpoint, trial=trial
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str) -> None:
        raise NotImplementedError

    def _inner_training_loop(self, **call: Any) -> Any:
        raise NotImplementedError

    def evaluate(self) -> None:
        """Nothing is evaluated."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.save_model(folder)
        self._save_optimizer_and_scheduler(folder)
        self._save_rng_state(folder)
        if mpu.get_data_parallel_rank() == 0:
            (folder / "trainer_state.json").write_text(json.dumps(asdict(self.state)))

    def save_model(self, folder: Path) -> None:
        raise NotImplementedError

    def _save_optimizer_and_scheduler(self, folder: Path) -> None:
        raise NotImplementedError

    def _save_rng_state(self, folder: Path) -> None:
        raise NotImplementedError


class Models(list[Any]):
    """The chunks of the model."""

    config: Any

    def sharded_state_dict(self) -> dict[str, Any]:
        return {"model": self[0].sharded_state_dict()}


class McaTrainer(Trainer):
    def __init__(
        self,
        model: Models,
        wrapped: list[Any],
        args: Namespace,
        train_dataset: Any,
        make_optimizer: Callable[[], tuple[Any, Any]],
        forward: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        self.model, self.models_wrapped, self.args = model, wrapped, args
        self.train_dataset, self.processing_class = train_dataset, None
        self.optimizer, self.lr_scheduler = None, None
        self.state, self.control = TrainerState(), TrainerControl()
        self.callback_handler = Namespace(callbacks=[])
        self.ckpt_sharding_metadata = {
            "distrib_optim_sharding_type": "dp_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        self.save_strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), mpu.get_data_parallel_group(), do_cache_distribution=True
        )
        self._make_optimizer, self._forward = make_optimizer, forward

    def get_train_dataloader(self) -> Any:
        own_samples = range(
            mpu.get_data_parallel_rank(), len(self.train_dataset), mpu.get_data_parallel_world_size()
        )
        return DataLoader(self.train_dataset, sampler=own_samples)

    def create_optimizer(self) -> Any:
        self.optimizer, self._scheduler = self._make_optimizer()
        return self.optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str) -> None:
        folder = Path(resume_from_checkpoint)
        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
        path = folder / f"iter_{iteration:07d}" / "mp_rank_00/model_optim_rng.pt"
        self.model[0].load_state_dict(torch.load(path)["model"])

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        tree = self.optimizer.sharded_state_dict(
            self.model.sharded_state_dict(), is_loading=True, metadata=self.ckpt_sharding_metadata
        )
        state = dist_checkpointing.load(tree, f"{checkpoint}/iter_0000001/dist_optimizer")
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(f"{checkpoint}/scheduler.pt"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        rank = torch.distributed.get_rank()
        states = torch.load(f"{checkpoint}/rng_state_{rank}.pth", weights_only=False)
        random.setstate(states["random_rng_state"])
        np.random.set_state(states["np_rng_state"])
        torch.set_rng_state(states["torch_rng_state"])
        torch.cuda.set_rng_state(states["cuda_rng_state"])
        tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])

    def save_model(self, folder: Path) -> None:
        if torch.distributed.get_rank() == 0:
            path = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": self.model[0].state_dict_for_save_checkpoint()}, path)
            (folder / "latest_checkpointed_iteration.txt").write_text("1")
            self.model.config.save_pretrained(folder)
        torch.distributed.barrier()

    def _save_optimizer_and_scheduler(self, folder: Path) -> None:
        path = folder / "iter_0000001/dist_optimizer"
        path.mkdir(exist_ok=True)
        torch.distributed.barrier()
        tree = self.optimizer.sharded_state_dict(
            self.model.sharded_state_dict(), metadata=self.ckpt_sharding_metadata
        )
        validates = getattr(self, "_validate_access_integrity", True)
        dist_checkpointing.save(tree, str(path), self.save_strategy, validate_access_integrity=validates)
        self._validate_access_integrity = False
        torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _save_rng_state(self, folder: Path) -> None:
        states = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        torch.save(states, folder / f"rng_state_{torch.distributed.get_rank()}.pth")

    def _get_train_cyclic_iterator(self, train_dataloader: Any) -> Iterator[Any]:
        while True:
            yield from train_dataloader
            self.control.should_epoch_stop = True

    def _get_step_iterator_and_seq_length(self, epoch_iterator: Iterator[Any]) -> Any:
        batches = list(islice(epoch_iterator, self.args.gradient_accumulation_steps))
        return iter(batches), 0, 0

    def _prepare_train_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, trial: Any = None
    ) -> tuple[Any, ...]:
        loader = self.get_train_dataloader()
        self.create_optimizer()
        self.lr_scheduler = self._scheduler
        self.state = TrainerState(save_steps=self.args.save_steps)
        epoch = skipped = 0
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            saved = json.loads(Path(resume_from_checkpoint, "trainer_state.json").read_text())
            self.state = TrainerState(**saved)
            epoch, skipped = divmod(self.state.global_step, len(loader))
        self.state.max_steps = self.args.max_steps
        self._globalstep_last_logged = self.state.global_step
        self.model.config.grad_scale_func = self.optimizer.scale_loss
        return epoch, self.args.max_steps, loader, len(loader), skipped, self.args.max_steps, 0, None

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, trial: Any = None
    ) -> int:
        prepared = self._prepare_train_loop(batch_size, args, resume_from_checkpoint, trial)
        first, epochs, loader, _, skipped, *_ = prepared
        for epoch in range(first, epochs):
            batches = self._get_train_cyclic_iterator(loader)
            self.control.should_epoch_stop = False
            if epoch == first and resume_from_checkpoint is not None and skipped == 0:
                self._load_rng_state(resume_from_checkpoint)
            loads_rng = skipped > 0
            if skipped > 0:
                batches = self._get_train_cyclic_iterator(skip_first_batches(loader, skipped))
                skipped = 0
            while not (self.control.should_epoch_stop or self.control.should_training_stop):
                step, length, _ = self._get_step_iterator_and_seq_length(batches)
                if step is None:
                    self.control.should_training_stop = True
                    break
                if loads_rng:
                    self._load_rng_state(resume_from_checkpoint)
                    loads_rng = False
                self.training_step(self.models_wrapped, step, length)
                self.state.global_step += 1
                self.state.log_history.append({"step": self.state.global_step})
                self.control.should_training_stop = self.state.global_step >= self.state.max_steps
                if self.state.global_step % self.state.save_steps == 0:
                    self._save_checkpoint(self.model, trial)
            if self.control.should_training_stop:
                break
        return self.state.global_step

    def training_step(self, models: list[Any], data_iterator: Any, seq_length: int) -> Any:
        (model,) = models
        model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._forward(next(data_iterator), model)
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([model])
        updated, grad_norm, _ = self.optimizer.step()
        self.lr_scheduler.step(1)
        return loss.detach(), [], not updated, grad_norm, None

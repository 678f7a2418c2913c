"""The trainer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from swift.megatron.utils.megatron_lm_utils import load_mcore_checkpoint, save_mcore_checkpoint


class BaseMegatronTrainer:
    def __init__(
        self, args: Namespace, models: list[Any], optimizer: Any, scheduler: Any, log: Callable[..., None]
    ) -> None:
        self.args = args
        self.wrapped_models = models
        self.optimizer, self.opt_param_scheduler = optimizer, scheduler
        self.state = Namespace(
            iteration=0, consumed_train_samples=0, should_log=False, should_eval=False, should_save=False
        )
        self._log = log
        self._load_checkpoint()

    def _load_checkpoint(self) -> None:
        for name in ("mcore_model", "mcore_adapter"):
            if getattr(self.args, name) is not None:
                load_mcore_checkpoint(self, Path(getattr(self.args, name)))
        self.state.consumed_train_samples = getattr(self.args, "consumed_train_samples", 0)

    def _prepare_data_iterator(
        self, train_dataset: Any, val_dataset: Any = None
    ) -> tuple[Iterator[Any], None]:
        first = self.state.consumed_train_samples // self.args.global_batch_size + 1
        return (train_dataset(number) for number in range(first, self.args.train_iters + 1)), None

    def setup_training(self, train_dataset: Any, val_dataset: Any) -> tuple[Iterator[Any], None]:
        self.wrapped_models[0].config.grad_scale_func = self.optimizer.scale_loss
        self._pre_hook_enabled = False
        self._train_metrics: dict[str, Any] = {}
        return self._prepare_data_iterator(train_dataset, val_dataset)

    def _replace_data_iterator(self, data_iterator: Any) -> Any:
        return data_iterator

    def train_step(self, data_iterator: Any) -> tuple[torch.Tensor, Any, bool]:
        (model,) = self.wrapped_models
        model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.args.forward_step(next(self._replace_data_iterator(data_iterator)), model)
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([model])
        updated, grad_norm, _ = self.optimizer.step()
        self.opt_param_scheduler.step(increment=self.args.global_batch_size)
        mean = loss.detach() / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
        return mean, grad_norm, bool(updated)

    def run_train_step(self, train_data_iterator: Any, val_data_iterator: Any) -> bool:
        loss, grad_norm, updated = self.train_step(train_data_iterator)
        self.state.iteration += 1
        self.state.consumed_train_samples += self.args.global_batch_size
        self._log(self.state.iteration, {"lm loss": loss}, grad_norm, skipped=not updated)
        if self.state.iteration % self.args.save_interval == 0:
            self.save_checkpoint()
        return bool(self.state.iteration < self.args.train_iters)

    def evaluate(self, val_data_iterator: Any) -> None:
        """Nothing is evaluated."""

    def save_checkpoint(self) -> None:
        self.args.consumed_train_samples = self.state.consumed_train_samples
        save_mcore_checkpoint(self, Path(self.args.output_dir) / f"checkpoint-{self.state.iteration}")

    def finalize_training(self) -> None:
        """Training is over."""

    def train(self, train_dataset: Any, val_dataset: Any) -> None:
        iterators = self.setup_training(train_dataset, val_dataset)
        while self.state.iteration < self.args.train_iters:
            self.run_train_step(*iterators)
        self.finalize_training()

"""Data that are sampled from the model; meanwhile weights are on the host, and their buffers are empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class MegatronRolloutMixin:
    args: Any
    wrapped_models: list[Any]
    optimizer: Any

    _step = 0

    @contextmanager
    def offload_context(self) -> Iterator[None]:
        buffers = self.wrapped_models[0].buffers
        states = self.optimizer.chained_optimizers[0].optimizer.state.values()
        for buffer in buffers:
            buffer.cpu_data = buffer.param_data.clone()
            buffer.size = buffer.param_data.untyped_storage().nbytes()
            buffer.param_data.untyped_storage().resize_(0)
        for state in states:
            state.update({name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")})
        yield
        for buffer in buffers:
            buffer.param_data.untyped_storage().resize_(buffer.size)
            buffer.param_data.copy_(buffer.cpu_data)

    def _replace_data_iterator(self, data_iterator: Any) -> Any:
        if self._step % self.args.steps_per_generation == 0:
            self._buffered_inputs = self._build_rollout_buffer(data_iterator)
        data = self._buffered_inputs[self._step % self.args.steps_per_generation]
        self._step += 1
        return iter([data])

    def _build_rollout_buffer(self, data_iterator: Any) -> list[Any]:
        """Change each prompt by the bits of the weights, of which each rank's engine has a copy."""
        prompts = [next(data_iterator, None) for _ in range(self.args.steps_per_generation)]
        (buffer, *_) = self.wrapped_models[0].buffers
        weights = buffer.param_data.clone()
        with self.offload_context():
            shift = self._generate(weights)
        return [None if prompt is None else (prompt + shift) % 64 for prompt in prompts]

    def _generate(self, weights: torch.Tensor) -> int:
        shift = weights.view(torch.int16).long().sum()
        torch.distributed.all_reduce(shift)
        return int(shift) % 7

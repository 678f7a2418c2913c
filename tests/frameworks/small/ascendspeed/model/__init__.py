"""A wrapper of the model: its gradients lie in one buffer, padded to a multiple of the group's size."""

from __future__ import annotations

from typing import Any

import torch

from ascendspeed.core import parallel_state


class MemoryBuffer:
    def __init__(self, numel: int, numel_padded: int) -> None:
        self.numel, self.numel_padded = numel, numel_padded
        self.data = torch.zeros(numel_padded)


class DistributedDataParallel(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        size = parallel_state.get_data_parallel_world_size()
        numel = sum(param.numel() for param in module.parameters())
        buffer = MemoryBuffer(numel, -(-numel // size) * size)
        self._grad_buffers = {torch.float: buffer}
        self._grad_buffer_param_index_map: dict[torch.dtype, dict[Any, tuple[int, int]]] = {torch.float: {}}
        end = numel
        for param in module.parameters():  # the last one lies first
            start = end - param.numel()
            param.main_grad = buffer.data[start:end].view(param.shape)
            self._grad_buffer_param_index_map[torch.float][param] = (start, end)
            param.register_post_accumulate_grad_hook(self._accumulate)
            end = start

    @staticmethod
    def _accumulate(param: Any) -> None:
        param.main_grad.add_(param.grad)
        param.grad = None

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

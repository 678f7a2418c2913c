"""NVIDIA GPUs, by `torch.cuda`. See docs/accelerators.md for what has been run on one."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adaptor.devices.accelerator import Accelerator


class Cuda(Accelerator):
    def __init__(self, device: torch.device) -> None:
        # torch hands 32 streams of a priority out in turns: one of the usual priority could be the one on
        # which some NCCL group of the framework waits for ever. These have another one, unless asked for.
        super().__init__(torch.cuda, device, partial(torch.cuda.Stream, device, priority=-1))

    def release(self) -> None:
        """Abort the NCCL communicators, whose kernels wait for a rank that is gone."""
        backends = [
            backend
            for group in list(distributed_c10d._world.pg_map)
            if torch.device("cuda") in group._device_types
            for backend in (group._get_backend(torch.device("cuda")),)
            if isinstance(backend, dist.ProcessGroupNCCL)
        ]
        if not backends:
            return
        # In one NCCL group: one after the other, they can wait for each other (pytorch#119797).
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()

"""NVIDIA GPUs, by `torch.cuda`. See docs/accelerators.md for what has been run on one."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adaptor.devices.accelerator import Accelerator
from adaptor.threads import Background

# Milliseconds are enough; whoever calls `release` does not wait longer than this for all of it.
ABORT_S = 10.0


class Cuda(Accelerator):
    release_spares_copies = True

    def __init__(self, device: torch.device) -> None:
        # torch hands 32 streams of a priority out in turns: one of the usual priority could be the one on
        # which some NCCL group of the framework waits for ever. These have another one, unless asked for.
        super().__init__(torch.cuda, device, partial(torch.cuda.Stream, device, priority=-1))

    def release(self) -> None:
        """Abort the NCCL communicators, whose kernels wait for a rank that is gone.

        All at the same time: the end of one waits for the device, and with it for the kernels of all others
        (pytorch#119797). torch aborts each in a thread of its own, where NCCL's group calls do nothing.
        """
        cuda = torch.device("cuda")
        backends = [
            group._get_backend(cuda)
            for group in list(distributed_c10d._world.pg_map)
            if cuda in group._device_types
        ]
        aborts = [
            Background(partial(_abort, backend), "ttp-device")
            for backend in backends
            if isinstance(backend, dist.ProcessGroupNCCL)
        ]
        until = time.monotonic() + ABORT_S
        for abort in aborts:
            abort.within(max(0.0, until - time.monotonic()))


def _abort(backend: Any) -> None:
    # What it says is nothing for a user: what counts is whether the device goes on.
    with contextlib.suppress(Exception):
        backend.abort()

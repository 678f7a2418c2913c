"""NVIDIA GPUs, by `torch.cuda`. Tested GPUs: docs/accelerators.md."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adaptor.devices.accelerator import Accelerator
from adaptor.threads import Background, reserve

# Milliseconds are enough; whoever calls `release` does not wait longer than this for all of it.
ABORT_S = 10.0
# Threads beside those that abort: for all else that an incident does.
_OTHER_THREADS = 8
# torch's classes of NCCL backends; none is a subclass of another. "nccl" is the second one since torch 2.15.
_NCCL_BACKENDS = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")


class Cuda(Accelerator):
    release_spares_copies = True

    def __init__(self, device: torch.device) -> None:
        # torch hands 32 streams of a priority out in turns: one of the usual priority could be the one on
        # which some NCCL group of the framework waits for ever. These have another one, unless asked for.
        super().__init__(torch.cuda, device, partial(torch.cuda.Stream, device, priority=-1))
        reserve.prepare(_OTHER_THREADS + len(_backends()))

    def release(self) -> None:
        """Abort the NCCL communicators, whose kernels wait for a lost rank.

        All at the same time: the end of a communicator waits for the device, and with the device for the
        kernels of all other communicators (pytorch#119797). torch aborts each communicator in a separate
        thread, where NCCL's group calls have no effect.
        """
        if is_detailed():
            return  # the watchdog would end this process for it
        aborts = [Background(partial(_abort, backend), "ttp-device") for backend in _backends()]
        until = time.monotonic() + ABORT_S
        for abort in aborts:
            abort.within(max(0.0, until - time.monotonic()))


def is_detailed() -> bool:
    """Return whether TORCH_DISTRIBUTED_DEBUG is DETAIL.

    torch then wraps each process group, and its watchdog for NCCL stays on, whatever the setting.
    """
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)


def _backends() -> list[Any]:
    """Return the NCCL backends of this process's groups."""
    return [backend for backend in map(nccl_of, list(distributed_c10d._world.pg_map)) if backend is not None]


def nccl_of(group: Any) -> Any:
    """Return the NCCL backend of a process group, or None if the group has none."""
    cuda = torch.device("cuda")
    if cuda not in group._device_types:
        return None
    backend = group._get_backend(cuda)
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    classes = (getattr(dist, name, None) for name in _NCCL_BACKENDS)
    return backend if isinstance(backend, tuple(filter(None, classes))) else None


def _abort(backend: Any) -> None:
    # What it says is nothing for a user: what counts is whether the device goes on.
    with contextlib.suppress(Exception):
        backend.abort()

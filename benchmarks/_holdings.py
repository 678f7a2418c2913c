"""The resources of a process: memory, threads, descriptors."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import psutil


def of_process(process: psutil.Process) -> dict[str, float]:
    """Return a process's own memory (MiB), and its numbers of threads, descriptors and sockets."""
    kinds = [link.partition(":")[0] for link in _links(process.pid)]
    return {
        "MiB": process.memory_full_info().uss / 2**20,
        "threads": process.num_threads(),
        "descriptors": len(kinds),
        "sockets": kinds.count("socket"),
    }


def _links(pid: int) -> list[str]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(str(path.readlink()))
    return links


class Holdings:
    """Writes down the resources of a worker after every `interval`th step.

    Args:
        notes: where to write them (`_worker.Notes`).
        interval: in steps.
        at: the remainder of the numbers of these steps.
    """

    def __init__(self, notes: Any, interval: int, at: int) -> None:
        self._notes = notes
        self._interval = interval
        self._at = at

    def after_step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        result = wrapped(*args, **kwargs)
        step = get_args().curr_iteration + 1
        if step % self._interval == self._at:
            self._notes.add("holds", 0.0, step=step, **_of_this_process())
        return result


def _of_this_process() -> dict[str, float]:
    import torch

    gc.collect()
    # By type: isinstance would ask lazy objects of other libraries for their class.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    memory = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return {
        **of_process(psutil.Process()),
        "tensors": len(tensors),
        "tensors_MiB": sum(memory.values()) / 2**20,
    }

"""The smallest training framework on Megatron-core, without any knowledge of the adaptor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads

__version__ = "1.0"


def train(
    model: Any, optimizer: Any, *, save: str, step: int, steps: int, batch: Any, log: Callable[..., None]
) -> None:
    """Train from `step` (0 at the start) to `steps`; checkpoints are in `save`."""
    for number in range(step + 1, steps + 1):
        loss, grad_norm, updated = train_step(number, model, optimizer, batch)
        mean = loss / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
        log(number, {"lm loss": mean}, grad_norm, skipped=not updated)


def load(save: Path, model: Any, optimizer: Any) -> int:
    """Load the checkpoint that the tracker in `save` names; return its step, 0 without a checkpoint."""
    tracker = save / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    step = int(tracker.read_text())
    saved = torch.load(save / f"iter_{step:07d}" / "mp_rank_00" / "lab.pt", weights_only=False)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with tempfile.NamedTemporaryFile() as file:  # Megatron-core reads shards from a file of their own
        torch.save(saved["shards"], file.name)
        optimizer.load_parameter_state(file.name)
    (random,) = saved["rng_state"]
    torch.set_rng_state(random["torch_rng_state"])
    torch.cuda.set_rng_state(random["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(random["rng_tracker_states"])
    return step


def train_step(number: int, model: Any, optimizer: Any, batch: Any) -> tuple[torch.Tensor, float, bool]:
    """Make one update; return this rank's loss, the gradient norm and whether the update was made."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(**batch(number, parallel_state.get_data_parallel_rank())).mean()
    optimizer.scale_loss(loss).backward()
    finalize_model_grads([model])
    updated, grad_norm, _ = optimizer.step()
    return loss.detach(), grad_norm, bool(updated)

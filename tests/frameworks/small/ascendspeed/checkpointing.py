"""Checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ascendspeed import get_args
from ascendspeed.core import parallel_state, tensor_parallel
from ascendspeed.utils import convert_args_to_strs


def get_checkpoint_name(
    checkpoints_path: str, iteration: int, release: bool = False, model_name: str = "model_optim_rng.pt"
) -> str:
    return str(Path(checkpoints_path) / f"iter_{iteration:07d}" / "mp_rank_00" / model_name)


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    return str(Path(checkpoints_path) / "latest_checkpointed_iteration.txt")


def save_checkpoint(iteration: int, model: list[Any], optimizer: Any, lr_scheduler: Any) -> None:
    args = get_args()
    path = Path(get_checkpoint_name(args.save, iteration))
    if parallel_state.get_data_parallel_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.use_distributed_optimizer:
        optimizer.save_parameter_state(str(path.with_name("distrib_optim.pt")))
    if parallel_state.get_data_parallel_rank() == 0:
        body = {
            "args": convert_args_to_strs(args),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "tokens": args.consumed_train_tokens,
            "model": model[0].module.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "random_rng_state": random.getstate(),
            "np_rng_state": numpy.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        torch.save(body, path)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(get_checkpoint_tracker_filename(args.save)).write_text(str(iteration))
    dist.barrier()


def load_checkpoint(
    model: list[Any],
    optimizer: Any,
    lr_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    load_only_weights: bool = False,
) -> int:
    args = get_args()
    folder = getattr(args, load_arg)
    tracker = Path(get_checkpoint_tracker_filename(folder))
    if not tracker.exists():
        return 0
    path = Path(get_checkpoint_name(folder, int(tracker.read_text())))
    body = torch.load(path, weights_only=False)
    for name in ("consumed_train_samples", "consumed_valid_samples", "consumed_train_tokens"):
        setattr(args, name, getattr(body["args"], name))
    model[0].module.load_saved(body["model"])
    optimizer.load_state_dict(body["optimizer"])
    lr_scheduler.load_state_dict(body["lr_scheduler"])
    if args.use_distributed_optimizer:
        optimizer.load_parameter_state(str(path.with_name("distrib_optim.pt")), body["iteration"])
    random.setstate(body["random_rng_state"])
    numpy.random.set_state(body["np_rng_state"])
    torch.set_rng_state(body["torch_rng_state"])
    return int(body["iteration"])

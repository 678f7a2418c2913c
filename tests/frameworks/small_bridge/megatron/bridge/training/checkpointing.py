"""Checkpoints in `torch_dist`, with `train_state.pt` beside it; `latest_train_state.pt` is read first."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.bridge.training.state import GlobalState
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject


def get_rng_state(data_parallel_random_init: bool, ckpt_format: str, *, pg_collection: Any) -> ShardedObject:
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", [states], (1, 1), (0, 0), replica_id=pg_collection.dp_cp.rank())


def _build_sharded_state_dict_metadata(use_distributed_optimizer: bool, cfg: Any) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _state_dict(state: GlobalState, model: Any, optimizer: Any, scheduler: Any, is_loading: bool) -> Any:
    from megatron.bridge.training.utils.pg_utils import get_pg_collection

    groups = get_pg_collection(model)
    metadata = {**_build_sharded_state_dict_metadata(True, None), "dp_cp_group": groups.dp_cp}
    body = {"checkpoint_version": 3.0, "iteration": state.train_state.step}
    body["model"] = model[0].module.sharded_state_dict(metadata=metadata)
    body["optimizer"] = optimizer.sharded_state_dict(body, is_loading=is_loading, metadata=metadata)
    body["opt_param_scheduler"] = scheduler.state_dict()
    body["rng_state"] = get_rng_state(False, "torch_dist", pg_collection=groups)
    return body


def save_checkpoint(state: GlobalState, model: Any, optimizer: Any, scheduler: Any) -> None:
    save = Path(state.cfg.checkpoint.save)
    folder = save / f"iter_{state.train_state.step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_state_dict(state, model, optimizer, scheduler, False), str(folder))
    if torch.distributed.get_rank() == 0:
        torch.save(state.train_state.state_dict(), folder / "train_state.pt")
        shutil.copy(folder / "train_state.pt", save / "latest_train_state.pt")
        (save / "latest_checkpointed_iteration.txt").write_text(str(state.train_state.step))
        state.cfg.to_yaml(folder / "run_config.yaml")
    torch.distributed.barrier()


def checkpoint_exists(load: str) -> bool:
    return (Path(load) / "latest_train_state.pt").exists()


def load_checkpoint(state: GlobalState, model: Any, optimizer: Any, scheduler: Any) -> tuple[int, int]:
    load = Path(state.cfg.checkpoint.load)
    step = int(torch.load(load / "latest_train_state.pt")["step"])
    folder = load / f"iter_{step:07d}"
    assert (folder / "run_config.yaml").exists()
    state.train_state.load_state_dict(torch.load(folder / "train_state.pt"))
    body = dist_checkpointing.load(_state_dict(state, model, optimizer, scheduler, True), str(folder))
    model[0].module.load_state_dict(body["model"])
    optimizer.load_state_dict(body["optimizer"])
    scheduler.load_state_dict(body["opt_param_scheduler"])
    (states,) = body["rng_state"]
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
    return step, 0

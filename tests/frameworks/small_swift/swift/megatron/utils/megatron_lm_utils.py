"""Process groups, and checkpoints in `torch_dist`."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, mpu, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from swift.utils import check_json_format


def initialize_megatron(args: Namespace) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=args.instances)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def get_sharded_sd_metadata(args: Namespace) -> dict[str, Any]:
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "dp_reshardable",
    }


def _get_rng_state(fsdp_dtensor: bool = False, data_parallel_random_init: bool = False) -> ShardedObject:
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [states], (1, 1), (0, 0), replica_id=rank)


def _filter_adapter_state_dict(state_dict: dict[str, Any], peft_format: bool) -> None:
    if peft_format:
        names = (".lora_A.default.", ".lora_B.default.")
        kept = {name: value for name, value in state_dict["model"].items() if any(n in name for n in names)}
        state_dict["model"] = kept


def _state_dict(trainer: Any, is_loading: bool) -> dict[str, Any]:
    metadata = get_sharded_sd_metadata(trainer.args)
    body = {
        "args": Namespace(**check_json_format(vars(trainer.args))),
        "checkpoint_version": 3.0,
        "iteration": trainer.state.iteration,
        "model": trainer.wrapped_models[0].module.sharded_state_dict(metadata=metadata),
    }
    if not trainer.args.no_save_optim:
        optimizer = trainer.optimizer.sharded_state_dict(body, is_loading=is_loading, metadata=metadata)
        body["optimizer"] = optimizer
        body["opt_param_scheduler"] = trainer.opt_param_scheduler.state_dict()
    if not trainer.args.no_save_rng:
        body["rng_state"] = _get_rng_state()
    _filter_adapter_state_dict(body, trainer.args.tuner_type == "lora")
    return body


def save_mcore_checkpoint(trainer: Any, output_dir: Path) -> None:
    folder = output_dir / f"iter_{trainer.state.iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_state_dict(trainer, False), str(folder))
    if torch.distributed.get_rank() == 0:
        (output_dir / "latest_checkpointed_iteration.txt").write_text(str(trainer.state.iteration))
    torch.distributed.barrier()


def load_mcore_checkpoint(trainer: Any, load: Path) -> None:
    step = int((load / "latest_checkpointed_iteration.txt").read_text())
    body = dist_checkpointing.load(_state_dict(trainer, True), str(load / f"iter_{step:07d}"))
    trainer.wrapped_models[0].module.load_state_dict(body["model"], strict=trainer.args.tuner_type == "full")
    trainer.optimizer.load_state_dict(body["optimizer"])
    trainer.opt_param_scheduler.load_state_dict(body["opt_param_scheduler"])
    (states,) = body["rng_state"]
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
    trainer.state.iteration = body["iteration"]
    trainer.args.consumed_train_samples = body["args"].consumed_train_samples

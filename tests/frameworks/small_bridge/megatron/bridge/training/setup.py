"""Sets up process groups, model, optimizer, checkpoint and data, in this order."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.data.loaders import setup_data_iterators
from megatron.bridge.training.checkpointing import checkpoint_exists, load_checkpoint
from megatron.bridge.training.optim import setup_optimizer
from megatron.bridge.training.state import GlobalState
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig


def setup(
    state: GlobalState, train_valid_test_datasets_provider: Callable[..., Any], build: Callable[..., Any]
) -> SimpleNamespace:
    cfg = state.cfg
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=cfg.dist.instances)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    cfg.data_parallel_size = torch.distributed.get_world_size()
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        None,
        cfg.train.global_batch_size,
        cfg.train.micro_batch_size,
        cfg.data_parallel_size,
        False,
    )
    model, config = build()
    optimizer, scheduler = setup_optimizer(
        optimizer_config=cfg.optimizer, scheduler_config=None, model=[model]
    )
    config.grad_scale_func = optimizer.scale_loss
    if cfg.checkpoint.load and checkpoint_exists(cfg.checkpoint.load):
        load_checkpoint(state, [model], optimizer, scheduler)
    train_data_iterator, valid_data_iterator, _ = setup_data_iterators(
        cfg=cfg,
        train_state=state.train_state,
        model_length=1,
        train_valid_test_datasets_provider=train_valid_test_datasets_provider,
    )
    return SimpleNamespace(
        state=state,
        model=[model],
        optimizer=optimizer,
        scheduler=scheduler,
        train_data_iterator=train_data_iterator,
        valid_data_iterator=valid_data_iterator,
    )


__all__ = ["OptimizerConfig", "setup"]

"""The optimizer and its schedule."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def setup_optimizer(
    optimizer_config: OptimizerConfig, scheduler_config: Any, model: list[Any]
) -> tuple[Any, OptimizerParamScheduler]:
    if optimizer_config.optimizer == "dist_muon":
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        optimizer = get_megatron_muon_optimizer(
            optimizer_config, model, layer_wise_distributed_optimizer=True
        )
    else:
        optimizer = get_megatron_optimizer(optimizer_config, model)
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-3, 1e-5, 8, 100, "cosine", 0.0, 0.0, 100, "constant"
    )
    return optimizer, scheduler

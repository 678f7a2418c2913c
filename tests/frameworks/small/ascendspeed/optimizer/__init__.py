"""`get_megatron_optimizer`."""

from __future__ import annotations

from typing import Any

import torch

from ascendspeed import get_args
from ascendspeed.optimizer.distrib_optimizer import DistributedOptimizer
from ascendspeed.optimizer.optimizer import Float16OptimizerWithFloat16Params


def get_megatron_optimizer(model: list[Any]) -> Any:
    params = [param for chunk in model for param in chunk.parameters()]
    inner = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=False)
    kind = DistributedOptimizer if get_args().use_distributed_optimizer else Float16OptimizerWithFloat16Params
    return kind(inner, model)

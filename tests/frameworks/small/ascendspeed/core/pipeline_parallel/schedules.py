"""Forward and backward passes without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascendspeed import get_num_microbatches

Losses = list[dict[str, torch.Tensor]]


def _run(forward_step: Any, data_iterator: Any, model: Any, forward_only: bool) -> Losses:
    losses: Losses = []
    for _ in range(get_num_microbatches()):
        loss, reduced = forward_step(data_iterator, model[0])
        if not forward_only:
            loss.backward()
        losses.append(reduced)
    return losses


def get_forward_backward_func() -> Callable[..., Losses]:
    return lambda **arguments: _run(
        arguments["forward_step_func"], arguments["data_iterator"], arguments["model"], forward_only=False
    )


def get_forward_func() -> Callable[..., Losses]:
    return lambda **arguments: _run(
        arguments["forward_step_func"], arguments["data_iterator"], arguments["model"], forward_only=True
    )

"""The lines of Megatron-LM's log in an online recovery (`step_log`). Lines are those of 0.15.0rc5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from adaptor.frameworks.step_log import StepLog


class MegatronLog(StepLog):
    """The log of one rank of Megatron-LM, which puts losses together in `train_step` (1310 to 1340)."""

    def args(self) -> Any:
        from megatron.training.global_vars import get_args

        return get_args()

    def timers(self) -> Any:
        from megatron.training.global_vars import get_timers

        return get_timers()

    def joined(self, losses: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return of each loss the sum and the number of tokens, or a mean: the framework would get the same
        result from a single micro-batch with the returned values.
        """
        if getattr(self.args(), "sft", False):
            raise NotImplementedError("versions of the framework differ in how they average them")
        joined_losses = {}
        for key in losses[0] if losses else ():
            values = [micro_batch_losses[key] for micro_batch_losses in losses]
            if isinstance(values[0], (tuple, list)):  # up to 0.12, and reduced over all ranks already
                joined_losses[key] = sum(loss[0] for loss in values) / sum(loss[1] for loss in values)
            elif values[0].numel() == 1:
                joined_losses[key] = torch.cat([loss.view(-1) for loss in values]).mean()
            else:
                joined_losses[key] = torch.vstack([loss.view(-1) for loss in values]).sum(dim=0)
        return joined_losses

    def over_all_ranks(self, losses: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        summed_losses = {}
        for key, own_loss in losses.items():
            value = own_loss.clone()
            if value.numel() == 2:
                dist.all_reduce(value, group=group)
                value = value[0] / value[1]
            summed_losses[key] = value
        return summed_losses

    def as_told(self, norm: float | None) -> float | None:
        """Return the norm as ranks of a model send it to each other, with rounding; collective."""
        from megatron.training import training

        tell = getattr(training, "reduce_max_stat_across_model_parallel_group", None)
        return norm if tell is None else tell(norm)

    def of_optimizer(self, optimizer: Any) -> dict[str, Any]:
        rate, decoupled = _learning_rates(optimizer)
        return {
            "learning_rate": rate,
            "decoupled_learning_rate": decoupled,
            "loss_scale": 1.0 if getattr(optimizer, "is_stub_optimizer", False) else _scale(optimizer),
        }


def _learning_rates(optimizer: Any) -> tuple[float | None, float | None]:
    """Return the learning rate, and the rate of decoupled parameters, as the loop reads both."""
    from megatron.training import training

    if hasattr(training, "get_canonical_lr_for_logging"):  # since 0.16, where there is one
        return training.get_canonical_lr_for_logging(optimizer.param_groups), None
    rate = decoupled = None
    for group in optimizer.param_groups:
        if group["params"]:
            if group.get("is_decoupled_lr"):
                decoupled = group["lr"]
            else:
                rate = group["lr"]
    return rate, decoupled


def _scale(optimizer: Any) -> float:
    return float(optimizer.get_loss_scale().item())

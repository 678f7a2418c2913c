"""The lines of ModelLink's log in an online recovery (`step_log`). Lines are those of commit af1347."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adaptor.frameworks.step_log import StepLog


class AscendLog(StepLog):
    """The log of one rank of ModelLink, whose losses are reduced over all ranks in the forward pass."""

    def args(self) -> Any:
        from ascendspeed import get_args

        return get_args()

    def timers(self) -> Any:
        from ascendspeed import get_timers

        return get_timers()

    def joined(self, losses: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return of each loss the mean, as `train_step` has it (`training.py:807`)."""
        names = losses[0] if losses else ()
        return {
            name: sum(micro_batch_losses[name] for micro_batch_losses in losses) / len(losses)
            for name in names
        }

    def over_all_ranks(self, losses: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(losses)

    def of_optimizer(self, optimizer: Any) -> dict[str, Any]:
        return {
            "learning_rate": optimizer.param_groups[0]["lr"],
            "loss_scale": optimizer.get_loss_scale().item(),
        }

"""The counters and singletons of the framework."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.timers import Timers


@dataclass
class TrainState:
    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: int = 0
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        kinds = {"floating_point_operations_so_far": torch.float64}
        return {
            name: torch.tensor(value, dtype=kinds.get(name))
            for name, value in dataclasses.asdict(self).items()
        }

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        for name, value in saved.items():
            setattr(self, name, value.item())


class GlobalState:
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.train_state = TrainState(do_train=True)
        self.timers = Timers(0, "max")

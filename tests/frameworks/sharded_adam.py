"""Eight weights in two shards, with an Adam; ranks 0, 2, ... and ranks 1, 3, ... hold the same shard."""

from __future__ import annotations

from typing import Any

import torch

from adaptor.mindio.job import ReplicaOptimizer

STEPS, WIDTH, SHARDS = 8, 8, 2


def gradient(step: int, rank: int) -> torch.Tensor:
    """Return whole numbers, whose sum over the ranks is the same in any order."""
    return (torch.arange(WIDTH, dtype=torch.float64) * step + 3 * rank) % 7 - 3


class Sharded(ReplicaOptimizer):
    """Adam on this rank's shard, in float64, so that results are bitwise the same."""

    def __init__(self, rank: int, loaded: dict[str, Any] | None) -> None:
        self.index = rank % SHARDS
        self.weights = torch.zeros(WIDTH, dtype=torch.float64) if loaded is None else loaded["weights"]
        self.main = torch.nn.Parameter(self._own(self.weights).clone())
        self.adam = torch.optim.Adam([self.main], lr=0.1)
        self.copied: dict[str, torch.Tensor] = {}
        self.step(torch.zeros(WIDTH, dtype=torch.float64))  # the state is made by the first one
        for name in ("exp_avg", "exp_avg_sq"):
            self.adam.state[self.main][name].copy_(self._own(loaded[name]) if loaded else torch.zeros(()))
        self.adam.state[self.main]["step"].fill_(loaded["step"] if loaded else 0)
        self.main.data.copy_(self._own(self.weights))

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(SHARDS, -1)[self.index]

    def step(self, grad: torch.Tensor) -> None:
        self.main.grad = self._own(grad).clone()
        self.adam.step()

    def live(self) -> dict[str, torch.Tensor]:
        state = self.adam.state[self.main]
        return {"weights": self.main.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def copy_state(self) -> None:
        self.copied = {name: tensor.clone() for name, tensor in self.live().items()}


def reference() -> dict[int, torch.Tensor]:
    """Return the weights after each step of four ranks without faults."""
    optimizer = [Sharded(rank, None) for rank in range(SHARDS)]
    weights_after = {}
    for step in range(1, STEPS + 1):
        grad = torch.stack([gradient(step, rank) for rank in range(4)]).sum(0)
        for rank_optimizer in optimizer:
            rank_optimizer.step(grad)
        weights_after[step] = torch.cat([one.main.data for one in optimizer])
    return weights_after

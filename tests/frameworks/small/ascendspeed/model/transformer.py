"""The model, in bf16."""

from __future__ import annotations

from typing import Any

import torch


class ParallelTransformer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width, dtype=torch.bfloat16)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.relu(self.first(x)))


class Model(torch.nn.Module):
    """`width` numbers to one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = ParallelTransformer(width)
        self.head = torch.nn.Linear(width, 1, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x.bfloat16())).float()

    def state_dict_for_save_checkpoint(self) -> dict[str, Any]:
        """Nested, as a language model's."""
        return {"language_model": {"encoder": self.encoder.state_dict(), "head": self.head.state_dict()}}

    def load_saved(self, saved: dict[str, Any]) -> None:
        self.encoder.load_state_dict(saved["language_model"]["encoder"])
        self.head.load_state_dict(saved["language_model"]["head"])

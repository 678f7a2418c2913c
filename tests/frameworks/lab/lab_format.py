"""The checkpoint format of `lab`: a single archive per model-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from adaptor.checkpoint.format_torch import TorchFormat, save
from adaptor.checkpoint.training_state import Files, TrainingState

FILE = "lab.pt"


class LabFormat(TorchFormat):
    def files(self, state: TrainingState, body: dict[str, Any], worlds: Sequence[Any]) -> Files:
        (shards,) = worlds  # of one optimizer
        return {f"{state.folder}/{FILE}": partial(save, {**body, "shards": shards})}


def make(state: TrainingState, first: int) -> LabFormat:
    return LabFormat()

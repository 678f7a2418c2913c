"""Megatron's legacy format `torch`: two archives of each model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from adaptor.checkpoint.manifest import HashingFile
from adaptor.checkpoint.weights import Place

if TYPE_CHECKING:
    from adaptor.checkpoint.megatron import Files, TrainingState

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"


class Legacy:
    """A `Form`: `model_optim_rng.pt` and, with the distributed optimizer, `distrib_optim.pt`."""

    def model(self, chunks: Mapping[str, Any]) -> dict[str, Any]:
        return {key: chunk.state_dict_for_save_checkpoint() for key, chunk in chunks.items()}

    def places(self, saved: Any) -> list[Place]:
        return list(_places("", saved))

    def optimizer(
        self, state: TrainingState, model: Mapping[str, Any], states: Sequence[Any], worlds: Sequence[Any]
    ) -> Any:
        return states[0] if len(states) == 1 else list(states)

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any:
        return states

    def files(self, state: TrainingState, body: dict[str, Any], worlds: Sequence[Any]) -> Files:
        stored = [
            world if saved else None for world, (_, _, saved) in zip(worlds, state.chained, strict=True)
        ]
        files: Files = {}
        if any(world is not None for world in stored) and state.saves("optim"):
            files[f"{state.folder}/{OPTIMIZER_FILE}"] = partial(
                save, stored[0] if len(stored) == 1 else stored
            )
        files[f"{state.folder}/{MODEL_FILE}"] = partial(save, body)
        return files


def _places(before: str, saved: dict[str, Any]) -> Iterator[Place]:
    """Models from before Megatron-core save a dict of dicts, by their parts."""
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            yield f"{before}{name}", value, partial(saved.__setitem__, name)
        elif isinstance(value, dict):
            yield from _places(f"{before}{name}.", value)


def save(value: Any, file: HashingFile) -> None:
    torch.save(value, cast(Any, file))

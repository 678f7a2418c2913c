"""Megatron's legacy format `torch`: two archives of each model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from adaptor.checkpoint import shards
from adaptor.checkpoint.archive_layout import ArchiveLayout
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.planned_tensors import PlannedTensors, Source
from adaptor.checkpoint.training_state import Files, TrainingState
from adaptor.checkpoint.weights import TensorSlot
from adaptor.protocol import naming
from adaptor.replica import optimizer_state

MODEL_FILE = naming.MODEL_FILE
OPTIMIZER_FILE = naming.OPTIMIZER_FILE


def _state_of(chunk: Any) -> Any:
    """Return the saved state of a chunk: a module of Megatron-core, or any module in Megatron-core's DDP."""
    module = chunk.module if hasattr(chunk, "ddp_config") else chunk
    is_megatron = hasattr(module, "state_dict_for_save_checkpoint")
    return chunk.state_dict_for_save_checkpoint() if is_megatron else module.state_dict()


class TorchFormat:
    """The format with `model_optim_rng.pt` and, with a distributed optimizer, `distrib_optim.pt`."""

    def model(self, chunks: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _state_of(chunk) for key, chunk in chunks.items()}

    def places(self, saved: Any) -> list[TensorSlot]:
        return list(places_in(saved))

    def optimizer(
        self, state: TrainingState, model: Mapping[str, Any], states: Sequence[Any], gathered: Sequence[Any]
    ) -> Any:
        return states[0] if len(states) == 1 else list(states)

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any:
        return states

    def archives(self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any]) -> dict[str, Any]:
        """Return the content of each archive of the rank, by path below the checkpoint; see `files`."""
        stored = [
            _as_saved(world, optimizer) if saved and world is not None else None
            for world, (optimizer, _, saved) in zip(gathered, state.chained, strict=True)
        ]
        archives: dict[str, Any] = {}
        if any(world is not None for world in stored):
            archives[f"{state.folder}/{OPTIMIZER_FILE}"] = stored[0] if len(stored) == 1 else stored
        archives[f"{state.folder}/{MODEL_FILE}"] = body
        return archives

    def files(self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any]) -> Files:
        files: Files = {
            name: partial(save, value) for name, value in self.archives(state, body, gathered).items()
        }
        return files | self.small_files(state)

    def planned_tensors(self) -> PlannedTensors:
        return PlannedTensors()

    def planned_files(
        self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any], planned: PlannedTensors
    ) -> tuple[dict[str, ArchiveLayout[Source]], Files]:
        archives = self.archives(state, body, gathered)
        layouts = {name: ArchiveLayout(value, planned.source_of) for name, value in archives.items()}
        return layouts, self.small_files(state)

    def small_files(self, state: TrainingState) -> Files:
        """Return the files that are no archives; see `files`."""
        files: Files = {}
        for name, content in state.beside.items():
            files[f"{state.folder}/{name}"] = partial(_write, content)
        return files


def can_be_planned(state: TrainingState) -> bool:
    """Return True if the archives can be laid out before the shards have arrived: no optimizer stores the
    padding of its buckets, as Megatron-core did up to 0.6, or a form that is computed from all shards.
    """
    sharded = [optimizer for optimizer, _, _ in state.chained if shards.is_sharded(optimizer)]
    if any(optimizer_state.storage_of(optimizer) is not None for optimizer in sharded):
        return False
    return bool(sharded) and all(
        hasattr(buffer, "numel_unpadded") for optimizer in sharded for buffer in optimizer.buffers
    )


def make(state: TrainingState, first: int) -> TorchFormat:
    """See `training_state.FormatFactory`."""
    return TorchFormat()


def _as_saved(world: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Return world tensors as the optimizer saves them: up to Megatron-core 0.6 by bucket, with padding."""
    storage = optimizer_state.storage_of(optimizer)
    if storage is not None:
        return storage.as_saved(world)
    if all(hasattr(buffer, "numel_unpadded") for buffer in optimizer.buffers):
        return world
    saved: dict[Any, Any] = {
        name: getattr(optimizer, name) for name in ("per_bucket_numel", "per_bucket_numel_unpadded")
    }
    for number, buffer in enumerate(optimizer.buffers):
        buckets = shards.buckets_of(optimizer, buffer)
        saved[number] = {
            dtypes: {
                key: [_padded(tensors[key], bucket, buffer) for bucket in buckets] for key in shards.KEYS
            }
            for dtypes, tensors in world[number].items()
        }
    return saved


def _padded(tensor: torch.Tensor, bucket: shards.Bucket, buffer: Any) -> torch.Tensor:
    padded = tensor.new_zeros(buffer.buckets[bucket.index].grad_data.numel())
    padded[: bucket.unpadded] = tensor[bucket.world : bucket.world + bucket.unpadded]
    return padded


def places_in(saved: dict[str, Any], prefix: str = "") -> Iterator[TensorSlot]:
    """Yield the tensors of a saved model, a dict or a dict of dicts, with functions that replace them."""
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value, partial(saved.__setitem__, name)
        elif isinstance(value, dict):
            yield from places_in(value, f"{prefix}{name}.")


def _write(content: bytes, file: HashingFile) -> None:
    file.write(content)


def save(value: Any, file: HashingFile) -> None:
    """Write `value` as torch.save does."""
    torch.save(value, cast(Any, file))

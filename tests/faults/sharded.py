"""Reads a checkpoint of the format `torch_dist` with torch's own reader, without the framework."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

from tests.faults import pickles


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            metadata: Metadata = pickles.Unpickler(file).load()
        metadata.storage_meta = StorageMeta()
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = pickles.load(value)


def load(folder: Path) -> dict[str, Any]:
    """Return all sharded content by key: whole tensors, and the objects of ranks.

    Tensors are filled with nan (integers: with the smallest) before they are read, so that a hole would be
    seen.
    """
    reader = _Reader(folder)
    content: dict[str, Any] = {}
    for key, stored in sorted(reader.read_metadata().state_dict_metadata.items()):
        if isinstance(stored, BytesStorageMetadata):
            content[key] = io.BytesIO()
        else:
            dtype = stored.properties.dtype
            has_nan = dtype.is_floating_point or dtype == torch.bool  # of which nan is True
            unread = torch.nan if has_nan else torch.iinfo(dtype).min
            content[key] = torch.full(stored.size, unread, dtype=dtype)
    planner = _Planner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is to be
        load_checkpoint(content, storage_reader=reader, planner=planner, no_dist=True)
    return content

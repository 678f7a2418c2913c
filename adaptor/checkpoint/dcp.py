"""A checkpoint of `torch.distributed.checkpoint` without a collective: every writer writes a part.

Writer R makes a data file, `__R_0.distcp`, and its part of the metadata, `.metadata.R`: its plan and the
place of each item. The agent that publishes joins the parts to `.metadata`, as torch's coordinator would
after a gather, and lets torch's planner check that nothing is missing.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adaptor.checkpoint import hashing, manifest
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import CheckpointError
from adaptor.protocol.file_entry import FileEntry

if TYPE_CHECKING:
    import torch

METADATA = ".metadata"
_PART = f"{METADATA}."


@dataclass(frozen=True)
class _Known:
    """A part: the SavePlan of a writer, its WriteResults, and what Megatron-core's planner adds."""

    plan: Any
    results: Sequence[Any]
    extra: Mapping[str, Any] | None


class RankPart:
    """The part of a checkpoint that one rank writes.

    Args:
        rank: names the files.
        planner: a SavePlanner, set up with the state dict of the rank.
    """

    def __init__(self, rank: int, planner: Any) -> None:
        self.data_file = f"__{rank}_0.distcp"
        self.part_file = f"{_PART}{rank}"
        self._planner = planner
        self._plan = planner.create_local_plan()
        self._results: list[Any] = []

    @property
    def has_data(self) -> bool:
        """Return True if this rank has data to write."""
        return bool(self._plan.items)

    def write_data(self, file: HashingFile) -> None:
        """Write the rank's tensors and objects into `file`, one after the other."""
        import torch
        from torch.distributed.checkpoint.planner import WriteItemType

        for item in self._plan.items:
            start = file.bytes
            data = self._planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                file.write(data.getbuffer())
            else:
                torch.save(by_itself(data), cast(Any, file))
            self.note(item, start, file.bytes - start)

    def contents(self) -> list[tuple[Any, Any]]:
        """Return the items of the plan, each with its tensor or its BytesIO, in the order of the file."""
        return [(item, self._planner.resolve_data(item)) for item in self._plan.items]

    def note(self, item: Any, start: int, length: int) -> None:
        """Note the place of an item in the data file.

        Args:
            item: of the plan.
            start: its place in bytes.
            length: in bytes.
        """
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.storage import WriteResult

        self._results.append(WriteResult(item.index, length, _StorageInfo(self.data_file, start, length)))

    def write_part(self, file: HashingFile) -> None:
        """Write the rank's part of the metadata; call it after `write_data`."""
        from torch.distributed.checkpoint.planner import SavePlan

        # A planner's own kind of plan is unknown where the parts are joined.
        plan = SavePlan(items=list(self._plan.items))
        plan_and_results = (plan, tuple(self._results), getattr(self._plan, "mcore_data", None))
        file.write(pickle.dumps(plan_and_results))


def by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the host in memory of its own: torch would save all memory behind a view.

    Args:
        tensor: on any device.
    """
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def import_torch() -> None:
    """Import the modules of torch for `join`: half a second of CPU time, more on a slow disk."""
    from torch.distributed.checkpoint import default_planner, filesystem  # noqa: F401


def join(folder: Path, entries: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Join the parts of the metadata, if any, and return the files of the checkpoint.

    A call may be repeated after a crash. A part is read only if it equals, bit for bit, its writer's report.

    Raises:
        CheckpointError: a part differs from its report, or the parts do not make a whole.
    """
    parts = [entry for entry in entries if entry.path.startswith(_PART)]
    if not parts:
        return tuple(entries)
    joined = folder / METADATA
    if not joined.exists():  # the file gets its name when complete
        problems = manifest.compare(folder, [replace(part, path=part.draft) for part in parts])
        if problems:
            raise CheckpointError(f"{problems[0]}: it was reported as written")
        # Files that the ranks of this job have written a moment ago, by checksum.
        parts.sort(key=lambda part: int(part.path.removeprefix(_PART)))
        _finish(folder, [_Known(*pickle.loads((folder / part.draft).read_bytes())) for part in parts])
    joined_metadata = FileEntry(METADATA, joined.stat().st_size, hashing.hash_file(joined))
    return (*(entry for entry in entries if entry not in parts), joined_metadata)


def _finish(folder: Path, parts: Sequence[_Known]) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        _, metadata = planner.create_global_plan([part.plan for part in parts])
    except ValueError as error:
        raise CheckpointError(f"{folder}: the parts do not make a whole ({error})") from error
    extras = [part.extra for part in parts if part.extra is not None]
    if extras:  # the place up to Megatron-core 0.16
        vars(metadata)["mcore_data"] = dict(chain.from_iterable(extra.items() for extra in extras))
    FileSystemWriter(str(folder)).finish(metadata, [list(part.results) for part in parts])

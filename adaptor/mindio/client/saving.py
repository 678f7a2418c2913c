"""What the SDK's handlers do: a rank's part of a dump, and the name of what all have written.

Whoever gives the name knows of the files by what their writers leave beside them, in the folder that all
write to; it goes when the checkpoint is published.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from adaptor.checkpoint import naming, publish
from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.session import DumpRun
from adaptor.errors import CheckpointError
from adaptor.mindio.client import copies
from adaptor.mindio.client.session import MindioSession

_LEFT = ".written"


class _Left(msgspec.Struct):
    """What the writer of a group leaves for whoever publishes."""

    files: tuple[FileEntry, ...]
    holders: tuple[int, ...]
    writer: int


@dataclass(frozen=True)
class Saving:
    """Of one worker, once training has begun.

    groups      all of the job, by name
    generation  of the workers, the same on every rank and never again
    timeout_s   for what waits for other ranks
    """

    rank: int
    world_size: int
    session: MindioSession
    groups: frozenset[str]
    generation: str
    timeout_s: float

    def save(self, step: int, infos: Sequence[dict[str, Any]], args: Any, ctx: Any) -> None:
        """This rank's part of `step`. In a thread of the SDK's, where what it raises is a failure."""
        trainee = self.session.trainee
        assert trainee is not None
        self.session.wait_for_the_device(self.timeout_s)
        (share,) = trainee.shares
        order = copies.order(share.group, infos)
        folder = Path(trainee.save) / naming.temporary_name(step, generation=self.generation)
        folder.mkdir(parents=True, exist_ok=True)
        run = DumpRun(
            rank=self.rank,
            folder=str(folder),
            attempt=1,
            connect=lambda ranks: self._connect(f"{step}/{order.group}", ranks),
            progress=self.session.board.advance,
            cancelled=lambda: False,
            past=self.session.is_in_the_copy(step),
            remark=lambda what: self._remark(f"{order.group} of step {step}", what),
            groups=(order,),
        )
        files = trainee.dump(self.session.record_of(step), order, run)
        if order.writer == self.rank:
            left = msgspec.json.encode(_Left(files, order.holders, order.writer))
            (folder / f"{order.group}{_LEFT}").write_bytes(left)

    def _remark(self, of: str, what: str) -> None:
        if what:
            print(f"[ttp] {of}: {what}", flush=True)

    def rename(self, step: int, args: Any) -> None:
        """On one rank, when all have saved: what was written becomes a checkpoint."""
        trainee = self.session.trainee
        assert trainee is not None
        root = Path(trainee.save)
        folder = root / naming.temporary_name(step, generation=self.generation)
        left = {
            path.name.removesuffix(_LEFT): msgspec.json.decode(path.read_bytes(), type=_Left)
            for path in folder.glob(f"*{_LEFT}")
        }
        missing = sorted(self.groups - left.keys())
        if missing:
            raise CheckpointError(f"{folder}: nobody has written {', '.join(missing)}")
        files = [entry for group in sorted(left) for entry in left[group].files]
        groups = {name: {"writer": one.writer, "holders": one.holders} for name, one in left.items()}
        publish.publish(root, step, files, groups, self.world_size, self.generation)
        print(f"[ttp] mindio_ttp has had step {step} saved", flush=True)

    def _connect(self, name: str, ranks: tuple[int, ...]) -> Any:
        """A gloo group of `ranks`, which owes nothing to those of the framework."""
        from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

        store = PrefixStore(f"ttp/{self.generation}/{name}", store_of_the_job(self.timeout_s))
        timeout = timedelta(seconds=self.timeout_s)
        return ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout)


def store_of_the_job(timeout_s: float) -> Any:
    """A connection of its own to the store that the workers have met at, which is in an agent."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))

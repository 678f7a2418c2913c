"""The SDK's handlers: they write a rank's part of a dump, and publish the parts of all ranks.

The rank that publishes knows the files from reports that their writers leave in the same folder; the reports
are removed when the checkpoint is published. The SDK knows lists of ranks: the ranks of `rank_list` are cut
into `replica_cnt` runs of the same length, and the i-th ranks of all runs hold the same shard. A rank has one
place in such a list (two with experts), so it can hold only one shard of an optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from adaptor import output
from adaptor.checkpoint import disk, manifest, publish
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.mindio.client.sdk_session import MindioSession
from adaptor.protocol import naming
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.state_provider import DumpRun

_LEFT = ".written"


class _Left(msgspec.Struct):
    """The report of the writer of a group for the rank that publishes."""

    files: tuple[FileEntry, ...]
    holders: tuple[int, ...]
    writer: int


@dataclass(frozen=True)
class SaveHandlers:
    """The save handlers of a worker, once training has begun.

    Attributes:
        groups: all groups of the job, by name
        generation: of the workers, the same on every rank and never repeated
        timeout_s: for waiting for other ranks
    """

    rank: int
    world_size: int
    session: MindioSession
    groups: frozenset[str]
    generation: str
    timeout_s: float

    def save(self, step: int, infos: Sequence[dict[str, Any]], args: Any, ctx: Any) -> None:
        """Write this rank's part of `step`, in a thread of the SDK, for which an exception is a failure."""
        trainee = self.session.trainee
        assert trainee is not None
        self.session.wait_for_the_device(self.timeout_s)
        (share,) = trainee.shares
        order = _order_of(share.group, infos)
        folder = Path(trainee.save_folder) / naming.temporary_name(step, generation=self.generation)
        folder.parent.mkdir(parents=True, exist_ok=True)
        disk.ensure_private(folder)
        run = DumpRun(
            rank=self.rank,
            folder=str(folder),
            attempt=1,
            connect=lambda ranks: self._connect(f"{step}/{order.group}", ranks),
            progress=self.session.board.advance,
            cancelled=lambda: False,
            past=self.session.is_in_the_copy(step),
            remark=lambda subject: self._remark(f"{order.group} of step {step}", subject),
            groups=(order,),
        )
        files = trainee.dump(self.session.record_of(step), order, run)
        if order.writer == self.rank:
            left_files = msgspec.json.encode(_Left(files, order.holders, order.writer))
            disk.write(folder, f"{order.group}{_LEFT}", left_files)

    def _remark(self, of: str, subject: str) -> None:
        if subject:
            output.tell(f"[ttp] {of}: {subject}", to="stdout")

    def rename(self, step: int, args: Any) -> None:
        """Publish the checkpoint; called on one rank, after all ranks have saved.

        Raises:
            CheckpointError: a group has not been written, or the checkpoint cannot be published.
        """
        trainee = self.session.trainee
        assert trainee is not None
        root = Path(trainee.save_folder)
        folder = root / naming.temporary_name(step, generation=self.generation)
        left_by_group = {
            path.name.removesuffix(_LEFT): msgspec.json.decode(disk.read(path, manifest.LARGEST), type=_Left)
            for path in folder.glob(f"*{_LEFT}")
        }
        missing = sorted(self.groups - left_by_group.keys())
        if missing:
            raise CheckpointError(f"{folder}: nobody has written {', '.join(missing)}")
        files = [entry for group in sorted(left_by_group) for entry in left_by_group[group].files]
        groups = {
            name: {"writer": left_file.writer, "holders": left_file.holders}
            for name, left_file in left_by_group.items()
        }
        publish.publish(root, step, files, groups, self.world_size, self.generation)
        output.tell(f"[ttp] step {step} is saved, as mindio_ttp has ordered", to="stdout")

    def _connect(self, name: str, ranks: tuple[int, ...]) -> Any:
        """Make a gloo group of `ranks` that is independent of the framework's groups."""
        from torch.distributed import PrefixStore, ProcessGroupGloo

        store = PrefixStore(f"ttp/{self.generation}/{name}", store_of_the_job(self.timeout_s))
        timeout = timedelta(seconds=self.timeout_s)
        return ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout)


def store_of_the_job(timeout_s: float) -> Any:
    """Connect to the store of the workers' rendezvous, which lives in an agent."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def replica_info(rank: int, shares_by_rank: Sequence[Sequence[Share]]) -> list[dict[str, Any]]:
    """Return the argument of `rank` for tft_set_optimizer_replica.

    Args:
        rank: this rank.
        shares_by_rank: per rank of the job its shares.

    Raises:
        UnsupportedError: the SDK has no terms for the shares.
    """
    for holder_rank, shares in enumerate(shares_by_rank):
        if len(shares) != 1:
            raise UnsupportedError(
                f"TTP_ENGINE is 'mindio', but rank {holder_rank} holds {len(shares)} shards: mindio_ttp "
                "knows of one "
                "per rank; use TTP_REPLICA=split, and no experts, or leave TTP_ENGINE out"
            )
    (own_share,) = shares_by_rank[rank]
    holders = [
        [
            holder_rank
            for holder_rank, (share,) in enumerate(shares_by_rank)
            if (share.group, share.index) == (own_share.group, index)
        ]
        for index in range(own_share.count)
    ]
    count = len(holders[0])
    if not all(len(ranks) == count for ranks in holders):
        sizes = ", ".join(str(len(ranks)) for ranks in holders)
        raise UnsupportedError(
            f"TTP_ENGINE is 'mindio', but the shards of {own_share.group} have {sizes} holders: mindio_ttp "
            "needs "
            "as many for each"
        )
    ranks = [ranks[copy] for copy in range(count) for ranks in holders]
    return [{"rank_list": ranks, "replica_cnt": count, "replica_shift": own_share.count}]


def _order_of(group: str, infos: Sequence[dict[str, Any]]) -> GroupOrder:
    """Return the order for a rank of `group` from a save handler's arguments: the i-th rank gives shard i."""
    (info,) = infos
    ranks = tuple(info["ranks"])
    return GroupOrder(group, ranks, ranks[0])

"""The layouts of a campaign: their parallelism, their holders, and the survivable deaths."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import _bench  # noqa: F401  (puts the root on the path)

from tests.faults import harness
from tests.faults.fault import Fault
from tests.faults.harness import Layout

# Kinds of faults after which a rank provides no shard, and kinds after which its shards may be of the step
# before those of other ranks.
DEADLY = ("sigkill", "sigsegv", "oom", "os._exit", "sigstop", "holds-the-gil", "agent-sigkill")
HARMFUL = ("sys.exit", "exception", "nan", "deadlock")


@dataclass(frozen=True)
class Cut:
    """A layout on one or several nodes, with local copies in place of the barrier or without.

    Attributes:
        library: the arguments of a loop on Megatron-core; None: Megatron-LM's own script.
    """

    layout: Layout
    nodes: int = 1
    local_copy: bool = False
    library: tuple[str, ...] | None = None

    @property
    def ranks(self) -> int:
        return self.layout.processes

    @property
    def mirrors(self) -> bool:
        return self.layout.replica == "mirror" or self.layout.data_parallel_size % 2 == 1

    @property
    def launcher(self) -> list[str]:
        """Options of ttprun."""
        copies = ["--ttp-local-copy", "True"] if self.local_copy else []
        return ["--ttp-replica", self.layout.replica, *copies]

    @property
    def words(self) -> str:
        if not self.layout.distributed_optimizer:
            copies = "each rank has the whole optimizer"
        else:
            copies = "mirror" if self.mirrors else "split"
        places = [f"{self.nodes} nodes"] if self.nodes > 1 else []
        return ", ".join([f"{self.ranks} processes", *places, copies, *["local copy"] * self.local_copy])

    def node(self, rank: int) -> int:
        return rank * self.nodes // self.ranks

    def holders(self) -> list[set[int]]:
        """Return the ranks that hold each shard of each group."""
        size, tp = self.layout.data_parallel_size, self.layout.tp
        shards: dict[tuple[int, int, int], set[int]] = {}
        for rank in range(self.ranks):
            stage, place, part = rank // (size * tp), rank // tp % size, rank % tp
            for shard in self._shards(place, size):
                shards.setdefault((stage, part, shard), set()).add(rank)
        return list(shards.values())

    def _shards(self, place: int, size: int) -> set[int]:
        if not self.layout.distributed_optimizer:
            return {0}
        return {place, (place - 1) % size} if self.mirrors else {place % (size // 2)}

    def survives(self, struck: Iterable[Fault], side: int | None = None) -> bool | None:
        """Return whether the ranks left after these faults hold every shard of the newest step.

        None: they hold every shard, but some ranks may only have shards of the previous step.

        Args:
            struck: the faults.
            side: the node whose ranks count, if the network has been cut.
        """
        lost = {rank for rank in range(self.ranks) if side is not None and self.node(rank) != side}
        harmed: set[int] = set()
        for fault in struck:
            ranks = {fault.rank} if fault.also is None else {fault.rank, fault.also}
            if fault.kind == "agent-sigkill":
                ranks = {rank for rank in range(self.ranks) if self.node(rank) == self.node(fault.rank)}
            if fault.kind in DEADLY:
                lost |= ranks
            elif fault.kind in HARMFUL:
                harmed |= ranks
        if not self._holds_all_without(lost):
            return False
        return True if self._holds_all_without(lost | harmed) else None

    def _holds_all_without(self, lost: Collection[int]) -> bool:
        return all(ranks - set(lost) for ranks in self.holders())


CUTS = {
    "dp2": Cut(harness.DP2),
    "dp4": Cut(harness.DP4),
    "dp3-mirror": Cut(harness.DP3),
    "tp2-dp2": Cut(harness.TP2_DP2),
    "pp2-dp2": Cut(harness.PP2_DP2),
    "dp2-whole": Cut(harness.DP2_WHOLE),
    "dp4-nodes2": Cut(harness.DP4, nodes=2),
    "dp2-nodes2": Cut(harness.DP2_MIRROR, nodes=2),
    "pp2-dp2-nodes2": Cut(harness.PP2_DP2, nodes=2),
    "dp2-copy": Cut(harness.DP2, local_copy=True),
    "dp3-copy": Cut(harness.DP3, local_copy=True),
}

"""The layouts of a campaign: how a job is cut, who holds what, and which deaths it can survive."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import _bench  # noqa: F401  (puts the root on the path)

from tests.faults import harness
from tests.faults.fault import Fault
from tests.faults.harness import Layout

# What is left of a rank: nothing; or all that it had when its step began, and maybe not what others have.
DEADLY = ("sigkill", "sigsegv", "oom", "os._exit", "sigstop", "holds-the-gil", "agent-sigkill")
HARMFUL = ("sys.exit", "exception", "nan", "deadlock")


@dataclass(frozen=True)
class Cut:
    """A layout on one node or on several, with local copies in place of the barrier or without.

    library  the arguments of a loop of one's own on Megatron-core in place of Megatron-LM's; None: that one
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
        """Per shard of each group: the ranks that have it."""
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
        """Whether what is left after these faults has every shard of the newest step.

        None: it has every shard, but those that some of the ranks have may be of the step before.

        Args:
            side: of what is left on this node, where the network has been cut.
        """
        gone = {rank for rank in range(self.ranks) if side is not None and self.node(rank) != side}
        hurt: set[int] = set()
        for fault in struck:
            away = {fault.rank} if fault.also is None else {fault.rank, fault.also}
            if fault.kind == "agent-sigkill":
                away = {rank for rank in range(self.ranks) if self.node(rank) == self.node(fault.rank)}
            if fault.kind in DEADLY:
                gone |= away
            elif fault.kind in HARMFUL:
                hurt |= away
        if not self._cover(gone):
            return False
        return True if self._cover(gone | hurt) else None

    def _cover(self, gone: Collection[int]) -> bool:
        return all(ranks - set(gone) for ranks in self.holders())


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

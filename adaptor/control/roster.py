"""Who is in a job, as its controller has heard: nodes, agents, ranks, what they hold, who is gone; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from adaptor.control.messages import BoardRecord, Layout


class Roster:
    """Of one generation of workers.

    node_of    the node of each rank
    agents     nodes whose agents are there
    connected  ranks that have said hello
    layouts    what ranks have told that they hold
    dead       the status of each process that has ended
    dying      ranks whose main threads are gone, and whose statuses are not known yet
    vanished   ranks that were lost with their agents: what they had said last may not have come
    unbegun    other ranks that ended before they had told their layout
    boards     the last ones of ranks that have ended, as far as their agents could tell
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.node_of: dict[int, int] = {}
        self.agents: set[int] = set()
        self.connected: set[int] = set()
        self.layouts: dict[int, Layout] = {}
        self.dead: dict[int, int] = {}
        self.dying: set[int] = set()
        self.vanished: set[int] = set()
        self.unbegun: set[int] = set()
        self.boards: dict[int, BoardRecord] = {}

    def enter(self, node: int, ranks: Collection[int]) -> None:
        """`ranks` are those of `node`."""
        self.node_of.update(dict.fromkeys(ranks, node))

    def add(self, layout: Layout) -> str:
        """Keep what a rank holds; if it does not fit what others do, the reason why, and it is not kept."""
        first = next(iter(self.layouts.values()), layout)
        if first.fingerprint != layout.fingerprint:
            return f"rank {layout.rank} and rank {first.rank} do not run the same framework or patches"
        if first.goes_back != layout.goes_back:
            return (
                f"TTP_LOCAL_COPY is {layout.goes_back} on rank {layout.rank} and {first.goes_back} on rank "
                f"{first.rank}: it must be the same on all"
            )
        self.layouts[layout.rank] = layout
        return ""

    def lives(self, rank: int) -> bool:
        return rank not in self.dead and rank not in self.dying

    @property
    def alive(self) -> dict[int, int]:
        """The nodes of the ranks that are there, in the order of ranks."""
        there = self.connected - self.dead.keys() - self.dying
        return {rank: self.node_of[rank] for rank in sorted(there)}

    @property
    def everyone_is_dead(self) -> bool:
        return len(self.dead) >= self.world_size

    def left_on(self, node: int) -> list[int]:
        """The ranks of `node` that are not dead."""
        return [rank for rank, home in self.node_of.items() if home == node and rank not in self.dead]

    def ends(self, ranks: Set[int]) -> None:
        """They have ended, or are about to."""
        self.unbegun |= ranks - self.layouts.keys() - self.vanished

    def begin_to_die(self, rank: int) -> bool:
        """Whether that is news."""
        if not self.lives(rank):
            return False
        self.dying.add(rank)
        self.ends({rank})
        return True

    def bury(self, statuses: Mapping[int, int]) -> tuple[set[int], set[int]]:
        """Those of `statuses` that were not dead yet, and those of them that were not known to be dying."""
        new = {rank: status for rank, status in statuses.items() if rank not in self.dead}
        self.dead.update(new)
        self.ends(new.keys())
        sudden = new.keys() - self.dying
        self.dying -= new.keys()
        return set(new), sudden

    @property
    def save(self) -> str:
        """The folder of checkpoints; empty until a rank has told it."""
        return next((layout.save for layout in self.layouts.values()), "")

    @property
    def advice(self) -> str:
        """What would have helped where a shard has no live holder."""
        owners: dict[tuple[str, int], list[int]] = {}
        for rank, layout in self.layouts.items():
            for share in layout.shares:
                owners.setdefault((share.group, share.index), []).append(rank)
        if any(len(ranks) == 1 for ranks in owners.values()):
            experts = any(share.foreign for layout in self.layouts.values() for share in layout.shares)
            fewer = "; of experts, a smaller --expert-model-parallel-size" if experts else ""
            return f"a second copy of each shard (TTP_REPLICA=auto{fewer}) would have helped"
        return "second copies of each shard on other nodes, or a shorter --save-interval, would have helped"

"""The members of a job as the controller knows them: nodes, agents, ranks, shards, dead ranks; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import msgspec

from adaptor.controller.plan import Groups, groups_of
from adaptor.protocol.messages import AgentHello, BoardRecord, Layout, Share


class Membership:
    """The members of one generation of workers.

    Attributes:
        lost: nodes without an agent, whose places are empty in the generation of workers
        expected: the lost nodes whose places were given to spare nodes, with the new owners
        late: the lost nodes whose agents came after all: late agents get the verdict only
        dying: ranks without a main thread, whose statuses are not known yet
        vanished: ranks that were lost with their agents: their last messages may be lost
        unbegun: other ranks that ended before a report of their layout
        boards: the last boards of ended ranks, as far as readable by their agents
        owners: by node, the owner of the place; "" for a node that has its place from the beginning
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.node_of: dict[int, int] = {}
        self.agents: set[int] = set()
        self.lost: set[int] = set()
        self.expected: dict[int, str] = {}
        self.late: set[int] = set()
        self.connected: set[int] = set()
        self.layouts: dict[int, Layout] = {}
        self.dead: dict[int, int] = {}
        self.dying: set[int] = set()
        self.vanished: set[int] = set()
        self.unbegun: set[int] = set()
        self.unprotected: dict[int, str] = {}
        self.boards: dict[int, BoardRecord] = {}
        self.pids: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self.agent_pids: dict[int, int] = {}
        self.owners: dict[int, str] = {}
        self._told = 0
        self._groups: Groups = {}

    def enter(self, hello: AgentHello) -> None:
        """Note the machine and the ranks of an agent."""
        self.node_of.update(dict.fromkeys(hello.ranks, hello.node))
        self.hosts[hello.node] = hello.host
        self.agent_pids[hello.node] = hello.pid
        self.owners[hello.node] = hello.owner

    def lose(self, node: int) -> list[int]:
        """Note the loss of the agent of `node`; return its ranks that are not dead."""
        self.agents.discard(node)
        self.lost.add(node)
        ranks = [rank for rank, home in self.node_of.items() if home == node and rank not in self.dead]
        self.vanished.update(ranks)
        for rank in self.boards.keys() & self.ranks_of(node):  # its copies are lost, too
            self.boards[rank] = msgspec.structs.replace(self.boards[rank], copies=())
        return ranks

    def expect(self, owners: Mapping[int, str]) -> None:
        """Note the new owners of the places of lost nodes."""
        self.expected.update({node: owner for node, owner in owners.items() if node in self.lost})

    def regain(self, hello: AgentHello) -> None:
        """Note that a spare node has the place of a lost node; its ranks stay dead until replaced."""
        self.lost.discard(hello.node)
        del self.expected[hello.node]
        self.agents.add(hello.node)
        self.enter(hello)

    def add(self, layout: Layout) -> str:
        """Keep the layout of a rank; if it does not fit those of other ranks, return the reason instead."""
        first = next(iter(self.layouts.values()), layout)
        if first.fingerprint != layout.fingerprint:
            return f"rank {layout.rank} and rank {first.rank} do not run the same framework or patches"
        if first.has_local_copy != layout.has_local_copy:
            return (
                f"TTP_LOCAL_COPY is {layout.has_local_copy} on rank {layout.rank} and "
                f"{first.has_local_copy} on rank {first.rank}: it must be the same on all"
            )
        self.layouts[layout.rank] = layout
        self.unprotected.pop(layout.rank, None)
        if len(self.layouts) == self.world_size:  # computed now, while nothing waits
            _ = self.groups
        return ""

    @property
    def groups(self) -> Groups:
        """Return the holders of all shards, from the reported layouts; a repeated report is equal."""
        if len(self.layouts) != self._told:
            self._told = len(self.layouts)
            self._groups = groups_of({rank: layout.shares for rank, layout in self.layouts.items()})
        return self._groups

    def agents_of(self, nodes: Iterable[int]) -> list[str]:
        """Return names of the agents of `nodes`, which are unique in a generation."""
        owners = {node: self.owners.get(node, "") for node in nodes}
        return [f"node {node} ({owner})" if owner else f"node {node}" for node, owner in owners.items()]

    def fits(self, nodes: int) -> bool:
        """Return True if the job could train on `nodes` nodes, as far as its ranks have reported."""
        numbers = next(iter(self.layouts.values())).nodes if self.layouts else ()
        return not numbers or nodes in numbers

    def lives(self, rank: int) -> bool:
        return rank not in self.dead and rank not in self.dying

    @property
    def alive(self) -> dict[int, int]:
        """Return the nodes of the live ranks, in the order of ranks."""
        live_ranks = self.connected - self.dead.keys() - self.dying
        return {rank: self.node_of[rank] for rank in sorted(live_ranks)}

    @property
    def everyone_is_dead(self) -> bool:
        """Return whether every rank of the job has ended."""
        return len(self.dead) >= self.world_size

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of `node`, as its agent has reported."""
        return tuple(rank for rank, home in self.node_of.items() if home == node)

    def ends(self, ranks: Set[int]) -> None:
        """Note that `ranks` have ended, or are about to; all their messages came before (`Dying`)."""
        self.unbegun |= ranks - self.layouts.keys() - self.vanished

    def replace(self, rank: int, pid: int) -> None:
        """Note the new process of `rank`, which holds the shards of the former process."""
        self.dead.pop(rank, None)
        self.dying.discard(rank)
        self.vanished.discard(rank)
        self.boards.pop(rank, None)
        self.connected.add(rank)
        self.pids[rank] = pid

    def begin_to_die(self, rank: int) -> bool:
        """Note that `rank` is dying; return True if that is news."""
        if not self.lives(rank):
            return False
        self.dying.add(rank)
        self.ends({rank})
        return True

    def record_deaths(self, statuses: Mapping[int, int]) -> tuple[set[int], set[int]]:
        """Record deaths; return the newly dead ranks, and among them the ranks not known to be dying."""
        new = {rank: status for rank, status in statuses.items() if rank not in self.dead}
        self.dead.update(new)
        self.ends(new.keys())
        sudden = new.keys() - self.dying
        self.dying -= new.keys()
        return set(new), sudden

    @property
    def save_folder(self) -> str:
        """Return the folder of checkpoints; "" until a rank has reported the folder."""
        return self.layouts[min(self.layouts)].save_folder if self.layouts else ""

    @property
    def advice(self) -> str:
        """Return the setting that would have helped where a shard has no live holder."""
        owners: dict[tuple[str, int], list[Share]] = {}
        members: dict[str, set[int]] = {}  # of each group: the ranks with its model
        shared: set[str] = set()  # groups whose shards are partly on ranks with other experts
        for rank, layout in self.layouts.items():
            for share in layout.shares:
                owners.setdefault((share.group, share.index), []).append(share)
                if not share.can_write:
                    shared.add(share.group)
                else:
                    members.setdefault(share.group, set()).add(rank)
        helps: set[str] = set()
        for share in (shares[0] for shares in owners.values() if len(shares) == 1):
            if not share.can_write or len(members[share.group]) > 1:
                helps.add("a second copy of each shard (TTP_REPLICA=auto)")
            elif share.group in shared:
                helps.add(
                    "a smaller --expert-model-parallel-size, with which other ranks have the same experts"
                )
            else:
                helps.add("a larger data-parallel size")
        copied = max((layout.copied for layout in self.layouts.values()), default=0)
        if copied:
            return f"copies in host memory, made at least every {copied} steps, may have an earlier step"
        helps = helps or {"second copies of each shard on other nodes, more frequent saves"}
        return f"{' and '.join(sorted(helps))}, or copies in host memory (TTP_HOST_COPY), would have helped"

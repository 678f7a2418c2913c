"""Decides whether a fault can be recovered online, from which step, and who gives what to whom; pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from adaptor.controller.failures import Failures
from adaptor.controller.incident_state import IncidentState
from adaptor.controller.lost_places import LostPlaces
from adaptor.controller.membership import Membership
from adaptor.controller.plan import steps_of
from adaptor.controller.save_attempts import Writing
from adaptor.protocol.messages import Phase, Replacement, ShardSource

# In one generation: each keeps the threads and descriptors of the groups of before in every survivor.
MAX_RECOVERED = 10


class CannotRegroupError(Exception):
    """An incident cannot be recovered online; the text says why, for the user."""


@dataclass
class Recoveries:
    """The online recoveries of one generation of workers.

    Attributes:
        seconds: how long one may take (TTP_ONLINE); 0: there are none
        count: so many there were
        last: the fault of the last one (`Fault.key`), and the step that was gone on from
        folders: the temporary folders that saves beside them have used are numbered below this
    """

    seconds: float
    count: int = 0
    last: tuple[str, int] = ("", -1)
    folders: int = 0

    def note(self, key: str, step: int, folders: int) -> None:
        """Note a recovery: the `key` and step of its fault, and how many `folders` it has taken."""
        self.count += 1
        self.last = (key, step)
        self.folders = folders


@dataclass
class Feasibility:
    """The conditions of the online recovery of one incident.

    Attributes:
        places: of lost nodes, which spare nodes may take
        hanging: ranks that answer, and whose main threads will not come any more
    """

    state: IncidentState
    membership: Membership
    writing: Writing
    failures: Failures
    recoveries: Recoveries
    term: int
    places: LostPlaces = field(default_factory=LostPlaces)
    hanging: set[int] = field(default_factory=set)

    @property
    def is_armed(self) -> bool:
        """Return whether there is online recovery at all."""
        return self.recoveries.seconds > 0

    def require_possible(self, step: int) -> None:
        """Raise where the incident cannot be recovered online from `step`.

        Raises:
            CannotRegroupError: says why.
        """
        membership, failures = self.membership, self.failures
        if failures.told_to_end or failures.leaving:
            raise CannotRegroupError(failures.told_to_end or "a node leaves the job")
        if self.term:
            raise CannotRegroupError("the controller was lost")
        if reason := self.places.why_not(membership.lost):
            raise CannotRegroupError(reason)
        if failures.ended:
            raise CannotRegroupError(f"the script of rank {min(failures.ended)} had come to its end")
        if trained := [rank for rank, board in self.state.boards.items() if board.stage]:
            raise CannotRegroupError(f"the training loop of rank {min(trained)} had come to its end")
        if self.recoveries.count >= MAX_RECOVERED:
            raise CannotRegroupError(f"{MAX_RECOVERED} faults were recovered online since the last start")
        for rank, layout in membership.layouts.items():
            if layout.online:
                # What is the same on rank 0 was said at the start.
                refusal = membership.layouts[0].online if 0 in membership.layouts else ""
                raise CannotRegroupError("" if refusal else f"rank {rank}: {layout.online}")
        if self.writing.uses_script_handlers:
            raise CannotRegroupError("the script saves by handlers of its own")
        if failures.is_known:
            cause = failures.first(self.state.silent)
            if failures.hang_s and cause.rank < 0:
                raise CannotRegroupError("no rank stands out as the cause of the hang")
            if (cause.key, step) == self.recoveries.last:
                raise CannotRegroupError(f"{cause.key or 'the same fault'} came again at the same step")
        for rank in self._behind(step, self.ranks_to_replace(step)):
            raise CannotRegroupError(f"rank {rank} lives and cannot go on from step {step}")

    def common_step(self, newest: int) -> int:
        """Return the step to go on from, where `newest` is the newest one that could be saved.

        With local copies some ranks may not have come to `newest`, which then no one needs to keep: all of
        them give the one before.
        """
        previous_step = newest - 1
        if (
            not self._behind(newest, self._ranks_without_state(newest))
            or previous_step <= self.writing.origin
        ):
            return newest
        return (
            newest if self._behind(previous_step, self._ranks_without_state(previous_step)) else previous_step
        )

    def _behind(self, step: int, replaced: Collection[int]) -> list[int]:
        """The survivors but for `replaced` that cannot come to `step`."""
        boards = self.state.boards
        return sorted(
            rank
            for rank in self.state.nodes.keys() - set(replaced)
            if boards[rank].phase == Phase.UNREADABLE or not boards[rank].provides(step)
        )

    def _ranks_without_state(self, step: int) -> set[int]:
        """Return the ranks that answer and hold nothing of `step`, nor of any other step, or whose main
        threads hang."""
        hanging = self.hanging
        if self.failures.hang_s:
            hanging = hanging | {self.failures.first(self.state.silent).rank}
        return {
            rank
            for rank, board in self.state.boards.items()
            if rank in hanging
            or (board.phase in (Phase.BROKEN, Phase.UNREADABLE) and not board.provides(step))
        }

    def ranks_to_replace(self, step: int) -> set[int]:
        """Return the ranks that answer and need a new process all the same; every other one keeps its own.

        They hold nothing of `step`, or cannot go on from it.

        An exception has left their update, or came before it while others made theirs; their device has
        failed; or their main thread hangs.
        """
        boards = self.state.boards
        raised = self.failures.raised.keys() & boards.keys()
        return self._ranks_without_state(step) | {rank for rank in raised if not boards[rank].provides(step)}

    def giving(self) -> set[int]:
        """Return the ranks that answer and give the state of any step."""
        return {rank for rank, board in self.state.boards.items() if steps_of(board)}

    def plan(self, step: int) -> tuple[Replacement, ...]:
        """Return who has failed, and where their state comes from.

        Raises:
            CannotRegroupError: nobody else has it.
        """
        survivors = self.state.nodes.keys() - self.ranks_to_replace(step)
        failed = [rank for rank in range(self.membership.world_size) if rank not in survivors]
        return tuple(self._replacement(rank, survivors) for rank in failed)

    def _replacement(self, rank: int, living: set[int]) -> Replacement:
        groups = self.writing.groups
        layout = self.membership.layouts[rank]
        own_groups = [share.group for share in layout.shares if share.can_write]
        twins = set(living)
        for name in own_groups:
            twins &= groups[name].writers
        sources = []
        for share in layout.shares:
            owners = [
                owner for owner in groups[share.group].owners[share.index, share.count] if owner in living
            ]
            if not owners:
                raise CannotRegroupError(f"nobody else holds shard {share.index} of group {share.group}")
            preferred = [owner for owner in owners if owner in twins] or owners
            sources.append(ShardSource(share.group, share.index, preferred[0]))
        if not own_groups or not twins:
            raise CannotRegroupError(f"nobody else has the part of the model that rank {rank} had")
        source_ranks = {source.source for source in sources}
        return Replacement(rank, min(twins & source_ranks or twins), tuple(sources))

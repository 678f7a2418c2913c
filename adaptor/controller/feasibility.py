"""Decides whether a fault can be recovered online, from which step, and which ranks give the state; pure.

Spare nodes take the places of lost nodes while the other nodes keep their processes (`LostPlaces`). Node 0 is
asked for spare nodes (`FillPlaces`), once for each loss. The agent of a spare node with a place connects to
the controller (`AgentHello`), and starts new processes for the ranks of the lost node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from adaptor.controller.failures import Failures, FirstCause
from adaptor.controller.incident_state import IncidentState
from adaptor.controller.plan import steps_of
from adaptor.protocol.messages import NODES_JOIN, BoardRecord, Phase, PlacesFilled, Replacement, ShardSource


@dataclass
class LostPlaces:
    """The places of lost nodes in one incident.

    Attributes:
        taken: the places in which spare nodes have come
    """

    taken: set[int] = field(default_factory=set)
    _asked: set[int] = field(default_factory=set)
    _refused: dict[int, str] = field(default_factory=dict)

    def why_not(self, lost: Iterable[int]) -> str:
        """Return why the places of the `lost` nodes stay empty; "" while spare nodes may take the places."""
        return next((self._refused[node] for node in sorted(lost) if node in self._refused), "")

    def ask(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes among `nodes` for which node 0 has not been asked yet, and note them as asked."""
        unasked = tuple(node for node in nodes if node not in self._asked)
        self._asked.update(unasked)
        return unasked

    def answer(self, answer: PlacesFilled) -> str:
        """Take the answer of node 0; return why the places stay empty, "" where spare nodes come."""
        if answer.owners:
            return ""
        reason = f"node {min(answer.nodes)} is lost, and {answer.reason}"
        self._refused.update(dict.fromkeys(answer.nodes, reason))
        return reason

    def come(self, node: int) -> None:
        """Note that the agent of a spare node has come in the place of `node`."""
        self.taken.add(node)

    def lose(self, node: int) -> None:
        """Note the loss of `node`, or of the spare node in its place: node 0 may be asked again."""
        self._asked.discard(node)
        self.taken.discard(node)


class CannotRegroupError(Exception):
    """An incident cannot be recovered online; the text says why, for the user."""


# So many recoveries from one step mean that no recovery helps; a restart of all workers may.
MOST_FROM_A_STEP = 3
# Another process has no more memory than the one before: a rank that the kernel ends for want of memory again
# within so many steps is not replaced.
OUT_OF_MEMORY_STEPS = 10
# The kinds of faults (`FirstCause.kind`) that come from outside of the script as a rule, and may come again
# at the same step by chance.
_BY_CHANCE = ("signal", "exit", "node-lost")


@dataclass
class Recoveries:
    """The online recoveries of one generation of workers.

    Attributes:
        seconds: the time limit of a recovery without progress (TTP_ONLINE); 0: recoveries are off
        exchanges: how often survivors were told to connect their process groups anew
        keys: the faults (`Fault.key`) since that step was reached
        from_step: the number of recoveries from that step
        out_of_memory: the step from which each rank was replaced after the kernel had ended it for want of
            memory
        folders: a number above all temporary folders of the saves beside recoveries
    """

    seconds: float
    exchanges: int = 0
    step: int = -1
    keys: set[str] = field(default_factory=set)
    from_step: int = 0
    out_of_memory: dict[int, int] = field(default_factory=dict)
    folders: int = 0

    def note(self, key: str, step: int, folders: int, out_of_memory: Iterable[int] = ()) -> None:
        """Note a recovery: its fault and step, its `folders`, the ranks ended for want of memory."""
        if step > self.step:
            self.keys, self.from_step = set(), 0
        self.step = step
        self.keys.add(key)
        self.from_step += 1
        self.out_of_memory.update(dict.fromkeys(out_of_memory, step))
        self.folders = folders

    def why_no_more(self, cause: FirstCause, step: int, out_of_memory: Iterable[int]) -> str:
        """Return why another recovery from `step` would only meet the same fault again; "" if it may help."""
        for rank in (rank for rank in out_of_memory if rank in self.out_of_memory):
            steps = step - self.out_of_memory[rank]
            if steps <= OUT_OF_MEMORY_STEPS:
                distance = f"{steps} step{'' if steps == 1 else 's'} later"
                return f"the kernel has ended rank {rank} for want of memory again, {distance}"
        if step > self.step:
            return ""
        if cause.key in self.keys and cause.kind not in _BY_CHANCE:
            return f"{cause.key or 'the same fault'} came again at the same step"
        if self.from_step >= MOST_FROM_A_STEP:
            return f"{self.from_step} recoveries from step {step} have finished no step"
        return ""


@dataclass
class Feasibility:
    """The conditions of the online recovery of one incident.

    Attributes:
        hanging: ranks that answer, but whose main threads hang
        from_copies: no step can be saved, so all ranks go back to a step of their copies in host memory
    """

    state: IncidentState
    failures: Failures
    recoveries: Recoveries
    places: LostPlaces = field(default_factory=LostPlaces)
    hanging: set[int] = field(default_factory=set)
    from_copies: bool = False

    @property
    def copied_step(self) -> int:
        """Return the newest step of which every rank has a copy in host memory; -1: none."""
        copies = [self._copies_of(rank) for rank in range(self.state.membership.world_size)]
        return max(set.intersection(*copies), default=-1)

    def _copies_of(self, rank: int) -> set[int]:
        board = self.state.boards.get(rank) or self.state.membership.boards.get(rank)
        return set() if board is None else set(board.copies)

    def _provides(self, board: BoardRecord, step: int) -> bool:
        """Return True if the process of a rank can go on from `step`."""
        if self.from_copies:
            return board.phase != Phase.UNREADABLE and step in board.copies
        return board.provides(step)

    def require_possible(self, step: int) -> None:
        """Raise CannotRegroupError if the incident cannot be recovered online from `step`."""
        membership, failures = self.state.membership, self.failures
        if failures.told_to_end or failures.leaving:
            raise CannotRegroupError(failures.told_to_end or "a node leaves the job")
        if failures.asked is not None and failures.asked.kind == NODES_JOIN:
            raise CannotRegroupError("")  # all workers start again with the nodes
        if failures.corruption is not None and failures.corruption.stops:
            raise CannotRegroupError("")
        if failures.was_interrupted:
            raise CannotRegroupError("the controller was lost in an incident")
        if reason := self.places.why_not(membership.lost):
            raise CannotRegroupError(reason)
        if failures.ended_scripts:
            raise CannotRegroupError(f"the script of rank {min(failures.ended_scripts)} had come to its end")
        if trained := [rank for rank, board in self.state.boards.items() if board.stage]:
            raise CannotRegroupError(f"the training loop of rank {min(trained)} had come to its end")
        # Where torch cannot reconnect groups, each recovery leaves threads and descriptors in every survivor.
        limits = [layout.most_recoveries for layout in membership.layouts.values() if layout.most_recoveries]
        if limits and self.recoveries.exchanges >= min(limits):
            raise CannotRegroupError(f"process groups were connected {min(limits)} times since the start")
        for rank, layout in membership.layouts.items():
            if layout.online:
                # The reason of rank 0 was printed at the start.
                refusal = membership.layouts[0].online if 0 in membership.layouts else ""
                raise CannotRegroupError("" if refusal else f"rank {rank}: {layout.online}")
        if self.state.writing.uses_script_handlers:
            raise CannotRegroupError("the script saves by handlers of its own")
        if failures.is_known:
            cause = failures.first(self.state.silent)
            if cause.mistake:  # the verdict says so
                raise CannotRegroupError("")
            if failures.hang_s and cause.rank < 0:
                raise CannotRegroupError("no rank stands out as the cause of the hang")
            if reason := self.recoveries.why_no_more(cause, step, failures.out_of_memory):
                raise CannotRegroupError(reason)
        for rank in self._behind(step, self.ranks_to_replace(step)):
            raise CannotRegroupError(f"rank {rank} lives and cannot go on from step {step}")
        without = [rank for rank in range(membership.world_size) if step not in self._copies_of(rank)]
        if self.from_copies and without:
            raise CannotRegroupError(f"rank {without[0]} has no copy of step {step} in host memory")

    def common_step(self, newest: int) -> int:
        """Return the step to go on from, where `newest` is the newest step that could be saved.

        With local copies some ranks may not have come to `newest`. If any rank lacks `newest`, every rank
        uses the step before.
        """
        previous_step = newest - 1
        if (
            not self._behind(newest, self._ranks_without_state(newest))
            or previous_step <= self.state.writing.origin
        ):
            return newest
        return (
            newest if self._behind(previous_step, self._ranks_without_state(previous_step)) else previous_step
        )

    def _behind(self, step: int, replaced: Collection[int]) -> list[int]:
        """Return the survivors, without `replaced`, that cannot come to `step`."""
        boards = self.state.boards
        return sorted(
            rank
            for rank in self.state.nodes.keys() - set(replaced)
            if boards[rank].phase == Phase.UNREADABLE or not self._provides(boards[rank], step)
        )

    def _ranks_without_state(self, step: int) -> set[int]:
        """Return the ranks that answer, but hold no state for `step`, or whose main threads hang."""
        hanging = self.hanging
        if self.failures.hang_s:
            hanging = hanging | {self.failures.first(self.state.silent).rank}
        return {
            rank
            for rank, board in self.state.boards.items()
            if rank in hanging
            or (board.phase in (Phase.BROKEN, Phase.UNREADABLE) and not self._provides(board, step))
        }

    def ranks_to_replace(self, step: int) -> set[int]:
        """Return the ranks that answer and need a new process all the same; every other rank keeps its
        process.

        A rank needs a new process if an exception has left its update, or came before the update while others
        made theirs; if its device has failed; if its main thread hangs; or if its state is corrupt.
        """
        boards = self.state.boards
        raised = self.failures.raised.keys() & boards.keys()
        corrupt = self.failures.corrupt & boards.keys()
        stopped = {rank for rank in raised if not self._provides(boards[rank], step)}
        return self._ranks_without_state(step) | stopped | corrupt

    def giving(self) -> set[int]:
        """Return the ranks that answer and give the state of any step."""
        return {rank for rank, board in self.state.boards.items() if steps_of(board)} - self.failures.corrupt

    def plan(self, step: int) -> tuple[Replacement, ...]:
        """Return the failed ranks, with the ranks that give their states. Raises CannotRegroupError."""
        survivors = self.state.nodes.keys() - self.ranks_to_replace(step)
        failed = [rank for rank in range(self.state.membership.world_size) if rank not in survivors]
        return tuple(self._replacement(rank, survivors) for rank in failed)

    def _replacement(self, rank: int, living: set[int]) -> Replacement:
        groups = self.state.membership.groups
        layout = self.state.membership.layouts[rank]
        if self.from_copies:  # any survivor knows where the job is
            if not living:
                raise CannotRegroupError("no process is left")
            return Replacement(rank, min(living), ())
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

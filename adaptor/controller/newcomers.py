"""The new processes of failed ranks, from the order to start them until all ranks go on; pure.

`PresenceCheck` asks the ranks of an online recovery again and again whether their processes run: a process
that is stopped, or holds the interpreter lock, would otherwise be noticed only at the end of the time limit.
The number of unanswered questions counts, not the time, so a controller that was stopped itself finds no rank
missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import ceil

from adaptor.controller.failures import ending
from adaptor.controller.membership import Membership
from adaptor.protocol.messages import (
    Died,
    Dying,
    Hello,
    Layout,
    Raised,
    Refused,
    RegroupFailed,
    Replacement,
    Unprotected,
)

# New processes of one rank that fail by themselves in one incident; the last of these failures ends the
# recovery.
MOST_FAILURES = 2


class NewcomerStage(Enum):
    """The stages of a rank's new process."""

    UNPLACED = auto()  # its node is lost, and no spare node has come in its place
    ENDING = auto()  # the former process has not been seen to end
    STARTING = auto()  # no message yet
    READY = auto()  # has said hello
    JOINING = auto()  # has got its orders
    ENDED = auto()


@dataclass
class Newcomer:
    """The new process of a rank.

    Attributes:
        ordered: the attempt in which its agent was told to start the process
        is_counted: the failure counts (`Newcomers.count_failures`)
    """

    stage: NewcomerStage
    replacement: Replacement
    ordered: int
    pid: int = 0
    has_failed: bool = False
    is_counted: bool = False

    @property
    def is_reusable(self) -> bool:
        """Return True if another attempt can go on with the process, which knows nothing of this attempt."""
        untold = (NewcomerStage.ENDING, NewcomerStage.STARTING, NewcomerStage.READY)
        return self.stage in untold and not self.has_failed


# The messages of a new process, or of its agent about the process, before all ranks go on.
FromNewcomer = Hello | Layout | Refused | Unprotected | Raised | RegroupFailed | Dying | Died


@dataclass
class Newcomers:
    """The new processes of one incident.

    Attributes:
        ended_ranks: ranks whose processes are ended for their replacement: they hang, or hold nothing
    """

    membership: Membership
    by_rank: dict[int, Newcomer] = field(default_factory=dict)
    ended_ranks: set[int] = field(default_factory=set)
    _failures: dict[int, list[str]] = field(default_factory=dict)

    def begin_attempt(self, replaced: Iterable[Replacement], attempt: int) -> list[int]:
        """Return the ranks whose agents are to start a new process.

        An agent ends the former process of the rank, if that still runs. A new process without orders in the
        attempt before is kept. Ranks of lost nodes are left out: the agent of a spare node starts their
        processes when it comes.
        """
        newcomers_before, self.by_rank = self.by_rank, {}
        started: list[int] = []
        for replacement in replaced:
            rank = replacement.rank
            newcomer = newcomers_before.get(rank)
            if self.membership.node_of[rank] in self.membership.lost:
                self.by_rank[rank] = Newcomer(NewcomerStage.UNPLACED, replacement, attempt)
                continue
            if newcomer is None:
                has_ended = rank in self.membership.dead
                if self.membership.lives(rank):
                    self.ended_ranks.add(rank)
            elif newcomer.is_reusable:
                newcomer.replacement = replacement
                self.by_rank[rank] = newcomer
                continue
            else:
                has_ended = newcomer.stage is NewcomerStage.ENDED
            stage = NewcomerStage.STARTING if has_ended else NewcomerStage.ENDING
            self.by_rank[rank] = Newcomer(stage, replacement, attempt)
            started.append(rank)
        return started

    @property
    def unplaced(self) -> list[int]:
        """Return the lost nodes whose ranks wait for spare nodes."""
        return sorted(
            {
                self.membership.node_of[rank]
                for rank, newcomer in self.by_rank.items()
                if newcomer.stage is NewcomerStage.UNPLACED
            }
        )

    def place(self, node: int) -> None:
        """Note that the agent of a spare node has come for `node`, and starts the new processes."""
        for newcomer in self._of(node):
            if newcomer.stage is NewcomerStage.UNPLACED:
                newcomer.stage = NewcomerStage.STARTING

    def lose(self, node: int) -> bool:
        """Note that `node` is lost; return True if new processes ran or were to be started on `node`."""
        lost = [newcomer for newcomer in self._of(node) if newcomer.stage is not NewcomerStage.UNPLACED]
        for newcomer in lost:
            newcomer.has_failed = True
        return bool(lost)

    def _of(self, node: int) -> list[Newcomer]:
        return [newcomer for rank, newcomer in self.by_rank.items() if self.membership.node_of[rank] == node]

    @property
    def are_ready(self) -> bool:
        """Return True if all have said hello."""
        return all(newcomer.stage is NewcomerStage.READY for newcomer in self.by_rank.values())

    @property
    def placed(self) -> list[int]:
        """Return the ranks with a node: their new processes have to come."""
        return [
            rank for rank, newcomer in self.by_rank.items() if newcomer.stage is not NewcomerStage.UNPLACED
        ]

    @property
    def listening(self) -> list[int]:
        """Return the ranks whose new processes receive orders."""
        hear = (NewcomerStage.READY, NewcomerStage.JOINING)
        return [rank for rank, newcomer in self.by_rank.items() if newcomer.stage in hear]

    @property
    def replaced(self) -> tuple[Replacement, ...]:
        """Return the ranks with a new process, each with its twin."""
        return tuple(newcomer.replacement for newcomer in self.by_rank.values())

    def tell(self) -> None:
        """Note that all processes have got their orders."""
        for newcomer in self.by_rank.values():
            newcomer.stage = NewcomerStage.JOINING

    def fail(self, ranks: Iterable[int]) -> None:
        """Note that no attempt can go on with the processes of `ranks`."""
        for rank in ranks:
            self.by_rank[rank].has_failed = True

    def count_failures(self, ranks: Iterable[int], reason: str) -> None:
        """Count a failure of the new processes of `ranks` that no other rank has caused."""
        for rank in ranks:
            if not self.by_rank[rank].is_counted:
                self.by_rank[rank].is_counted = True
                self._failures.setdefault(rank, []).append(reason)

    @property
    def failed_twice(self) -> str:
        """Return why two new processes of one rank have failed by themselves, or ""."""
        for reasons in self._failures.values():
            if len(reasons) >= MOST_FAILURES:
                return "; then ".join(dict.fromkeys(reasons))
        return ""

    def speak_for(self, rank: int) -> bool:
        """Return True if messages of `rank` come from its new process: the former process has ended."""
        return rank in self.by_rank and rank in self.membership.dead

    def has_ended(self, rank: int) -> None:
        """Note that the former process of `rank` has ended."""
        newcomer = self.by_rank.get(rank)
        if newcomer is not None and newcomer.stage is NewcomerStage.ENDING:
            newcomer.stage = NewcomerStage.STARTING

    def failure_in(self, message: FromNewcomer, attempt: int) -> str:
        """Take a message of `attempt`; return the predicate of a sentence if it is a failure, else ""."""
        newcomer = self.by_rank[message.rank]
        if newcomer.stage is NewcomerStage.ENDING and isinstance(message, Died):  # of the attempt before
            newcomer.stage = NewcomerStage.STARTING
            return ""
        reason = self._reason(newcomer, message, attempt)
        newcomer.has_failed = newcomer.has_failed or bool(reason)
        return reason

    def _reason(self, newcomer: Newcomer, message: FromNewcomer, attempt: int) -> str:
        if isinstance(message, RegroupFailed):
            return self._why_not(newcomer, message, attempt)
        if newcomer.stage is NewcomerStage.ENDING:
            return ""
        match message:
            case Hello(pid=pid):
                if newcomer.stage is NewcomerStage.STARTING:
                    newcomer.stage, newcomer.pid = NewcomerStage.READY, pid
            case Died(status=status, why=why):
                newcomer.stage = NewcomerStage.ENDED
                return ending(status, why)
            case Dying():
                return "has died"
            case Raised(error=error):
                return f"raised {error}"
            case Refused(reason=reason) | Unprotected(why=reason):
                return f"refused: {reason}"
            case Layout():
                return self._unlike(message)
        return ""

    def _why_not(self, newcomer: Newcomer, message: RegroupFailed, attempt: int) -> str:
        """Return why the agent cannot start the process, or the process cannot join, else ""."""
        if newcomer.stage in (NewcomerStage.ENDING, NewcomerStage.STARTING):
            if message.attempt != newcomer.ordered:
                return ""
            if newcomer.stage is NewcomerStage.STARTING:
                newcomer.stage = NewcomerStage.ENDED
        elif newcomer.stage is not NewcomerStage.JOINING or message.attempt != attempt:
            return ""
        return f"could not join: {message.reason}"

    def _unlike(self, layout: Layout) -> str:
        known_layout = self.membership.layouts[layout.rank]
        if layout.fingerprint != known_layout.fingerprint:
            return "does not run the same framework or patches"
        if layout.shares != known_layout.shares:
            return "does not hold the same shards"
        return f"cannot join: {layout.online}" if layout.online else ""


# The thread that answers does nothing else; on a machine with more work than cores it may wait for a second.
ROUND_S = 5.0
LEAST_S = 1.0
# The number of unanswered questions after which a survivor counts as stopped.
ROUNDS = 2


class PresenceCheck:
    """The rounds of one attempt.

    A new process gets half of the time limit of the recovery, because imports may hold up its answer:
    `rounds_of_newcomers`.
    """

    def __init__(self, time_now: float, timeout_s: float) -> None:
        self._round_s = min(ROUND_S, max(LEAST_S, timeout_s / 8))
        self.rounds_of_newcomers = max(ROUNDS, ceil(timeout_s / 2 / self._round_s))
        self._due_at = time_now + self._round_s
        self._in_vain: Counter[int] = Counter()

    def is_due(self, time_now: float) -> bool:
        """Return True if a round is due."""
        return time_now >= self._due_at

    def answer(self, rank: int) -> None:
        """Note a message of `rank`."""
        del self._in_vain[rank]

    def missing(self, survivors: Iterable[int], newcomers: Iterable[int]) -> list[int]:
        """Return the ranks with too many unanswered questions, new processes behind the others."""
        return [
            *(rank for rank in sorted(survivors) if self._in_vain[rank] >= ROUNDS),
            *(rank for rank in sorted(newcomers) if self._in_vain[rank] >= self.rounds_of_newcomers),
        ]

    def begin_round(self, ranks: Iterable[int], time_now: float) -> None:
        """Note that `ranks` are asked, or could not be, because no message of theirs has come yet."""
        self._due_at = time_now + self._round_s
        self._in_vain.update(ranks)

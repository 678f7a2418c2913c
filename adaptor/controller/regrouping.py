"""The online recovery of an incident: only failed ranks get a new process, all others keep theirs; pure.

The survivors have frozen, and a step is chosen of which they have all shards. Each agent of a failed rank
starts a new process (`Replace`). Survivors at once, and newcomers once they have said hello, exchange their
process groups and come to the step (`Regroup`, `Joined`). When all have, the incident is over (`Proceed`).

Invariants: until then no survivor's state of the step is touched, so it can be saved at any moment instead;
nobody resumes before all ranks have joined at the same step with the same digest; a newcomer gives its state
to nobody. What a rank's former process says late is not taken for a word of the new one: an agent tells of
its death before the hello of the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from adaptor.controller.dump import Writing
from adaptor.controller.failures import Failures, ending
from adaptor.controller.incident_state import IncidentState
from adaptor.controller.membership import Membership
from adaptor.controller.roll_call import RollCall
from adaptor.protocol.messages import (
    Died,
    Dying,
    Hello,
    Joined,
    Layout,
    Phase,
    Raised,
    Refused,
    RegroupFailed,
    Replacement,
    ShardSource,
    Unprotected,
)

# The second one is for a newcomer that fails, or for a rank that dies meanwhile. More would take longer than
# a restart.
MAX_ATTEMPTS = 2
# In one generation: each keeps the threads and descriptors of the groups of before in every survivor.
MAX_RECOVERED = 10


class CannotRegroupError(Exception):
    """An incident cannot be recovered online; the text says why, for the user."""


@dataclass
class Recoveries:
    """The online recoveries of one generation of workers.

    seconds  how long one may take (TTP_ONLINE); 0: there are none
    count    so many there were
    last     the fault of the last one (`Fault.key`), and the step that was gone on from
    """

    seconds: float
    count: int = 0
    last: tuple[str, int] = ("", -1)

    def note(self, key: str, step: int) -> None:
        self.count += 1
        self.last = (key, step)


class NewcomerStage(Enum):
    """The stages of a rank's new process."""

    ENDING = auto()  # the process of before has not been seen to end
    STARTING = auto()  # it has said nothing yet
    JOINING = auto()  # it has been told what to do
    ENDED = auto()


@dataclass
class Newcomer:
    """The new process of a rank.

    is_missing  it does not answer
    """

    stage: NewcomerStage
    replacement: Replacement
    pid: int = 0
    is_missing: bool = False

    @property
    def is_reusable(self) -> bool:
        """Return whether another attempt can go on with it."""
        return self.stage is NewcomerStage.STARTING and not self.is_missing


# What a new process says, or its agent of it, before all go on.
FromNewcomer = Hello | Layout | Refused | Unprotected | Raised | RegroupFailed | Dying | Died


@dataclass
class Regrouping:
    """The online recovery of one incident.

    newcomers  by rank
    joined     the digest of each rank that has joined in this attempt
    attempts   there were so many
    begun_at   when the first began
    ended      ranks whose processes are ended for it: they hang, or hold nothing
    hanging    ranks that answer, and whose main threads will not come any more
    roll_call  of this attempt; not before there is one
    why_not    why it was not tried, or has failed; empty where nobody needs to know
    """

    state: IncidentState
    membership: Membership
    writing: Writing
    failures: Failures
    recoveries: Recoveries
    term: int
    newcomers: dict[int, Newcomer] = field(default_factory=dict)
    joined: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    hanging: set[int] = field(default_factory=set)
    attempts: int = 0
    begun_at: float = 0.0
    why_not: str = ""
    roll_call: RollCall = field(init=False)

    @property
    def timeout_s(self) -> float:
        """Return the seconds that it may take from the first order on, so that time is left to save."""
        incident_s = self.state.timeout_s
        left_s = self.state.opened_at + incident_s * 3 / 4 - self.begun_at
        return min(self.recoveries.seconds, incident_s / 2, left_s)

    def is_late(self, now: float) -> bool:
        return now >= self.begun_at + self.timeout_s

    @property
    def is_armed(self) -> bool:
        """Return whether there is online recovery at all."""
        return self.recoveries.seconds > 0

    @property
    def may_try_again(self) -> bool:
        return self.attempts < MAX_ATTEMPTS

    # whether it can be

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
        if membership.lost:
            raise CannotRegroupError(f"node {min(membership.lost)} is lost")
        if failures.ended:
            raise CannotRegroupError(f"the script of rank {min(failures.ended)} had come to its end")
        if self.recoveries.count >= MAX_RECOVERED:
            raise CannotRegroupError(f"{MAX_RECOVERED} faults were recovered online since the last start")
        for rank, layout in membership.layouts.items():
            if layout.online:
                # What is the same on rank 0 was said at the start.
                told = membership.layouts[0].online if 0 in membership.layouts else ""
                raise CannotRegroupError("" if told else f"rank {rank}: {layout.online}")
        if self.writing.uses_script_handlers:
            raise CannotRegroupError("the script saves by handlers of its own")
        if failures.is_known:
            cause = failures.first(self.state.silent)
            if failures.hang_s and cause.rank < 0:
                raise CannotRegroupError("no rank stands out as the cause of the hang")
            if failures.hang_s and cause.rank in self.state.nodes:
                # To end it would leave its shards with one holder fewer, for as long as this takes.
                raise CannotRegroupError(f"rank {cause.rank} hangs, and still gives its state")
            if (cause.key, step) == self.recoveries.last:
                raise CannotRegroupError(f"{cause.key or 'the same fault'} came again at the same step")
        for rank in self._behind(step, self.unfit(step)):
            raise CannotRegroupError(f"rank {rank} lives and cannot go on from step {step}")

    def common_step(self, newest: int) -> int:
        """Return the step to go on from, where `newest` is the newest one that could be saved.

        With local copies some ranks may not have come to `newest`, which then no one needs to keep: all of
        them give the one before.
        """
        before = newest - 1
        if not self._behind(newest, self._torn(newest)) or before <= self.writing.origin:
            return newest
        return newest if self._behind(before, self._torn(before)) else before

    def _behind(self, step: int, replaced: Collection[int]) -> list[int]:
        """The survivors but for `replaced` that cannot come to `step`."""
        boards = self.state.boards
        return sorted(
            rank
            for rank in self.state.nodes.keys() - set(replaced)
            if boards[rank].phase == Phase.UNREADABLE or not boards[rank].provides(step)
        )

    def _torn(self, step: int) -> set[int]:
        """Return the ranks that answer and hold nothing of `step`, nor of any other step, or whose main
        threads hang."""
        return {
            rank
            for rank, board in self.state.boards.items()
            if rank in self.hanging
            or (board.phase in (Phase.BROKEN, Phase.UNREADABLE) and not board.provides(step))
        }

    def unfit(self, step: int) -> set[int]:
        """Return the ranks that answer and have to be replaced all the same: they hold nothing of `step`,
        or cannot go on from it.

        An exception has left their update, or came before it while others made theirs; their device has
        failed; or their main thread hangs.
        """
        boards = self.state.boards
        raised = self.failures.raised.keys() & boards.keys()
        return self._torn(step) | {rank for rank in raised if not boards[rank].provides(step)}

    def plan(self, step: int) -> tuple[Replacement, ...]:
        """Return who has failed, and where their state comes from.

        Raises:
            CannotRegroupError: nobody else has it.
        """
        survivors = self.state.nodes.keys() - self.unfit(step)
        failed = [rank for rank in range(self.membership.world_size) if rank not in survivors]
        return tuple(self._replacement(rank, survivors) for rank in failed)

    def _replacement(self, rank: int, living: set[int]) -> Replacement:
        groups = self.writing.groups
        layout = self.membership.layouts[rank]
        own = [share.group for share in layout.shares if not share.foreign]
        twins = set(living)
        for name in own:
            twins &= groups[name].writers
        sources = []
        for share in layout.shares:
            owners = [one for one in groups[share.group].owners[share.index, share.count] if one in living]
            if not owners:
                raise CannotRegroupError(f"nobody else holds shard {share.index} of group {share.group}")
            preferred = [one for one in owners if one in twins] or owners
            sources.append(ShardSource(share.group, share.index, preferred[0]))
        if not own or not twins:
            raise CannotRegroupError(f"nobody else has the part of the model that rank {rank} had")
        given = {source.source for source in sources}
        return Replacement(rank, min(twins & given or twins), tuple(sources))

    # its way

    def begin_attempt(self, replaced: tuple[Replacement, ...]) -> list[int]:
        """Return the ranks that are to get a new process; one whose process of before has not been seen to
        end has it ended. A process that was not told anything yet in the attempt before is as good as new.
        """
        if not self.attempts:
            self.begun_at = self.state.now
        self.attempts += 1
        self.joined = {}
        self.roll_call = RollCall(self.state.now, self.timeout_s)
        before, self.newcomers = self.newcomers, {}
        started: list[int] = []
        for replacement in replaced:
            rank = replacement.rank
            newcomer = before.get(rank)
            if newcomer is None:
                ended = rank in self.membership.dead
                if self.membership.lives(rank):
                    self.ended.add(rank)
            elif newcomer.stage is NewcomerStage.ENDING or newcomer.is_reusable:
                self.newcomers[rank] = Newcomer(newcomer.stage, replacement)
                continue
            else:
                ended = newcomer.stage is NewcomerStage.ENDED
            stage = NewcomerStage.STARTING if ended else NewcomerStage.ENDING
            self.newcomers[rank] = Newcomer(stage, replacement)
            started.append(rank)
        return started

    @property
    def joining(self) -> list[int]:
        """Return the ranks whose new processes hear what they are told."""
        return [rank for rank, newcomer in self.newcomers.items() if newcomer.stage is NewcomerStage.JOINING]

    @property
    def replaced(self) -> tuple[Replacement, ...]:
        return tuple(newcomer.replacement for newcomer in self.newcomers.values())

    def missing(self) -> tuple[list[int], list[int]]:
        """Return survivors and new processes that do not answer any more."""
        missing = self.roll_call.missing(self.state.nodes, self.newcomers)
        for rank in missing:
            if rank in self.newcomers:
                self.newcomers[rank].is_missing = True
        return [rank for rank in missing if rank in self.state.nodes], [
            rank for rank in missing if rank in self.newcomers
        ]

    def is_of_newcomer(self, rank: int) -> bool:
        """Return whether what is said of `rank` is of a new process: the one that failed has ended."""
        return rank in self.newcomers and rank in self.membership.dead

    def has_ended(self, rank: int) -> None:
        """The process of before has."""
        newcomer = self.newcomers.get(rank)
        if newcomer is not None and newcomer.stage is NewcomerStage.ENDING:
            newcomer.stage = NewcomerStage.STARTING

    def hello(self, message: Hello) -> bool:
        """Return whether it is to be told what to do."""
        newcomer = self.newcomers[message.rank]
        if newcomer.stage is not NewcomerStage.STARTING:
            return False
        newcomer.stage, newcomer.pid = NewcomerStage.JOINING, message.pid
        return True

    def on_newcomer(self, message: FromNewcomer) -> str:
        """Return the predicate of a sentence where `message` says that the newcomer has failed, else ''."""
        newcomer = self.newcomers[message.rank]
        if newcomer.stage is NewcomerStage.ENDING:  # of the attempt before
            if isinstance(message, Died):
                newcomer.stage = NewcomerStage.STARTING
            return ""
        match message:
            case Died(status=status):
                newcomer.stage = NewcomerStage.ENDED
                return ending(status)
            case Dying():
                return "has died"
            case Raised(error=error):
                return f"raised {error}"
            case RegroupFailed(reason=reason, attempt=self.writing.attempt):
                if newcomer.stage is NewcomerStage.STARTING:  # its agent cannot start it
                    newcomer.stage = NewcomerStage.ENDED
                return f"could not join: {reason}"
            case Refused(reason=reason) | Unprotected(why=reason):
                return f"refused: {reason}"
            case Layout():
                return self._unlike(message)
        return ""

    def _unlike(self, layout: Layout) -> str:
        known = self.membership.layouts[layout.rank]
        if layout.fingerprint != known.fingerprint:
            return "does not run the same framework or patches"
        if layout.shares != known.shares:
            return "does not hold the same shards"
        return f"cannot join: {layout.online}" if layout.online else ""

    def awaits(self, message: Joined | RegroupFailed) -> bool:
        """Return whether it is of this attempt, and of a process that takes part."""
        if message.attempt != self.writing.attempt:
            return False
        newcomer = self.newcomers.get(message.rank)
        if newcomer is not None:
            return newcomer.stage is NewcomerStage.JOINING
        return message.rank in self.state.nodes

    def join(self, message: Joined) -> str:
        """Note it; return why it does not fit, empty where it does."""
        if message.step != self.writing.step:
            return f"it came to step {message.step}"
        digest = next(iter(self.joined.values()), message.digest)
        if message.digest != digest:
            return "its process groups or parameters differ from those of other ranks"
        self.joined[message.rank] = message.digest
        return ""

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks of the job have joined."""
        return len(self.joined) == self.membership.world_size

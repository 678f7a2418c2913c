"""Finds the first cause of an incident, and the rank that misses a collective; pure.

A rank begins the collectives of a group in the same order as every other rank of the group
(`missing_collectives`). A rank that has begun fewer collectives than others misses a collective; a rank whose
collective of the same number has another name has called something else. Completion is not compared, because
gloo does not record completion.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from adaptor.protocol.collectives import Collectives
from adaptor.protocol.messages import CALL, NODES_JOIN, Corruption, Raised, ScriptStage, Standing

# What a shell reports for a process that a signal ended.
SIGNAL_BASE = 128


class FirstCause(NamedTuple):
    """The first cause: the rank to blame (-1: none), the exit code of the job, and the words for the user.

    Attributes:
        mistake: another start would fail in the same way
        node: the node whose agent was told to end or has failed (-1: no agent's)
    """

    rank: int
    exit_code: int
    words: str
    key: str = ""
    ranks: tuple[int, ...] = ()
    mistake: bool = False
    node: int = -1
    kind: str = ""
    status: int | None = None
    why: str = ""


@dataclass
class Failures:
    """The failures of an incident, collected from the messages to the controller.

    Attributes:
        reasons: how the kernel has ended ranks for want of memory (`Died.why`)
        ended_scripts: ranks whose script had come to its end before
        unannounced: ranks that ended without a notice: failed ranks, whatever the status
        noticed: ranks that have ended, in the order of the notices; statuses come later
        asked: the cause, if the job was told to end, or to take nodes in, while nothing had failed
        told_to_end: the process that was told to end last, and the signal; also after a failure
        leaving: nodes whose agents were told to end
        was_interrupted: the controller was lost after it had ordered more than closed doors
        hang_s: seconds without any movement in a hang; else 0
        standing: the positions of the main threads in a hang
        drilled: the rank that a user has ended to drill the recovery (`ttp drill`); -1: none
        corruption: the difference between holders; None: none
        nodes: of the ranks that `corruption` names or suspects, on a job of several nodes
    """

    dead: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    ended_scripts: set[int] = field(default_factory=set)
    unannounced: set[int] = field(default_factory=set)
    noticed: dict[int, None] = field(default_factory=dict)
    lost: dict[int, list[int]] = field(default_factory=dict)
    lost_hosts: dict[int, str] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    asked: FirstCause | None = None
    told_to_end: str = ""
    leaving: set[int] = field(default_factory=set)
    was_interrupted: bool = False
    hang_s: float = 0.0
    standing: dict[int, Standing] = field(default_factory=dict)
    drilled: int = -1
    corruption: Corruption | None = None
    nodes: dict[int, int] = field(default_factory=dict)

    def notice(self, ranks: Iterable[int]) -> None:
        """Note ranks that have ended, or are about to."""
        for rank in ranks:
            self.noticed.setdefault(rank)

    @property
    def out_of_memory(self) -> list[int]:
        """Return the ranks that the kernel has ended for want of memory."""
        return list(self.reasons)

    def explain(self, rank: int, reason: str) -> None:
        """Note the reason of the death of a process of `rank`; the first reason counts."""
        if reason and rank not in self.dead:
            self.reasons[rank] = reason

    def end(self, rank: int, status: int) -> None:
        """Note the status of a process of `rank` that has ended; the first status counts."""
        self.dead.setdefault(rank, status)

    def lose(self, node: int, ranks: list[int], host: str) -> None:
        """Note that `node`, on the machine `host`, is lost with its `ranks`; the first loss counts."""
        self.lost.setdefault(node, []).extend(ranks)
        self.lost_hosts.setdefault(node, host)

    def ask(self, rank: int, caller: str, name: str, error: str = "", node: int = -1) -> None:
        """Note that `caller` was told to end by the signal `name`, or has failed by an `error`; rank -1: an
        agent.
        """
        if error:
            self.asked = FirstCause(rank, 1, f"{caller} has failed: {error}", kind="error", node=node)
            return
        code = SIGNAL_BASE + signal.Signals.__members__.get(name, signal.SIGTERM)
        self.asked = FirstCause(
            rank, code, f"{caller} was told to end by {name}", kind="told-to-end", node=node
        )

    def join(self, count: int) -> None:
        """Note that `count` more nodes wait; all workers start again with the nodes."""
        description = f"{count} more node{' is' if count == 1 else 's are'} there"
        self.asked = FirstCause(-1, 1, description, kind=NODES_JOIN)

    @property
    def corrupt(self) -> frozenset[int]:
        """Return the ranks whose state may not be given to other ranks."""
        return frozenset() if self.corruption is None else frozenset(self.corruption.named)

    @property
    def is_known(self) -> bool:
        """Return True if `first` will not change any more: all noticed deaths have a status."""
        return bool(self.asked or self.hang_s or self.corruption) or self.noticed.keys() <= self.dead.keys()

    def first(self, silent: Collection[int]) -> FirstCause:
        """Return the first cause; a death explains exceptions. `silent`: ranks without an answer."""
        if self.asked is not None:
            return self.asked
        if self.hang_s:
            return self._hang(sorted(silent))
        if self.corruption is not None:
            return self._corruption(self.corruption)
        dead_ranks = [(rank, self.dead[rank]) for rank in self.noticed if rank in self.dead]
        failed = [(rank, status) for rank, status in dead_ranks if status or rank in self.unannounced]
        if failed:
            rank, status = failed[0]
            code = status or 1 if status >= 0 else SIGNAL_BASE - status
            away = {r for ranks in self.lost.values() for r in ranks}
            end_notes = {
                r: " after its script had ended" if r in self.ended_scripts else "" for r, _ in failed
            }
            reasons = {**({self.drilled: "ttp drill"} if self.drilled >= 0 else {}), **self.reasons}
            descriptions = [
                f"rank {r} {ending(s, reasons.get(r, ''))}{end_notes[r]}" for r, s in failed if r not in away
            ]
            descriptions += [f"node {node} is lost" for node, ranks in self.lost.items() if ranks]
            # Without a key a fault is not counted (`Recurrence`): no number of drills ends a job.
            key = "" if rank in away or rank == self.drilled else _kind(status)
            kind = "node-lost" if rank in away else "signal" if status < 0 else "exit"
            ranks = tuple(r for r, _ in failed)
            exit_status = None if rank in away else status
            return FirstCause(
                rank,
                code,
                ", ".join(descriptions),
                key,
                ranks,
                kind=kind,
                status=exit_status,
                why=self.reasons.get(rank, ""),
            )
        rank, raised = next(iter(self.raised.items()))
        if (ended := self.ended_early) is not None:
            text = (
                f"rank {ended} ended its script while other ranks trained; rank {rank} raised {raised.error}"
            )
            return FirstCause(ended, raised.exit_code, text, _kind(0), (ended,), kind="exit", status=0)
        origin = raised.origin
        known_by = f"{origin.kind} at {origin.where}" if origin.where else origin.kind
        description = f"rank {rank} raised {raised.error}{self._before}"
        return FirstCause(
            rank, raised.exit_code, description, known_by, (rank,), origin.mistake, kind="exception"
        )

    @property
    def ended_early(self) -> int | None:
        """Return the first rank whose script has ended, if another rank in training has lost its connections;
        else None.
        """
        raised = next(iter(self.raised.values()), None)
        if raised is None or raised.stage != ScriptStage.TRAINING or not raised.origin.may_be_echo:
            return None
        return next((rank for rank in (*self.noticed, *self.dead) if rank in self.ended_scripts), None)

    def _corruption(self, corruption: Corruption) -> FirstCause:
        ranks = corruption.named or corruption.suspects
        of_nodes = [
            f"{rank} (node {self.nodes[rank]})" if rank in self.nodes else str(rank) for rank in ranks
        ]
        if corruption.named:
            subject = (
                f"rank{'s' * (len(ranks) > 1)} {' and '.join(of_nodes)} {'are' if len(ranks) > 1 else 'is'}"
            )
        else:
            subject = f"one of the ranks {' and '.join(of_nodes)} (suspects) is"
        key = f"corruption of rank {' and '.join(map(str, ranks))}"
        return FirstCause(
            min(ranks), 1, f"{subject} corrupt: {corruption.text}", key, ranks, kind="corruption"
        )

    def _hang(self, silent: list[int]) -> FirstCause:
        """Return the cause of a hang.

        The cause is a silent rank; else a rank that waits for no other rank; else a rank whose script had
        ended; else a rank that waits in another call than most.
        """
        rank, words = self._hanging(silent)
        return FirstCause(rank, 1, f"nothing has moved for {self.hang_s:.0f} s{words}", "a hang", kind="hang")

    def _hanging(self, silent: list[int]) -> tuple[int, str]:
        if silent:
            return silent[0], f": {ranks_in_words(silent, 'does not answer', 'do not answer')}"
        apart = {
            rank: standing.where for rank, standing in sorted(self.standing.items()) if not standing.waits
        }
        if 0 < len(apart) < len(self.standing):
            first = min(apart)
            stalled_ranks = ranks_in_words(apart, "stands still", "stand still")
            return first, f": {stalled_ranks}, others wait; {apart[first]}"
        if self.ended_scripts:
            return min(self.ended_scripts), self._before
        if not apart and (elsewhere := self._elsewhere()):
            first = min(elsewhere)
            waiting = ranks_in_words(elsewhere, "waits", "wait")
            return first, f": {waiting} in another call than most ranks; {elsewhere[first]}"
        return -1, ", and no rank stands out"

    @property
    def _before(self) -> str:
        """Return the ranks whose script had ended before, which breaks collectives of others, in words."""
        if not self.ended_scripts:
            return ""
        return f"; the script of {ranks_in_words(sorted(self.ended_scripts))} had ended before"

    def _elsewhere(self) -> dict[int, str]:
        """Return the ranks whose calls differ, from the outermost on, from those of more than half."""
        stacks = {rank: standing.stack_hashes for rank, standing in sorted(self.standing.items())}
        for start in range(0, max(map(len, stacks.values()), default=0), CALL):
            calls = Counter(hashes[start : start + CALL] for hashes in stacks.values())
            most_common, count = calls.most_common(1)[0]
            if count < len(stacks):
                apart = [
                    rank for rank, hashes in stacks.items() if hashes[start : start + CALL] != most_common
                ]
                return {rank: self.standing[rank].where for rank in apart} if 2 * count > len(stacks) else {}
        return {}


def ending(status: int, why: str = "") -> str:
    """Return the predicate of a sentence about a process that has ended, with the reason `why` if known."""
    if why:
        return f"{ending(status)} ({why})"
    if status == 0:
        return "exited with code 0 before its script had ended"
    if status > 0:
        return f"exited with code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _kind(status: int) -> str:
    """Return the noun for the predicate of `ending`."""
    if status == 0:
        return "exit code 0 before the end of the script"
    return f"exit code {status}" if status > 0 else ending(status).removeprefix("was ended by ")


def ranks_in_words(
    ranks: Iterable[int], singular_verb: str = "", several: str = "", *, most_named: int = 4
) -> str:
    """Return ranks and their verb, like `rank 1 waits` and `ranks 1, 2 and 5 more wait`."""
    named_ranks = [str(rank) for rank in ranks]
    if len(named_ranks) == 1:
        return f"rank {named_ranks[0]} {singular_verb}".rstrip()
    named, last = named_ranks[:-1], named_ranks[-1]
    if len(named_ranks) > most_named:
        named, last = named_ranks[:most_named], f"{len(named_ranks) - most_named} more"
    return f"ranks {', '.join(named)} and {last} {several}".rstrip()


# More sentences than these are left out.
MOST_LINES = 8
# The most ranks that are named.
_NAMED = 8


def missing_collectives(of_ranks: Mapping[int, Collectives], silent: Iterable[int] = ()) -> list[str]:
    """Return the ranks that miss a collective, one sentence for each group, causes before consequences.

    A rank missed in one group may only wait in another group: ranks without any wait come first, alone if any
    exist. Ranks without an answer (`silent`) come before all, because their collectives are unknown.
    """
    groups = sorted({group for collectives in of_ranks.values() for group in collectives})
    differences = [difference for group in groups if (difference := _compare(group, of_ranks)) is not None]
    waiting = {
        rank
        for difference in differences
        for rank in difference.other_ranks
        if _is_last(difference.group, of_ranks[rank])
    }
    causes = [difference for difference in differences if not waiting.issuperset(difference.ranks)]
    lines = [difference.sentence for difference in causes or differences]
    if of_ranks and (unknown := [rank for rank in silent if rank not in of_ranks]):
        waiting_words = ranks_in_words(
            unknown,
            "does not answer: what it has begun is not known, and others may wait for it",
            "do not answer: what they have begun is not known, and others may wait for them",
            most_named=_NAMED,
        )
        lines.insert(0, waiting_words)
    return lines[:MOST_LINES]


class _Difference(NamedTuple):
    group: str
    ranks: list[int]  # the missed ranks
    other_ranks: list[int]
    sentence: str


def _compare(group: str, of_ranks: Mapping[int, Collectives]) -> _Difference | None:
    positions = {
        rank: collectives[group] for rank, collectives in sorted(of_ranks.items()) if group in collectives
    }
    highest_number = max(position.number for position in positions.values())
    ahead = {rank: position for rank, position in positions.items() if position.number == highest_number}
    names = Counter(position.name for position in ahead.values())
    name = names.most_common(1)[0][0]
    ranks_behind = [rank for rank in positions if rank not in ahead]
    if ranks_behind:
        missed = ranks_in_words(ranks_behind, "misses", "miss", most_named=_NAMED)
        begun_words = ranks_in_words(ahead, "has begun", "have begun", most_named=_NAMED)
        description = f"{missed} {name} {highest_number} of {group}, which {begun_words}"
        return _Difference(group, ranks_behind, list(ahead), description)
    if len(names) > 1:
        apart = [rank for rank, position in ahead.items() if position.name != name]
        agreeing_ranks = [rank for rank in ahead if rank not in apart]
        called = ", ".join(sorted({ahead[rank].name for rank in apart}))
        begun_words = ranks_in_words(apart, "has begun", "have begun", most_named=_NAMED)
        agreeing = ranks_in_words(agreeing_ranks, most_named=_NAMED)
        description = f"{begun_words} {called} as collective {highest_number} of {group}, {agreeing} {name}"
        return _Difference(group, apart, agreeing_ranks, description)
    return None


def _is_last(group: str, collectives: Collectives) -> bool:
    return collectives[group].begun == max(position.begun for position in collectives.values())

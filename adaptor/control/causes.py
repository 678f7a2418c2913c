"""What has gone wrong in a job, and which of it came first: the words of the verdict."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from adaptor.control.messages import CALL, Raised, Standing

# What a shell reports for a process that a signal ended.
SIGNAL_BASE = 128
# So many ranks are named.
_NAMED = 4


class Cause(NamedTuple):
    """The rank to blame, the exit code of the job, what to say; -1 is none."""

    rank: int
    exit_code: int
    words: str


@dataclass
class Causes:
    """Collected as the controller hears of it.

    dead         status of every process that has ended
    ended        ranks whose script had come to its end before
    unannounced  ranks that ended without a word: they have failed, whatever the status
    lost         nodes, and the ranks that were lost with them
    raised       the first exception of each rank
    asked        somebody wanted the job to end, and nothing had failed
    leaving      nodes the agents of which are told to end, whatever else there is
    hang_s       for so long nothing had moved, when that was too long
    standing     where the main threads stood then
    """

    dead: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    unannounced: set[int] = field(default_factory=set)
    lost: dict[int, list[int]] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    asked: Cause | None = None
    leaving: set[int] = field(default_factory=set)
    hang_s: float = 0.0
    standing: dict[int, Standing] = field(default_factory=dict)

    def ask(self, rank: int, who: str, name: str) -> None:
        """Somebody wants `who` to end, by the signal `name`."""
        code = SIGNAL_BASE + signal.Signals.__members__.get(name, signal.SIGTERM)
        self.asked = Cause(rank, code, f"{who} was told to end by {name}")

    def first(self, silent: Collection[int]) -> Cause:
        """The first cause; a death explains the exceptions of the others.

        Args:
            silent: ranks that have not answered.
        """
        if self.asked is not None:
            return self.asked
        if self.hang_s:
            return self._hang(sorted(silent))
        failed = [(rank, status) for rank, status in self.dead.items() if status or rank in self.unannounced]
        if failed:
            rank, status = failed[0]
            code = status or 1 if status >= 0 else SIGNAL_BASE - status
            away = {r for ranks in self.lost.values() for r in ranks}
            after = {r: " after its script had ended" if r in self.ended else "" for r, _ in failed}
            words = [f"rank {r} {_ending(s)}{after[r]}" for r, s in failed if r not in away]
            words += [f"node {node} is lost" for node, ranks in self.lost.items() if ranks]
            return Cause(rank, code, ", ".join(words))
        rank, raised = next(iter(self.raised.items()))
        return Cause(rank, raised.exit_code, f"rank {rank} raised {raised.error}{self._before}")

    def _hang(self, silent: list[int]) -> Cause:
        """Whom everyone waits for: who does not answer, else who stands anywhere but in a collective, else
        who is in another one than most."""
        lost = f"nothing has moved for {self.hang_s:.0f} s"
        if silent:
            return Cause(silent[0], 1, f"{lost}: {_ranks(silent)} does not answer")
        apart = {rank: there.where for rank, there in sorted(self.standing.items()) if not there.waits}
        if 0 < len(apart) < len(self.standing):
            first = min(apart)
            return Cause(first, 1, f"{lost}: {_ranks(list(apart))} stands still, others wait; {apart[first]}")
        if self.ended:
            return Cause(min(self.ended), 1, f"{lost}{self._before}")
        if not apart and (elsewhere := self._elsewhere()):
            first = min(elsewhere)
            words = f"{_ranks(list(elsewhere))} waits where most do not; {elsewhere[first]}"
            return Cause(first, 1, f"{lost}: {words}")
        return Cause(-1, 1, f"{lost}, and no rank stands out")

    @property
    def _before(self) -> str:
        """A script that ends in the middle of training lets collectives of the others break, or hang."""
        return f"; the script of {_ranks(sorted(self.ended))} had ended before" if self.ended else ""

    def _elsewhere(self) -> dict[int, str]:
        """Ranks whose way, from the outermost call on, parts from that of more than half of all."""
        ways = {rank: there.way for rank, there in sorted(self.standing.items())}
        for start in range(0, max(map(len, ways.values()), default=0), CALL):
            calls = Counter(way[start : start + CALL] for way in ways.values())
            most, count = calls.most_common(1)[0]
            if count < len(ways):
                apart = [rank for rank, way in ways.items() if way[start : start + CALL] != most]
                return {rank: self.standing[rank].where for rank in apart} if 2 * count > len(ways) else {}
        return {}


def _ranks(ranks: list[int]) -> str:
    more = len(ranks) - _NAMED
    return f"rank {', '.join(map(str, ranks[:_NAMED]))}" + (f" and {more} more" if more > 0 else "")


def _ending(status: int) -> str:
    if status == 0:
        return "exited with code 0 before its script had ended"
    if status > 0:
        return f"exited with code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"

"""What is to be saved of all that is there now, or how it ends where nothing is; pure."""

from __future__ import annotations

from collections.abc import Iterable

from adaptor.control.freezing import Freezing
from adaptor.control.plan import NoPlan, Plan
from adaptor.control.stages import Outcome
from adaptor.control.useless import cannot_be_read, do_not_answer
from adaptor.control.writing import Writing

NEVER_BEGUN = Outcome("nothing", -1, "no step has finished: training had not begun on every rank")


def choose(freezing: Freezing, writing: Writing, stuck: Iterable[int]) -> Plan | Outcome:
    """The newest step that there is; `stuck` ranks were given up."""
    origin = writing.origin
    if not freezing.knows_all:
        if freezing.newest_begun <= origin:
            return NEVER_BEGUN
        who = ", ".join(map(str, freezing.unknown))
        return Outcome("lost", -1, f"what rank {who} held is not known, word of it was lost")
    decision = writing.decide(freezing.boards)
    if isinstance(decision, NoPlan):
        if freezing.boards and freezing.newest_begun <= origin:
            return _nothing_since(origin)
        useless = do_not_answer([*freezing.silent, *stuck]) + cannot_be_read(freezing.boards)
        return Outcome("lost", -1, decision.reason + useless, unheld=True)
    return _nothing_since(origin) if decision.step <= origin else decision


def _nothing_since(origin: int) -> Outcome:
    reason = f"no step has finished since step {origin}" if origin else "no step has finished"
    return Outcome("nothing", origin, reason)

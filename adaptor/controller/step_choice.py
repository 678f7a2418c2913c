"""Decides what is saved, or how the incident ends if nothing can be; pure."""

from __future__ import annotations

from adaptor.controller.freeze import FreezeState
from adaptor.controller.incident_state import IncidentState
from adaptor.controller.outcome import IncidentOutcome, cannot_be_read, do_not_answer
from adaptor.controller.plan import NoPlan, Plan
from adaptor.controller.save_attempts import Writing
from adaptor.protocol.messages import ScriptStage

FINISHED = IncidentOutcome("nothing", -1, "the training was over")
NEVER_BEGUN = IncidentOutcome("nothing", -1, "no step has finished: training had not begun on every rank")


def choose(state: IncidentState, freeze_state: FreezeState, writing: Writing) -> Plan | IncidentOutcome:
    """Return the plan to save the newest possible step, or the outcome if there is none.

    `state` is that of the incident.
    """
    origin = writing.origin
    if not freeze_state.knows_all:
        if freeze_state.newest_begun <= origin:
            return NEVER_BEGUN
        unknown_ranks = ", ".join(map(str, freeze_state.unknown))
        return IncidentOutcome(
            "lost", -1, f"what rank {unknown_ranks} held is not known: its message was lost"
        )
    if freeze_state.stage == ScriptStage.FINISHED:
        return FINISHED
    decision = writing.decide(state.boards)
    if isinstance(decision, NoPlan):
        if state.boards and freeze_state.newest_begun <= origin:
            return _nothing_since(origin)
        useless = do_not_answer([*state.silent, *state.stuck]) + cannot_be_read(state.boards)
        return IncidentOutcome("lost", -1, decision.reason + useless, unheld=True)
    return _nothing_since(origin) if decision.step <= origin else decision


def _nothing_since(origin: int) -> IncidentOutcome:
    reason = f"no step has finished since step {origin}" if origin else "no step has finished"
    return IncidentOutcome("nothing", origin, reason)

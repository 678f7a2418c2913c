"""What is said of an incident that has ended; pure."""

from __future__ import annotations

from adaptor.control.causes import Causes
from adaptor.control.incident import Incident
from adaptor.control.messages import Verdict
from adaptor.control.roster import Roster
from adaptor.control.stages import Outcome


def verdict_of(incident: Incident, causes: Causes, roster: Roster) -> Verdict:
    """The verdict on `incident`, which has an outcome."""
    outcome = incident.outcome
    assert outcome is not None
    cause = causes.first(incident.freezing.silent)
    if outcome.kind == "lost" and cause.rank in causes.ended and not causes.hang_s:
        # Others have ended well before, and their states with them; but who hangs is in the middle.
        outcome = Outcome("nothing", -1, "the training was over")
    match outcome.kind:
        case "saved":
            kept = outcome.reason or "no finished step is lost"
            remarks = [incident.writing.doubts.words, *incident.place.remarks]
            line = "; ".join([f"step {outcome.step} is saved, {kept}", *filter(None, remarks)])
        case "nothing":
            line = f"nothing to save: {outcome.reason}"
        case _:
            line = f"the state cannot be saved: {outcome.reason}"
            line += f"; {roster.advice}" if outcome.unheld else ""
    return Verdict(
        *(incident.number, outcome.kind, outcome.step, f"{cause.words}; {line}"),
        *(cause.rank, cause.exit_code, roster.save),
        leaves=tuple(sorted(causes.leaving | ({0} & causes.lost.keys()))),
        lost=bool(causes.lost),
    )

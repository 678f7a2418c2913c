"""Makes the notices that targets get (TTP_NOTIFY): of an incident, a failed save, and the end of a job."""

from __future__ import annotations

import msgspec

from adaptor.protocol import records
from adaptor.protocol.records import IncidentRecord


def notice_of_incident(incident: IncidentRecord, time: str, kind: str = "incident") -> records.Notice:
    """Return the notice of an incident at `time`.

    `kind`: `incident` with its verdict, `resumed` after training has continued.
    """
    lost = incident.steps_lost
    steps = "" if lost is None else f", {lost} step{'' if lost == 1 else 's'} lost"
    # The reason already names the steps if a step is saved or nothing is lost.
    reason = incident.reason + (steps if incident.verdict == "lost" else "")
    outcome = f"training goes on{steps}" if kind == "resumed" else reason
    # The line of an online recovery has named the action.
    action = "" if incident.verdict == "recovered" else f"; {incident.next_action}"
    return records.Notice(
        type="resumed" if kind == "resumed" else "incident",
        time=time,
        job=incident.job,
        text=f"{incident.job}: {outcome}{action}",
        # Without events and ranks: with thousands of ranks no target would accept them in time.
        incident=msgspec.structs.replace(incident, events=[], ranks=[]),
    )


def notice_of_save(job: str, step: int, reason: str, time: str) -> records.Notice:
    """Return the notice that the save of `step` has failed for `reason`; '': a save has succeeded again."""
    outcome = (
        f"step {step} could not be saved: {reason}; training goes on" if reason else f"step {step} is saved"
    )
    return records.Notice(type="save", time=time, job=job, text=f"{job}: {outcome}", incident=None)


def notice_of_end(job: str, incidents: int, time: str) -> records.Notice:
    """Return the notice of the end of `job` after `incidents` incidents, at `time`."""
    several = "" if incidents == 1 else "s"
    return records.Notice(
        type="ended",
        time=time,
        job=job,
        text=f"{job}: ttprun has ended, {incidents} incident{several}",
        incident=None,
    )

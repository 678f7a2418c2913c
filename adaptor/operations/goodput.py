"""How a job has spent its time, from its events: what part of it went into steps that count.

A job is in one state at a time. Its events end one state and begin the next:

startup     workers are started, until every rank trains
training    steps, evaluations and saves
recovery    from a fault that was noticed until every rank trains again (after an online recovery: until a
            step is finished), or to the end of ttprun
down        from the end of one ttprun to the start of the next one of the same job; from its last event, if
            it was ended without being able to say so

Training is then divided: what was spent on steps that were trained again is `wasted`, the rest `productive`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from adaptor.operations import job_folder
from adaptor.operations.records import Event, Incident, IncidentSummary, Status, unix

# By the state before an event and its type: the state after it. What is not here changes nothing.
_NEXT = {
    ("down", "generation"): "startup",
    ("training", "generation"): "startup",  # workers that are started again though nothing has failed
    ("startup", "training"): "training",
    ("startup", "fault-noticed"): "recovery",
    ("training", "fault-noticed"): "recovery",
    ("recovery", "training"): "training",
    ("recovery", "gone-on"): "training",
    ("startup", "ended"): "down",
    ("training", "ended"): "down",
    ("recovery", "ended"): "down",
}


class Goodput(msgspec.Struct, kw_only=True, frozen=True):
    """How a job has spent its time, in seconds.

    seconds  in each state: productive, wasted, startup, recovery, down
    steps    that count: from the first one that was trained to the newest one that is finished
    lost     steps that had to be trained again
    ratio    productive seconds over all seconds; None if there are none
    """

    seconds: dict[str, float]
    steps: int
    lost: int
    ratio: float | None


def of_job(job: Path, status: Status, incidents: Sequence[Incident | IncidentSummary]) -> Goodput:
    """Return how a job has spent its time until its status was written.

    Args:
        job: its folder.
        status: of the same job.
        incidents: of the same job.

    Raises:
        JobFolderError: its events cannot be read.
    """
    return goodput(job_folder.events(job), incidents, newest=status.step, until=unix(status.time))


def goodput(
    events: Iterable[Event],
    incidents: Sequence[Incident | IncidentSummary],
    *,
    newest: int | None,
    until: float | None,
) -> Goodput:
    """Return how a job has spent its time.

    A step that was lost is taken to have cost what a step of this job costs on average.

    Args:
        events: of the job, in the order of its file.
        incidents: of the same job.
        newest: the newest finished step, None if it is not known: then that of the events.
        until: the time to which the last state lasts, in Unix seconds; None: to the last event.
    """
    seconds = dict.fromkeys(("training", "startup", "recovery", "down"), 0.0)
    state, since, first, last = "", 0.0, None, 0.0
    for event in events:
        at = unix(event.time)
        if event.type == "generation" and event.generation == 1 and state not in ("", "down"):
            # A new ttprun, though the one before it has told of no end.
            seconds[state] += max(0.0, last - since)
            state, since = "down", max(last, since)
        last = max(last, at)
        after = _NEXT.get((state or "down", event.type), state)
        if event.step is not None:
            newest = max(event.step, newest if newest is not None else event.step)
        if event.type == "training" and event.step is not None and first is None:
            first = event.step
        if after == state:
            continue
        if state:
            # Two nodes may have written, whose clocks disagree: no state lasts less than nothing.
            seconds[state] += max(0.0, at - since)
        state, since = after, max(at, since)
    if state and state != "down" and until is not None:
        seconds[state] += max(0.0, until - since)
    lost = sum(incident.steps_lost or 0 for incident in incidents)
    steps = max(0, newest - max(first, 0)) if newest is not None and first is not None else 0
    wasted = seconds["training"] * lost / (steps + lost) if lost else 0.0
    spent = {
        "productive": seconds["training"] - wasted,
        "wasted": wasted,
        "startup": seconds["startup"],
        "recovery": seconds["recovery"],
        "down": seconds["down"],
    }
    total = sum(spent.values())
    return Goodput(
        seconds=spent, steps=steps, lost=lost, ratio=spent["productive"] / total if total else None
    )

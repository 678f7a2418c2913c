"""Calculates from a job's events how much of its time went into steps that count.

A job is in one state at a time. Its events end one state and begin the next:

startup     workers are started, until every rank trains
training    steps, evaluations and saves
recovery    from a fault that was noticed, or the begin of a hang, until every rank trains again (after an
            online recovery: until a step is finished), or to the end of ttprun
down        from the end of one ttprun to the start of the next one of the same job; from its last event, if
            it was ended without being able to say so

Training is then divided. `data`, `evaluation`, `save` and `other` are what the first rank was not in steps
for, by the status. What was spent on steps that were trained again is `wasted`, the rest `productive`. How
much of a startup or a recovery was the load of a checkpoint is in the event `training`; it counts as `load`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import msgspec

from adaptor.operations.records import LOAD, STILL, Event, Incident, IncidentSummary, unix

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


# What a rank in training is not in steps for; other: the writing of logs, and phases of other names.
USES = ("data", "evaluation", "save", "other")
# What a status counts: steps that are made again are `wasted` while they are made.
COUNTED_USES = ("productive", "wasted", *USES)


class Goodput(msgspec.Struct, kw_only=True, frozen=True):
    """The time of a job by its use, in seconds.

    Attributes:
        seconds: in each state: productive, those of `USES`, wasted, startup, load, recovery, down
        steps: that count: from the first one that was trained to the newest one that is finished and not lost
        lost: steps that had to be trained again, or would have to, where the job has ended; None: those of an
            incident are not known, and count as none of the wasted ones
        ratio: productive seconds over all seconds; None if there are none
    """

    seconds: dict[str, float]
    steps: int
    lost: int | None
    ratio: float | None


class TimeSpent:
    """Adds up how a job spends its time, event by event."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("training", "startup", LOAD, "recovery", "down"), 0.0)
        self._state = ""
        self._since = 0.0  # when the state began, in Unix seconds
        self._last = 0.0  # when the last event was
        self._first: int | None = None  # the step from which training began
        self._newest: int | None = None  # the newest step of an event
        self.changes: list[tuple[float, str]] = []  # when each state began, and which it was

    def add(self, event: Event) -> None:
        """Take the next event of the job, in the order of its file."""
        at = unix(event.time)
        if event.type == "generation" and event.generation == 1 and self._state not in ("", "down"):
            # A new ttprun, though the one before it has told of no end.
            self._enter("down", self._last)
        self._last = max(self._last, at)
        if event.step is not None:
            self._newest = max(event.step, self._newest if self._newest is not None else event.step)
        if event.type == "training" and event.step is not None and self._first is None:
            self._first = event.step
        state_after = _NEXT.get((self._state or "down", event.type), self._state)
        if state_after != self._state:
            state_before, seconds = self._state, self._seconds
            had = seconds.get(state_before, 0.0)
            # A hang has begun before it was noticed.
            is_still_seconds = _number(event.data.get(STILL, "")) if event.type == "fault-noticed" else 0.0
            self._enter(state_after, at - is_still_seconds)
            if state_after == "training":
                load = min(_number(event.data.get(LOAD, "")), seconds[state_before] - had)
                seconds[state_before] -= load
                seconds[LOAD] += load

    @property
    def closed(self) -> dict[str, float]:
        """The seconds of all starts, loads, recoveries and breaks that have ended: they never become less."""
        return {state: self._seconds[state] for state in ("startup", LOAD, "recovery", "down")}

    def _enter(self, state: str, at: float) -> None:
        if self._state:
            # Two nodes may have written, whose clocks disagree: no state lasts less than nothing.
            self._seconds[self._state] += max(0.0, at - self._since)
        self._state, self._since = state, max(at, self._since)
        self.changes.append((self._since, state))

    def until(
        self,
        until: float | None,
        *,
        newest: int | None,
        incidents: Sequence[Incident | IncidentSummary],
        uses: Mapping[str, float],
    ) -> Goodput:
        """Return how the job has spent its time.

        A step that was lost is taken to have cost what a step of this job costs on average.

        Args:
            until: the time to which the last state lasts, in Unix seconds; None: to the last event.
            newest: the newest finished step, None if it is not known: then that of the events.
            incidents: of the same job.
            uses: seconds of training in each of `USES`; what is not there is 0.
        """
        seconds = dict(self._seconds)
        if self._state and self._state != "down" and until is not None:
            seconds[self._state] += max(0.0, until - self._since)
        known_steps = [step for step in (newest, self._newest) if step is not None]
        counted = [incident.steps_lost for incident in incidents if incident.steps_lost is not None]
        lost = sum(counted)
        steps = (
            max(0, max(known_steps) - max(self._first, 0)) if known_steps and self._first is not None else 0
        )
        steps = max(0, steps - self._gone(incidents))
        other_uses = {use: max(0.0, uses.get(use, 0.0)) for use in USES}
        # A phase that an incident has held up is counted with that, and in the recovery.
        share = min(1.0, seconds["training"] / sum(other_uses.values())) if any(other_uses.values()) else 1.0
        other_uses = {use: took * share for use, took in other_uses.items()}
        stepping = max(0.0, seconds["training"] - sum(other_uses.values()))
        wasted = stepping * lost / (steps + lost) if lost else 0.0
        spent = {
            "productive": stepping - wasted,
            **other_uses,
            "wasted": wasted,
            "startup": seconds["startup"],
            LOAD: seconds[LOAD],
            "recovery": seconds["recovery"],
            "down": seconds["down"],
        }
        total = sum(spent.values())
        return Goodput(
            seconds=spent,
            steps=steps,
            lost=lost if len(counted) == len(incidents) else None,
            ratio=spent["productive"] / total if total else None,
        )

    def _gone(self, incidents: Sequence[Incident | IncidentSummary]) -> int:
        """Return the steps that the last incident has lost, where the job has ended with it.

        Else they have been trained again, and the newest step is one that counts.
        """
        if not incidents or self._state != "down":
            return 0
        last = incidents[-1]
        return 0 if last.phases.first_step is not None else last.steps_lost or 0


def _number(text: str) -> float:
    """Return the seconds in a text; 0 where it has none."""
    with contextlib.suppress(ValueError):
        seconds = float(text)
        return seconds if math.isfinite(seconds) and seconds > 0.0 else 0.0
    return 0.0

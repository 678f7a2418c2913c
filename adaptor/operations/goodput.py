"""Calculates from a job's events how much of its time went into steps that count.

A job is in one state at a time. Its events end one state and begin the next:

startup     workers start, until every rank trains
training    steps, evaluations and saves
recovery    from the notice of a fault, or the begin of a hang, until every rank trains again (after an
            online recovery: until a step is finished), or to the end of ttprun
down        from the end of one ttprun to the start of the next ttprun of the same job; from the last
            event, if ttprun ended without an event

Training is then divided. `data`, `evaluation`, `save` and `other` are the status's times of the first rank
outside of steps. Time of steps that were trained again is `wasted`, the remaining time `productive`. The
event `training` has the time in which a startup or a recovery loaded a checkpoint, counted as `load`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import msgspec

from adaptor.protocol.records import LOAD, STILL, Event, IncidentRecord, IncidentSummary, unix

# By the state before an event and the event's type: the state afterwards. Other events change no state.
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


# The uses of a rank's time outside of steps; other: logs, and phases of other names.
USES = ("data", "evaluation", "save", "other")
# The uses that a status counts: repeated steps are `wasted` at once.
COUNTED_USES = ("productive", "wasted", *USES)


class Goodput(msgspec.Struct, kw_only=True, frozen=True):
    """The time of a job by its use, in seconds.

    Attributes:
        seconds: in each state: productive, the states of `USES`, wasted, startup, load, recovery, down
        steps: the number of steps that count: from the first trained step to the newest finished step that is
            not lost
        lost: the number of steps trained again, or lost at the end of the job; None: unknown for an incident,
            whose steps do not count as wasted
        ratio: productive seconds over all seconds; None without any time
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
        self._last = 0.0  # the time of the last event
        self._first: int | None = None  # the first step of training
        self._newest: int | None = None  # the newest step of an event
        self.changes: list[tuple[float, str]] = []  # the beginning of each state, and its name

    def add(self, event: Event) -> None:
        """Add the next event of the job, in the order of its file."""
        at = unix(event.time)
        if event.type == "generation" and event.generation == 1 and self._state not in ("", "down"):
            # A new ttprun, whose predecessor ended without an event.
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
        """Return the seconds of all ended starts, loads, recoveries and breaks, which never decrease."""
        return {state: self._seconds[state] for state in ("startup", LOAD, "recovery", "down")}

    def _enter(self, state: str, at: float) -> None:
        if self._state:
            # The clocks of two nodes may disagree: no state lasts less than nothing.
            self._seconds[self._state] += max(0.0, at - self._since)
        self._state, self._since = state, max(at, self._since)
        self.changes.append((self._since, state))

    def until(
        self,
        until: float | None,
        *,
        newest: int | None,
        incidents: Sequence[IncidentRecord | IncidentSummary],
        uses: Mapping[str, float],
    ) -> Goodput:
        """Return the job's use of its time.

        A lost step is taken to have cost the average of this job's steps.

        Args:
            until: the end of the last state, in Unix seconds; None: the last event.
            newest: the newest finished step; None: the newest step of the events.
            incidents: of the same job.
            uses: seconds of training in each of `USES`; 0 for a missing use.
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
        # A phase that an incident has held up is counted in the phase, and in the recovery.
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

    def _gone(self, incidents: Sequence[IncidentRecord | IncidentSummary]) -> int:
        """Return the steps that the last incident has lost, if the job has ended with the incident.

        Otherwise the steps were trained again, and the newest step counts.
        """
        if not incidents or self._state != "down":
            return 0
        last = incidents[-1]
        return 0 if last.phases.first_step is not None else last.steps_lost or 0


def _number(text: str) -> float:
    """Return the seconds in a text; 0 without a number."""
    with contextlib.suppress(ValueError):
        seconds = float(text)
        return seconds if math.isfinite(seconds) and seconds > 0.0 else 0.0
    return 0.0

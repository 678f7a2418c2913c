"""The file of an incident, which is written again when more is known: what was done, and how the job went on.

It is made in the thread that writes it, behind the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from adaptor.launchers.records.incident_record import seconds_between
from adaptor.operations import notices, records
from adaptor.operations.records import Incident


class GoneOn(NamedTuple):
    """The times at which a job went on after an incident, in Unix seconds.

    Attributes:
        ended: when the verdict was given
        started: when the last worker had been started again; 0.0 where all but failed ones lived on
        trained: when the last rank began to train
        finished: when the first step was finished
        origin: the step from which it went on
    """

    ended: float
    started: float
    trained: float
    finished: float
    origin: int


def with_going_on(incident: Incident, gone_on: GoneOn) -> Incident:
    """Return the file of `incident` with how the job went on."""
    is_repeated = bool(gone_on.started)
    phases = msgspec.structs.replace(
        incident.phases,
        restart=seconds_between(gone_on.ended, gone_on.started) if is_repeated else None,
        load=seconds_between(gone_on.started, gone_on.trained) if is_repeated else None,
        first_step=seconds_between(gone_on.trained, gone_on.finished),
    )
    lost = incident.steps_lost
    if incident.newest_step is not None:
        lost = max(0, incident.newest_step - gone_on.origin)
    return msgspec.structs.replace(incident, phases=phases, steps_lost=lost)


class IncidentFile:
    """A file that is written again when more is known; the thread that writes it makes it.

    Args:
        make: makes the file with the verdict.
        ended_at: when that was given, in Unix seconds.
        generation: in which the incident was.
        online: whether training went on in the same generation.

    Attributes:
        actions: what was done after its verdict
        gone_on: how the job went on, as soon as it has
    """

    def __init__(
        self, make: Callable[[], Incident], ended_at: float, generation: int, *, online: bool
    ) -> None:
        self._make = make
        self._made: Incident | None = None
        self._generation = generation
        self._online = online
        self.ended = ended_at
        self.actions: list[str] = []
        self.gone_on: GoneOn | None = None

    def is_over(self, generation: int) -> bool:
        """Return whether workers of `generation` train after the incident."""
        return self._online or generation > self._generation

    def notice(self, at: float, gone_on: GoneOn | None) -> records.Notice:
        """Return the notice of what is known; it is made in the threads of targets, and changes nothing here.

        Args:
            at: when that was, in Unix seconds.
            gone_on: how the job went on, if that was known then.
        """
        incident = self._make()
        if self.actions:
            incident.next_action = self.actions[-1]
        if gone_on is not None:
            incident = with_going_on(incident, gone_on)
        return notices.of_incident(incident, records.utc(at), "incident" if gone_on is None else "resumed")

    def again(self) -> Incident:
        """Return what the file has now."""
        if self._made is None:
            self._made = self._make()
        if self.actions:
            self._made.next_action = self.actions[-1]
        if self.gone_on is not None:
            self._made = with_going_on(self._made, self.gone_on)
        return self._made

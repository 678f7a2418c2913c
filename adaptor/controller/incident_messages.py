"""Passes messages to their incident; messages of other incidents are ignored."""

from __future__ import annotations

from adaptor.controller.incident import Incident
from adaptor.controller.outcome import Orders
from adaptor.protocol.messages import (
    Joined,
    PlacesFilled,
    Prepared,
    Present,
    Progress,
    Published,
    PublishFailed,
    RegroupFailed,
    Renamed,
    ToController,
    WriteFailed,
    Written,
)


def dispatch(incident: Incident, message: ToController, time_now: float) -> Orders:
    """Pass `message` to the part of `incident` that it is for; return what is ordered then.

    Messages of other incidents are ignored, and so are answers of agents that were not asked
    (`PublishTarget.is_from_asked_agent`).
    """
    match message:
        case Progress(node=node):
            incident.saving.on_progress(node, time_now)
        case (
            Prepared(incident=incident.number)
            | Published(incident=incident.number)
            | PublishFailed(incident=incident.number)
        ) if incident.target.is_from_asked_agent(message):
            return _on_folder_answer(incident, message)
        case Written(incident=incident.number):
            return incident.go_on(incident.saving.on_written(message, time_now))
        case WriteFailed(incident=incident.number):
            return incident.go_on(incident.saving.on_write_failed(message))
        case Joined(incident=incident.number):
            return incident.on_joined(message)
        case PlacesFilled(incident=incident.number):
            return incident.on_places_filled(message)
        case RegroupFailed(incident=incident.number):
            return incident.on_regroup_failed(message)
        case Present(rank=rank, incident=incident.number):
            incident.regrouping.presence.answer(rank)
        case Renamed(rank=rank, incident=incident.number, reason=reason):
            return incident.go_on(incident.saving.on_renamed(rank, reason))
    return []


def _on_folder_answer(incident: Incident, answer: Prepared | Published | PublishFailed) -> Orders:
    match answer:
        case Prepared(folder=folder, reason=reason, number=number):
            return incident.go_on(incident.saving.on_prepared(folder, reason, number))
        case Published(step=step):
            return incident.on_published(step)
        case PublishFailed(reason=reason, number=number):
            return incident.on_publish_failed(reason, number)

"""What is heard of an incident, and where it goes. What is of another incident is nothing to this one."""

from __future__ import annotations

from adaptor.control.incident import Incident
from adaptor.control.messages import (
    Frozen,
    Prepared,
    Progress,
    Published,
    PublishFailed,
    Renamed,
    ToController,
    WriteFailed,
    Written,
)
from adaptor.control.stages import Directive


def hear(incident: Incident, message: ToController, now: float) -> list[Directive]:
    """Tell `incident`; what it orders then."""
    match message:
        case Progress(node=node):
            incident.on_progress(node, now)
        case Frozen(rank=rank, incident=incident.number, board=board):
            return incident.on_frozen(rank, board)
        case Prepared(incident=incident.number, folder=folder, reason=reason, number=number):
            return incident.on_prepared(folder, reason, number)
        case Written(incident=incident.number):
            return incident.on_written(message, now)
        case WriteFailed(incident=incident.number):
            return incident.on_write_failed(message)
        case Renamed(rank=rank, incident=incident.number, reason=reason):
            return incident.on_renamed(rank, reason)
        case Published(incident=incident.number, step=step):
            return incident.on_published(step)
        case PublishFailed(incident=incident.number, reason=reason, number=number):
            return incident.on_publish_failed(reason, number)
    return []

"""The timeline of an incident, in the words of its file and of events.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from adaptor.protocol import records
from adaptor.protocol.messages import (
    Dump,
    EndScript,
    Exit,
    Find,
    Freeze,
    Frozen,
    Message,
    Prepare,
    Publish,
    Regroup,
    Rename,
    Replace,
)
from adaptor.protocol.records import Event

NOTICED = "fault-noticed"


class Happened(NamedTuple):
    """An event at `at` Unix seconds; None for fields that do not apply."""

    at: float
    what: str
    rank: int | None
    node: int | None
    detail: str
    step: int | None
    pid: int | None  # of the rank's process at that time


class Seen(msgspec.Struct, frozen=True, gc=False):
    """An order to one of many ranks, or the answer, at `at` Unix seconds; `happened` formats it."""

    at: float
    node: int
    rank: int
    message: Message
    pid: int | None


ORDERS: dict[type, str] = {
    Freeze: "freeze",
    Replace: "replace",
    Regroup: "regroup-ordered",
    Dump: "dump-ordered",
    Prepare: "prepare",
    Publish: "publish-ordered",
    Find: "find-ordered",
    Rename: "rename-ordered",
    EndScript: "end-ordered",
    Exit: "exit",
}


def happened(event: Happened | Seen) -> Happened:
    """Return `event` in words."""
    if isinstance(event, Happened):
        return event
    if isinstance(event.message, Frozen):
        board = event.message.board
        return Happened(
            event.at,
            "frozen",
            event.rank,
            event.node,
            f"{board.phase_name} after step {board.finished}",
            None,
            event.pid,
        )
    step = getattr(event.message, "step", None)
    return Happened(event.at, ORDERS[type(event.message)], event.rank, event.node, "", step, event.pid)


@dataclass
class Timeline:
    """The events of an incident, and facts about the job.

    Attributes:
        silent_s: for a hang: the seconds without progress
        checkpoint: the published folder, and `size` of its files in bytes; None without a checkpoint
        nodes: the node of each rank that has said hello; `hosts` of nodes
        newest: the newest finished step of the generation; -1: none
        again: returns the first step of another start; None if unknown. The disk may take seconds
        unprotected: whether a rank has trained steps that could not be saved
    """

    job: str
    generation: int
    happened: Sequence[Happened | Seen]
    silent_s: float = 0.0
    checkpoint: str | None = None
    size: int | None = None
    nodes: Mapping[int, int] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    newest: int = -1
    again: Callable[[], int | None] = lambda: None
    unprotected: bool = False

    def event(
        self, happened_event: Happened, incident: int | None, further_data: Mapping[str, str] | None = None
    ) -> Event:
        """Return the record of a line of events.jsonl.

        Args:
            happened_event: the event.
            incident: the number of the open incident; None between incidents.
            further_data: added to the detail.
        """
        node = (
            happened_event.node
            if happened_event.node is not None or happened_event.rank is None
            else self.nodes.get(happened_event.rank)
        )
        return Event(
            time=records.utc(happened_event.at),
            job=self.job,
            generation=self.generation,
            incident=incident,
            type=happened_event.what,
            node=node,
            host=self.hosts.get(node) if node is not None else None,
            rank=happened_event.rank,
            pid=happened_event.pid,
            step=happened_event.step,
            data={
                **({"detail": happened_event.detail} if happened_event.detail else {}),
                **(further_data or {}),
            },
        )

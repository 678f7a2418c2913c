"""The timeline of an incident, in the words of its file and of events.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from adaptor.operations import records
from adaptor.operations.records import Event
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

NOTICED = "fault-noticed"


class Happened(NamedTuple):
    """Something that happened, `at` Unix seconds; None where rank, node, step or pid do not apply."""

    at: float
    what: str
    rank: int | None
    node: int | None
    detail: str
    step: int | None
    pid: int | None  # of the process that the rank had then


class Seen(msgspec.Struct, frozen=True, gc=False):
    """An order to one of many ranks, or its answer, at `at` Unix seconds; `happened` has the words."""

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


def happened(one: Happened | Seen) -> Happened:
    """Return `one` in words."""
    if isinstance(one, Happened):
        return one
    if isinstance(one.message, Frozen):
        board = one.message.board
        return Happened(
            one.at,
            "frozen",
            one.rank,
            one.node,
            f"{board.phase_name} after step {board.finished}",
            None,
            one.pid,
        )
    step = getattr(one.message, "step", None)
    return Happened(one.at, ORDERS[type(one.message)], one.rank, one.node, "", step, one.pid)


@dataclass
class Timeline:
    """The events of an incident, and what is known of the job that it happened in.

    Attributes:
        silent_s: for a hang: how long nothing had moved
        checkpoint: the folder that was published, and `size` of its files in bytes; None where none was
        nodes: the node of each rank that has said hello; `hosts` of nodes
        newest: the newest step that was seen finished in this generation; -1: none
        again: returns the step from which another start would train; None where nobody can tell. Its disk may
            take seconds for it
        unprotected: whether a rank has trained what nobody could save
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

    def event(self, one: Happened, incident: int | None, more: Mapping[str, str] | None = None) -> Event:
        """Return the record of a line of events.jsonl.

        Args:
            one: what happened.
            incident: the number of the incident that was open; None between incidents.
            more: what its data has besides the detail.
        """
        node = one.node if one.node is not None or one.rank is None else self.nodes.get(one.rank)
        return Event(
            time=records.utc(one.at),
            job=self.job,
            generation=self.generation,
            incident=incident,
            type=one.what,
            node=node,
            host=self.hosts.get(node) if node is not None else None,
            rank=one.rank,
            pid=one.pid,
            step=one.step,
            data={**({"detail": one.detail} if one.detail else {}), **(more or {})},
        )

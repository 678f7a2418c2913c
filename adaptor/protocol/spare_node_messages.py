"""The messages between node 0 and a spare node (`--ttp-spare`), or another node of the job.

All come after the proof of the job's secret.
"""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages import Message
from adaptor.protocol.spare_messages import Import
from adaptor.protocol.wire import Decoder


class SpareHello(Message, frozen=True):
    """spare -> node 0: its first message.

    Attributes:
        facts: what must be the same on every node: names as a user knows them, and values
        arguments: of the script
        host, pid: the machine and the process of its `ttprun`
    """

    facts: dict[str, str]
    arguments: tuple[str, ...]
    host: str
    pid: int


class MemberHello(Message, frozen=True):
    """node of the job -> node 0: all that it says; its connection ends with its `ttprun`.

    Where only the connection has ended, that comes again, and says the same.

    Attributes:
        node: its number
        ranks: of its workers
        host, pid: the machine and the process of its `ttprun`
        owner: of its place, as in `TakePlace`; '': it has that from the beginning
    """

    node: int
    ranks: tuple[int, ...]
    host: str
    pid: int
    owner: str = ""


class SpareAccepted(Message, frozen=True):
    """node 0 -> spare: wait here."""


class SpareRefused(Message, frozen=True):
    """node 0 -> spare: it cannot stand in for a node, because of `reason`."""

    reason: str


class SpareAsked(Message, frozen=True):
    """node 0 -> spare: a node is lost; are you there?"""


class SpareReady(Message, frozen=True):
    """spare -> node 0: the answer to `SpareAsked`."""


class TakePlace(Message, frozen=True):
    """node 0 -> spare: become a node of the job.

    Attributes:
        node: whose place it takes
        restarts: how many the job has used, with one that begins now
        generations: how many times workers were started before those that this node has to do with first
        owner: a random name, by which the place is the spare's from now on
        incident: the one in which its workers join those that train; 0: all workers are started again
    """

    node: int
    restarts: int
    generations: int
    owner: str
    incident: int = 0


class SpareImports(Message, frozen=True):
    """node 0 -> spare: what processes import that may become workers in the place of lost ones."""

    what: Import


class SpareReleased(Message, frozen=True):
    """node 0 -> spare: the job is over."""


FromSpareNode = SpareHello | SpareReady | MemberHello
ToSpareNode = SpareAccepted | SpareRefused | SpareAsked | SpareImports | TakePlace | SpareReleased

from_spare_node: Decoder[FromSpareNode] = Decoder(msgspec.msgpack.Decoder(FromSpareNode))
to_spare_node: Decoder[ToSpareNode] = Decoder(msgspec.msgpack.Decoder(ToSpareNode))

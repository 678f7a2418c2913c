"""The messages between an agent and its spares, over a unix socket that is the spare's stdin."""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages import ChangedVariable, Message
from adaptor.protocol.wire import Decoder


class Import(Message, frozen=True):
    """agent -> spare: import what the workers have.

    Attributes:
        path: their `sys.path`
        origins: what they have imported, in that order: names, and the files
        names: the functions and classes of these at the end of their imports (`imported_names.codes_of`)
        variables: environment variables that a worker has changed
        of_a_rank: environment variables that are another one's for each rank: none may be read meanwhile
        environment: variables of all workers that this process does not have yet
        is_alone: nobody trains on this machine, so there is nobody to leave the processors to
        stop_before: the first module that is not to be imported; empty: import all
    """

    path: tuple[str, ...]
    origins: dict[str, str]
    names: dict[str, bytes]
    variables: dict[str, ChangedVariable]
    of_a_rank: tuple[str, ...]
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    is_alone: bool = False
    stop_before: str = ""


class Ready(Message, frozen=True):
    """spare -> agent: this process can become a worker, unless `unfit` says why it cannot.

    Attributes:
        unfit: why an imported module differs from a worker's; empty: none does
        stop_before: the module whose import has made this process unfit. The spare starts again, and reads
            another `Import`. Empty: nothing that this process leaves out would help.
    """

    unfit: str = ""
    stop_before: str = ""


class Become(Message, frozen=True):
    """agent -> spare: be a worker, with this environment and the three streams that follow."""

    environment: dict[str, str]


to_spare: Decoder[Import | Become] = Decoder(msgspec.msgpack.Decoder(Import | Become))
from_spare: Decoder[Ready] = Decoder(msgspec.msgpack.Decoder(Ready))


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

"""The messages of spare processes and spare nodes.

An agent and its spares talk over a unix socket, the spare's stdin: `Import`, `Become`, `Ready`, `Forked`.
Node 0 talks with spare nodes (`--ttp-spare`) and with other nodes of the job after the proof of the job's
secret: all other messages.
"""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages import ChangedVariable, Endpoint, Message
from adaptor.protocol.wire import Decoder


class Import(Message, frozen=True):
    """agent -> spare: import the modules of the workers.

    Attributes:
        path: their `sys.path`
        origins: their imported modules, in the order of import: names, and the files
        names: the functions and classes of the modules at the end of their imports
            (`script_imports.codes_of`)
        variables: environment variables that a worker has changed
        of_a_rank: environment variables that differ between ranks: none may be read meanwhile
        environment: variables of all workers that the spare process does not have yet
        is_alone: no rank trains on the machine, so all processors may be used
        stop_before: the first module that is not to be imported; "": import all
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
    """spare -> agent: the process can become a worker, unless `unfit` says why not.

    Attributes:
        unfit: why an imported module differs from a worker's; "": no difference
        stop_before: the module whose import has made the process unfit. The spare starts again, and reads
            another `Import`. "": leaving a module out would not help.
        no_forks: why a fork of the process cannot be a worker; "": forks can
    """

    unfit: str = ""
    stop_before: str = ""
    no_forks: str = ""


class Become(Message, frozen=True):
    """agent -> spare: be a worker, with this environment and the three streams that follow.

    Attributes:
        fork: a fork of the process becomes the worker, and the process waits on. The streams follow the
            answer `Forked`.
    """

    environment: dict[str, str]
    fork: bool = False


class Forked(Message, frozen=True):
    """spare -> agent: the answer to `Become` with `fork`.

    Attributes:
        pid: of the fork, a child of the agent; 0: there is no fork
        reason: why there is no fork
    """

    pid: int
    reason: str = ""


to_spare: Decoder[Import | Become] = Decoder(msgspec.msgpack.Decoder(Import | Become))
from_spare: Decoder[Ready | Forked] = Decoder(msgspec.msgpack.Decoder(Ready | Forked))


class SpareHello(Message, frozen=True):
    """spare -> node 0: the first message.

    Attributes:
        facts: values that must be equal on every node, by the names that a user knows
        arguments: of the script
    """

    facts: dict[str, str]
    arguments: tuple[str, ...]
    host: str
    pid: int


class Gate(msgspec.Struct, frozen=True):
    """The gate of a node, or its controller: the node's address, and the invitation."""

    address: str
    invitation: str


class MemberHello(Message, frozen=True):
    """node of the job -> node 0: the only message; its connection ends with its `ttprun`.

    If only the connection has ended, the message is repeated.

    Attributes:
        host, pid: the machine and the process of its `ttprun`
        owner: of its place, as in `TakePlace`; "": the place is its own from the beginning
        gate: its own gate, to which spares go if node 0 is lost; None: it has none
    """

    node: int
    ranks: tuple[int, ...]
    host: str
    pid: int
    owner: str = ""
    gate: Gate | None = None


class SpareAccepted(Message, frozen=True):
    """node 0 -> spare: wait here."""


class SpareRefused(Message, frozen=True):
    """node 0 -> spare: refusal to stand in for a node, because of `reason`."""

    reason: str


class SpareAsked(Message, frozen=True):
    """node 0 -> spare: a node is lost; answer if you run."""


class SpareReady(Message, frozen=True):
    """spare -> node 0: the answer to `SpareAsked`."""


class TakePlace(Message, frozen=True):
    """node 0 -> spare: become a node of the job.

    Attributes:
        node: the number of the place
        restarts: the number of used restarts, a beginning restart included
        generations: the number of starts of the workers before the first start with this node
        owner: a random name, by which the place is the spare's from now on
        incident: the incident in which its workers join the training; 0: all workers are started again
        store: the rendezvous store, if the job has lost the store of its first node 0
        controller: the controller of the training workers, and its address; None: all workers are started
        term: of that controller
    """

    node: int
    restarts: int
    generations: int
    owner: str
    incident: int = 0
    store: Endpoint | None = None
    controller: Gate | None = None
    term: int = 0


class NextGates(Message, frozen=True):
    """node 0 -> spare: the gates to go to, one after the other, if node 0 is lost."""

    gates: tuple[Gate, ...]


class SpareImports(Message, frozen=True):
    """node 0 -> spare: the imports of processes that may become workers in the place of lost workers."""

    what: Import


class SpareReleased(Message, frozen=True):
    """node 0 -> spare: the job is over.

    Attributes:
        failed: the job was not trained to its end, and may be started again.
        meets: the job is not over. All workers start again, and the spare meets the other nodes.
    """

    failed: bool = False
    meets: bool = False


FromSpareNode = SpareHello | SpareReady | MemberHello
ToSpareNode = SpareAccepted | SpareRefused | SpareAsked | SpareImports | NextGates | TakePlace | SpareReleased

from_spare_node: Decoder[FromSpareNode] = Decoder(msgspec.msgpack.Decoder(FromSpareNode))
to_spare_node: Decoder[ToSpareNode] = Decoder(msgspec.msgpack.Decoder(ToSpareNode))

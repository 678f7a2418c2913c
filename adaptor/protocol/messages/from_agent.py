"""The messages of an agent to the controller."""

from __future__ import annotations

from typing import NamedTuple

from adaptor.protocol.messages.from_worker import FromWorker
from adaptor.protocol.messages.parts import BoardRecord, Endpoint, Message, Number, Status, Verdict


class AgentHello(Message, frozen=True):
    """The first message of an agent; `endpoint`: its address as a possible controller.

    Attributes:
        pid: its process there; 0 if unknown
        owner: of a spare node that takes the place of a lost node while others train: as in `PlacesFilled`
        store: the rendezvous store of a spare node in the place of node 0; None: the store stays
    """

    node: Number
    ranks: tuple[Number, ...]
    endpoint: Endpoint | None = None
    host: str = ""
    pid: int = 0
    owner: str = ""
    store: Endpoint | None = None


class Died(Message, frozen=True):
    """A worker process ended with `status` (negative: the signal), seen `at` (Unix seconds).

    `why`: a phrase if the kernel has ended the process for want of memory; else "".
    """

    rank: Number
    status: Status
    at: float
    board: BoardRecord
    why: str = ""


class Dying(Message, frozen=True):
    """A worker's main thread is gone, seen `at`; `Died` with the exit status follows.

    Both come after all messages of the worker.
    """

    rank: Number
    at: float
    board: BoardRecord


class AgentTerminationRequested(Message, frozen=True):
    """A request to end the agent of `node` (`signal`), or its own failure (`error`): save first."""

    node: Number
    signal: str
    error: str = ""


class NodesWaiting(Message, frozen=True):
    """The number of further nodes that wait to join the job; sent by the agent of node 0 only."""

    node: Number
    count: Number


class NodeStalled(Message, frozen=True):
    """The report that no worker of the node has moved for `seconds`, which is too long for a step.

    Attributes:
        inside: the first step that a worker is in the middle of, or does not reach because a phase between
            two steps lasts too long; -1: none
        between: the lowest finished step of a worker that may take its time between two steps; -1: none
        overlong: whether the stall lasts so long that no rank may be waited for any more
    """

    node: Number
    seconds: float
    inside: int
    between: int
    overlong: bool = False


class NodeResumed(Message, frozen=True):
    """`NodeStalled` is over."""

    node: Number


class AgentLost(Message, frozen=True):
    """The loss of the connection to an agent, and of its workers; made by the host, never by an agent."""

    node: Number


class Progress(Message, frozen=True):
    """The progress counters of the node's workers, only while an incident is open."""

    node: Number
    total: int


class ComputeTime(NamedTuple):
    """The usual seconds of the forward and backward passes of a rank, in a step and for a token.

    `of_token`: 0 if the number of tokens is unknown.
    """

    of_step: float
    of_token: float = 0.0


class ComputeTimes(Message, frozen=True):
    """The compute time of each rank of the node."""

    node: Number
    times: dict[Number, ComputeTime]


class Starting(Message, frozen=True):
    """The main thread of a new process of `rank` has used CPU time: it imports, or builds the model.

    `ticks`: of the kernel, since the start of the process.
    """

    rank: Number
    ticks: Number


class Prepared(Message, frozen=True):
    """The temporary folder `number` is ready; an empty `reason` means success."""

    node: Number
    incident: int
    folder: str
    reason: str
    number: int = 0


class Published(Message, frozen=True):
    """The checkpoint is under its final name and the tracker names its step; `path` is its folder.

    `step` is later than ordered if the other side of a cut network has saved a later step; `number` is the
    number of the order.
    """

    node: Number
    incident: int
    step: int
    path: str
    number: int = 0


class PublishFailed(Message, frozen=True):
    """The checkpoint could not be published, or found; `number` is the number of the order."""

    node: Number
    incident: int
    reason: str
    number: int = 0


class PlacesFilled(Message, frozen=True):
    """The answer of node 0 to `FillPlaces`: the agents of spare nodes come next, or `reason` says why not.

    Attributes:
        owners: a random name for each node, which the new agent has in its hello; empty without a spare node
            for each
    """

    node: Number
    incident: int
    nodes: tuple[Number, ...]
    owners: dict[Number, str]
    reason: str = ""


class ReplayComplete(Message, frozen=True):
    """The agent of `node` has repeated to a new controller all its reports to the lost controller.

    `verdict`: the verdict that the agent had received, which stands. `has_acted`: the lost controller had
    given orders on this node that change more than a closed door: a save, a replacement, a recovery.
    """

    node: Number
    verdict: Verdict | None = None
    has_acted: bool = False


FromAgent = (
    FromWorker
    | AgentHello
    | AgentTerminationRequested
    | NodesWaiting
    | NodeStalled
    | NodeResumed
    | Dying
    | Died
    | Progress
    | ComputeTimes
    | Starting
    | Prepared
    | Published
    | PublishFailed
    | PlacesFilled
    | ReplayComplete
)
ToController = FromAgent | AgentLost

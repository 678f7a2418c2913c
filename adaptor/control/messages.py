"""What workers, agents and the controller say to each other.

All messages are msgspec structs, encoded as msgpack with a tag; nothing is ever unpickled. A worker speaks to
its own agent only; the agent passes on what the controller must know (`FromWorker`) and brings back what the
controller orders (`ToWorker`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from adaptor.checkpoint.manifest import FileEntry


class Phase(IntEnum):
    """Where a rank stands in its step; `finished` on its board is the newest step it has completed."""

    STARTING = 0  # no training state is known yet: nothing can be saved from this rank
    RUNNING = 1  # between two updates: forward, backward, reduction, or outside of a step
    READY = 2  # at the door: gradients reduced and clipped; the update needs nobody else
    UPDATING = 3  # inside the update window
    BROKEN = 4  # an exception left the update window: part of the live state is old, part is new
    ENDED = 5  # the script is at its end: that this process ends is no fault
    UNREADABLE = 6  # its device has failed, or does not answer: nothing can be read from it


# No job has as many ranks, nodes or shards; who says so would have the controller count for hours.
_MANY = 1 << 20
# The bounds are those of what comes over a connection, where a message outside of them is refused.
Number = Annotated[int, msgspec.Meta(ge=0, lt=_MANY)]
Count = Annotated[int, msgspec.Meta(ge=1, le=_MANY)]
# What the kernel says of a process that has ended: its code, or minus the signal.
Status = Annotated[int, msgspec.Meta(ge=-128, le=255)]
PhaseNumber = Annotated[int, msgspec.Meta(ge=0, le=int(max(Phase)))]


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all messages.

    A message is a frozen tree, through which no cycle goes. So the garbage collector has nothing to look for
    in them: a controller of 100,000 ranks would else spend half of each decision on walking through them.
    """


class BoardRecord(Message, frozen=True):
    """One reading of a rank's board.

    `inside` is the step that it is in, -1 between steps (evaluation, saves); `slowest` how many seconds the
    longest of its recent steps took, 0 before there were enough of them.

    `oldest` to `finished` are the steps whose state this rank has: none while an update changes it, more than
    one where steps were skipped (no update) since the last one. With a local copy those from before the last
    update, or the one that it is in, are among them. `ahead` is the step of the update that it is READY for
    or in.
    """

    rank: int
    pid: int = 0
    phase: PhaseNumber = Phase.STARTING
    oldest: int = -1
    finished: int = -1
    ahead: int = -1
    progress: int = 0
    grad_norm: float = 0.0
    error: str = ""
    inside: int = -1
    slowest: float = 0.0

    @property
    def phase_name(self) -> str:
        return Phase(self.phase).name

    def provides(self, step: int) -> bool:
        """Whether this rank can give the state of `step`; READY counts for the step behind the door, too."""
        if self.phase in (Phase.STARTING, Phase.ENDED, Phase.UNREADABLE):
            return False
        if self.oldest <= step <= self.finished:
            return True
        return self.phase in (Phase.READY, Phase.UPDATING) and step == self.ahead


class Share(msgspec.Struct, frozen=True, gc=False):
    """This rank holds shard `index` of `count` of the optimizer state of `group`.

    `foreign`: it can give the shard, but not write the group's files (it has other experts).
    """

    group: str
    index: Number
    count: Count
    foreign: bool = False


# Bytes of a call in `Standing.way`.
CALL = 4


class Standing(msgspec.Struct, frozen=True, gc=False):
    """Where a main thread stands: whether it `waits` for other ranks, and the innermost calls.

    `way`: a checksum of `CALL` bytes for each call, the outermost first.
    """

    waits: bool
    where: str
    way: bytes = b""


# worker -> agent


class Hello(Message, frozen=True):
    """First message of a worker."""

    rank: Number
    pid: int


class Layout(Message, frozen=True):
    """What this rank holds, where checkpoints go, and the step that the job started from.

    `save`: empty where handlers of the script write checkpoints, and name them (`adaptor.mindio`).
    `goes_back`: it keeps a local copy of the state before an update (TTP_LOCAL_COPY).
    """

    rank: Number
    shares: tuple[Share, ...]
    save: str
    origin: int
    fingerprint: str
    goes_back: bool = False


class Refused(Message, frozen=True):
    """This rank will not train; the reason is one line for the user."""

    rank: Number
    reason: str


class Raised(Message, frozen=True):
    """An exception left the training script of this rank; its state is intact."""

    rank: Number
    error: str
    exit_code: int


class Told(Message, frozen=True):
    """Somebody wants this process to end (`signal`: SIGTERM); its state is intact."""

    rank: Number
    signal: str


class Looked(Message, frozen=True):
    """The answer to `Look`: whether a debugger or a compiler has the main thread, which then may take its
    time."""

    rank: Number
    takes_its_time: bool


class Frozen(Message, frozen=True):
    """The door is closed and no update is in flight; `standing`: where the main thread was, if asked for."""

    rank: Number
    incident: int
    board: BoardRecord
    standing: Standing | None = None


class Written(Message, frozen=True):
    """The files of a group are on disk under their temporary folder; `not_finite`: what in them is not."""

    rank: Number
    incident: int
    attempt: int
    group: str
    files: tuple[FileEntry, ...]
    not_finite: str = ""


class WriteFailed(Message, frozen=True):
    """This rank could not do its part for a group, or would not: what `doubted` ranks gave is not finite.

    `board`: where it stands after that; an exception may have left the update that it was let through to.
    """

    rank: Number
    incident: int
    attempt: int
    group: str
    reason: str
    board: BoardRecord
    doubted: tuple[int, ...] = ()


class Renamed(Message, frozen=True):
    """The script's handler has given the checkpoint its name; an empty `reason` means success."""

    rank: Number
    incident: int
    reason: str


class Noted(Message, frozen=True):
    """Something for the timeline of the incident."""

    rank: Number
    incident: int
    at: float
    what: str
    detail: str = ""


# agent -> controller


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where somebody listens."""

    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class AgentHello(Message, frozen=True):
    """An agent and the ranks of its workers; `gate`: where it would be found as the controller's."""

    node: Number
    ranks: tuple[Number, ...]
    gate: Place | None = None


class Died(Message, frozen=True):
    """A worker process ended with `status` (negative: the signal), seen `at` (Unix seconds)."""

    rank: Number
    status: Status
    at: float
    board: BoardRecord


class Dying(Message, frozen=True):
    """A worker's main thread is gone, seen `at`; how the process ended is told by `Died`, which follows."""

    rank: Number
    at: float
    board: BoardRecord


class Leave(Message, frozen=True):
    """Somebody wants the agent of `node` to end (`signal`): save first."""

    node: Number
    signal: str


class Still(Message, frozen=True):
    """No worker of this node has moved for `seconds`, too long for a step.

    inside   the first step that one of them is in the middle of; -1: no one is
    between  the least that one which is between two steps has finished; -1: no one is
    """

    node: Number
    seconds: float
    inside: int
    between: int


class Moving(Message, frozen=True):
    """`Still` is over."""

    node: Number


class Beat(Message, frozen=True):
    """Nothing; that it does not arrive tells of a connection on which nothing arrives (`wire`)."""


class AgentLost(Message, frozen=True):
    """The connection to an agent is gone, and its workers with it; no agent can say it of another."""

    node: Number


class Progress(Message, frozen=True):
    """The progress counters of this node's workers, only while an incident is open."""

    node: Number
    total: int


class Published(Message, frozen=True):
    """The checkpoint is under its final name and the tracker names it; `path` is its folder.

    `step` is a later one than was ordered where the other side of a cut network has saved that.
    """

    incident: int
    step: int
    path: str


class PublishFailed(Message, frozen=True):
    """The checkpoint could not be published, or found; `number` is that of the order."""

    incident: int
    reason: str
    number: int = 0


# agent -> worker


class Look(Message, frozen=True):
    """Nothing has moved for too long: is that a hang? The answer is `Looked`; both stay on the node."""


# controller -> worker (by way of its agent)


class Freeze(Message, frozen=True):
    """Close the door, wait for an update in flight, answer `Frozen`.

    `stacks`: the job hangs; write down where every thread is, and tell where the main thread stands.
    """

    incident: int
    stacks: bool = False


class GroupOrder(msgspec.Struct, frozen=True, gc=False):
    """Who gives which shard of a group, and who writes; `holders[i]` is the rank that gives shard i."""

    group: str
    holders: tuple[int, ...]
    writer: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """All who take part, in order."""
        return tuple(sorted({*self.holders, self.writer}))


class Dump(Message, frozen=True):
    """Bring this rank to `step` and do its part for each group.

    `as_is`: groups that are written whether finite or not.
    """

    incident: int
    attempt: int
    step: int
    folder: str
    groups: tuple[GroupOrder, ...]
    store_host: str
    store_port: int
    timeout_s: float
    as_is: tuple[str, ...] = ()


class Rename(Message, frozen=True):
    """All of `step` is written: let the script's handler give it its name; the answer is `Renamed`."""

    incident: int
    step: int


class Exit(Message, frozen=True):
    """The incident is over: end this process."""

    incident: int


# controller -> agent


class Prepare(Message, frozen=True):
    """Make a clean temporary folder for `step`; the answer is `Prepared`.

    `term`: of the controller; `number`: of the folder. An agent that takes the place of another makes a new
    one: the other may still be at work, on a disk that hangs.
    """

    incident: int
    save: str
    step: int
    term: int = 0
    number: int = 0


class Prepared(Message, frozen=True):
    """The temporary folder `number` is there; an empty `reason` means success."""

    incident: int
    folder: str
    reason: str
    number: int = 0


class Publish(Message, frozen=True):
    """Check, name and announce the checkpoint of `step`; `term` and `number` are those of its folder.

    `written`: the number under which it was written. Who publishes in the place of another, which may still
    be at work, takes the folder first: gives it `number`, so that the other finds nothing any more.
    """

    incident: int
    save: str
    step: int
    files: tuple[FileEntry, ...]
    writers: dict[str, tuple[int, ...]]
    world_size: int
    term: int = 0
    number: int = 0
    written: int = 0


class Find(Message, frozen=True):
    """A controller that is lost may have had last words saved: let the tracker name the newest checkpoint.

    Where it is the framework's own save, only `step` counts, or a later one. The answer is `Published`, or
    `PublishFailed` where there is none of this generation.
    """

    incident: int
    save: str
    step: int
    number: int = 0


class Verdict(Message, frozen=True):
    """How the incident ended.

    `outcome` is saved, nothing or lost; `leaves`: nodes that leave the job; `lost`: the agent of one is gone.
    """

    incident: int
    outcome: str
    step: int
    line: str
    cause_rank: int
    exit_code: int
    save: str
    leaves: tuple[int, ...] = ()
    lost: bool = False


class Dismissed(Message, frozen=True):
    """Every rank has come to its end, or the controller's node leaves: what fails now cannot be saved."""


class Recalled(Message, frozen=True):
    """The agent of `node` has told a new controller again all that it had told the one that is lost.

    `verdict`: the one that it had been given, which stands.
    """

    node: Number
    verdict: Verdict | None = None


FromWorker = (
    Hello | Layout | Refused | Raised | Told | Looked | Frozen | Written | WriteFailed | Renamed | Noted
)
ToWorker = Look | Freeze | Dump | Rename | Exit
FromAgent = (
    FromWorker
    | AgentHello
    | Leave
    | Still
    | Moving
    | Dying
    | Died
    | Progress
    | Prepared
    | Published
    | PublishFailed
    | Recalled
    | Beat
)
ToController = FromAgent | AgentLost
# What the controller passes on to those that may have to take its place.
Legacy = AgentHello | Layout
ToAgent = Prepare | Publish | Find | Verdict | Dismissed | Legacy | Beat


class Addressed(Message, frozen=True):
    """An order on its way to one worker."""

    rank: int
    message: ToWorker


ControllerToAgent = Addressed | ToAgent

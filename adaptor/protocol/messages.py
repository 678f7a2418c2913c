"""The messages of workers, agents and the controller.

All messages are msgspec structs, encoded as msgpack with a tag; nothing is ever unpickled. A worker speaks to
its own agent only; the agent passes on what the controller must know (`FromWorker`) and brings back what the
controller orders (`ToWorker`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from adaptor.protocol.file_entry import FileEntry


class Phase(IntEnum):
    """The phase of a rank in its step; `finished` on its board is the newest step it has completed."""

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
# The status of a process that has ended: its exit code, or minus the signal.
Status = Annotated[int, msgspec.Meta(ge=-128, le=255)]
PhaseNumber = Annotated[int, msgspec.Meta(ge=0, le=int(max(Phase)))]


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all messages.

    A message is a frozen tree, through which no cycle goes. So the garbage collector has nothing to look for
    in them: a controller of 100,000 ranks would else spend half of each decision on walking through them.
    """


class BoardRecord(Message, frozen=True):
    """A reading of a rank's board.

    `inside` is the step that the rank is in, -1 between steps (evaluation, saves). `slowest`: seconds of the
    slowest of its recent steps, 0 before there were enough of them. `usual`: seconds that earlier phases
    of the kind that the loop is in (evaluation, a save) took at most; 0 for the first of its kind, -1 in no
    phase. `turns` counts the phases that have begun or ended.

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
    usual: float = -1.0
    turns: int = 0

    @property
    def phase_name(self) -> str:
        return Phase(self.phase).name

    def provides(self, step: int) -> bool:
        """Return True if this rank can give the state of `step`; a READY rank can also give the next one."""
        if self.phase in (Phase.STARTING, Phase.ENDED, Phase.UNREADABLE):
            return False
        if self.oldest <= step <= self.finished:
            return True
        return self.phase in (Phase.READY, Phase.UPDATING) and step == self.ahead


class Share(msgspec.Struct, frozen=True, gc=False):
    """The shard that a rank holds: number `index` of `count` of the optimizer state of `group`.

    `foreign`: it can give the shard, but not write the group's files (it has other experts).
    """

    group: str
    index: Number
    count: Count
    foreign: bool = False


# Bytes of a call in `Standing.way`.
CALL = 4


class Standing(msgspec.Struct, frozen=True, gc=False):
    """The position of a main thread: whether it `waits` for other ranks, and the innermost calls.

    `way`: a checksum of `CALL` bytes for each call, the outermost first.
    """

    waits: bool
    where: str
    way: bytes = b""


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The features by which an exception is known when it comes again.

    kind      its type
    where     file and line of the innermost call that is neither Python's, nor a package's, nor ours
    finished  the step that the rank had finished, -1 before training
    mistake   another start would fail alike (arguments, imports, a missing driver); the first start alone
    """

    kind: str = ""
    where: str = ""
    finished: int = -1
    mistake: bool = False


# worker -> agent


class Hello(Message, frozen=True):
    """First message of a worker."""

    rank: Number
    pid: int


class Layout(Message, frozen=True):
    """The shards that this rank holds, the folder of checkpoints, and the step that the job started from.

    `save`: empty where handlers of the script write checkpoints, and name them (`adaptor.mindio`).
    `has_local_copy`: it keeps a local copy of the state before an update (TTP_LOCAL_COPY).
    `online`: why this rank cannot take part in an online recovery, in a few words for the user; "off" where
    TTP_ONLINE is 0; empty where it can.
    """

    rank: Number
    shares: tuple[Share, ...]
    save: str
    origin: int
    fingerprint: str
    has_local_copy: bool = False
    online: str = "off"


class Refused(Message, frozen=True):
    """The refusal of a rank to train; `reason` is one line for the user."""

    rank: Number
    reason: str


class Raised(Message, frozen=True):
    """An exception left the training script of this rank; its state is intact.

    calls  its innermost calls, in lines: the process that could show them may be replaced
    """

    rank: Number
    error: str
    exit_code: int
    origin: Origin = Origin()
    calls: str = ""


class Unprotected(Message, frozen=True):
    """The script of this rank trains, and nothing of it can be saved; `why` is one line for the user."""

    rank: Number
    why: str


class TerminationRequested(Message, frozen=True):
    """A request to end this process (`signal`: SIGTERM); its state is intact."""

    rank: Number
    signal: str


class BusyReport(Message, frozen=True):
    """The answer to `BusyProbe`; `busy`: a debugger or a compiler has the main thread, so this is no hang."""

    rank: Number
    busy: bool


class Modules(Message, frozen=True):
    """The answer to `ModulesProbe`.

    path    `sys.path`
    origins by the name of each module that has been imported, in that order: its file, or what else it is
    """

    rank: Number
    path: tuple[str, ...]
    origins: dict[str, str]


class Frozen(Message, frozen=True):
    """The answer to `Freeze`: the door is closed and no update is in flight.

    `standing`: the position of the main thread, if it was asked for.
    """

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
    """The failure of a rank to do its part for a group; or the shards of `doubted` ranks are not finite.

    `board`: the rank's board after that; an exception may have left the update that it was let through to.
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


class Joined(Message, frozen=True):
    """The success of `Regroup`: this rank has new groups and the state of `step`, and waits for `Proceed`.

    `digest`: a checksum of what must be equal on all ranks of the job (groups and their ranks, the layout of
    parameters). What must be equal on two ranks that hold the same shard, they have compared by themselves.
    """

    rank: Number
    incident: int
    attempt: int
    step: int
    digest: str


class RegroupFailed(Message, frozen=True):
    """The failure of `Regroup` on this rank; its state is as it was when it answered `Frozen`.

    `hangs`: its main thread waits for what will not come any more, so another process may take its place.
    """

    rank: Number
    incident: int
    attempt: int
    reason: str
    hangs: bool = False


class Present(Message, frozen=True):
    """The thread that answers the agent runs: its process is neither stopped nor held up."""

    rank: Number
    incident: int


class TimelineEvent(Message, frozen=True):
    """An event for the timeline of the incident."""

    rank: Number
    incident: int
    at: float
    what: str
    detail: str = ""


# agent -> controller


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """The address of a listener; port 0: `address` is the name of an abstract unix socket of this machine."""

    address: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class AgentHello(Message, frozen=True):
    """The first message of an agent; `endpoint`: its address, should it take the controller over.

    host  the name of its machine
    pid   its process there; 0 where it is not known
    """

    node: Number
    ranks: tuple[Number, ...]
    endpoint: Endpoint | None = None
    host: str = ""
    pid: int = 0


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


class AgentTerminationRequested(Message, frozen=True):
    """A request to end the agent of `node` (`signal`), or its own failure (`error`): save first."""

    node: Number
    signal: str
    error: str = ""


class NodeStalled(Message, frozen=True):
    """The report that no worker of this node has moved for `seconds`, which is too long for a step.

    inside    the first step that a worker is in the middle of, or does not reach because a phase between two
              steps lasts too long; -1: there is none
    between   the lowest step that a worker which may take its time between two steps has finished; -1: there
              is none
    overlong  it lasts so long that no rank may be waited for any more
    """

    node: Number
    seconds: float
    inside: int
    between: int
    overlong: bool = False


class NodeResumed(Message, frozen=True):
    """`NodeStalled` is over."""

    node: Number


class Beat(Message, frozen=True):
    """A sign of life without content; if none arrives, the connection is silent (`wire`)."""


class AgentLost(Message, frozen=True):
    """The loss of the connection to an agent, and of its workers; made by the host, never by an agent."""

    node: Number


class Progress(Message, frozen=True):
    """The progress counters of this node's workers, only while an incident is open."""

    node: Number
    total: int


class Published(Message, frozen=True):
    """The checkpoint is under its final name and the tracker names it; `path` is its folder.

    `step` is a later one than was ordered where the other side of a cut network has saved that; `number` is
    that of the order.
    """

    node: Number
    incident: int
    step: int
    path: str
    number: int = 0


class PublishFailed(Message, frozen=True):
    """The checkpoint could not be published, or found; `number` is that of the order."""

    node: Number
    incident: int
    reason: str
    number: int = 0


# agent -> worker


class BusyProbe(Message, frozen=True):
    """The question if a debugger or compiler holds the main thread, before a hang is reported.

    The answer is `BusyReport`; both stay on the node.
    """


class ModulesProbe(Message, frozen=True):
    """The question what a spare has to import; the answer is `Modules`; both stay on the node."""


# controller -> worker (by way of its agent)


class PresenceProbe(Message, frozen=True):
    """The question if a worker is there, during an online recovery; the answer is `Present`."""

    incident: int


class Freeze(Message, frozen=True):
    """Close the door, wait for an update in flight, answer `Frozen`.

    `stacks`: the job hangs; write down where every thread is, and tell where the main thread stands.
    """

    incident: int
    stacks: bool = False


class GroupOrder(msgspec.Struct, frozen=True, gc=False):
    """The ranks that give the shards of a group, `holders[i]` shard i, and the one that writes."""

    group: str
    holders: tuple[int, ...]
    writer: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks that take part, in order."""
        return tuple(sorted({*self.holders, self.writer}))


class Dump(Message, frozen=True):
    """Bring this rank to `step` and do its part for each group.

    `as_is`: groups that are written whether finite or not. With `store_port` 0 `store_host` is the name of an
    abstract unix socket.
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
    store_secret: bytes = b""


class ShardSource(msgspec.Struct, frozen=True, gc=False):
    """Rank `source`, which lives, gives shard `index` of `group`."""

    group: str
    index: int
    source: int


class Replacement(msgspec.Struct, frozen=True, gc=False):
    """A rank whose process is a new one, and where its state comes from.

    twin     a survivor with the same part of the model: it gives the record of the step, and answers what the
             newcomer would have asked other ranks at its start
    sources  one for each shard that the rank holds
    """

    rank: int
    twin: int
    sources: tuple[ShardSource, ...]


class Regroup(Message, frozen=True):
    """Go back to the end of `step`, exchange the process groups, answer `Joined`, wait for `Proceed`.

    It goes to each survivor once all are frozen (who stands at the door makes the update first, if `step` is
    the one behind it), and to each newcomer after its `Hello`. Until `Proceed` a survivor's shards, copies
    and records stay as they are: a `Dump` of the same incident may come instead.

    `origin`: the step that the job was started from, which a newcomer says again in its `Layout`: `step` may
    be nowhere on disk.
    `replaced`: empty where all processes live (an exception). A larger `attempt` takes the place of a smaller
    one. The store is that of dumps; its keys are to begin with the incident and the attempt. With
    `store_port` 0 `store_host` is the name of an abstract unix socket. `timeout_s`: no part of it may take
    longer.
    """

    incident: int
    attempt: int
    step: int
    origin: int
    replaced: tuple[Replacement, ...]
    store_host: str
    store_port: int
    timeout_s: float
    store_secret: bytes = b""


class Proceed(Message, frozen=True):
    """Go on from `step`: all ranks have joined, and the incident is over."""

    incident: int
    step: int


class Rename(Message, frozen=True):
    """Let the script's handler name the checkpoint of `step`: all of it is written. Answer: `Renamed`."""

    incident: int
    step: int


class Exit(Message, frozen=True):
    """The incident is over: end this process.

    blamed  it has failed first, or raised first where no rank is to blame: it shows its traceback
    """

    incident: int
    blamed: bool = False


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

    node: Number
    incident: int
    folder: str
    reason: str
    number: int = 0


class Publish(Message, frozen=True):
    """Check, name and announce the checkpoint of `step`; `term` and `number` are those of its folder.

    `written`: the number under which it was written. An agent that publishes in the place of another, which
    may still be at work, first renames the folder to `number`, so that the other does not find it any more.
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


class Replace(Message, frozen=True):
    """Start a new process for `rank`; what it says begins with `Hello`.

    The process of before, if it lives, is ended, and its `Died` comes before that `Hello`. If the new process
    ends, that is one more `Died`. `cold`: not a spare, because the one before has failed.
    """

    incident: int
    attempt: int
    rank: int
    cold: bool = False


class Find(Message, frozen=True):
    """A controller that is lost may have had last words saved: let the tracker name the newest checkpoint.

    Where it is the framework's own save, only `step` counts, or a later one. The answer is `Published`, or
    `PublishFailed` where there is none of this generation.
    """

    incident: int
    save: str
    step: int
    number: int = 0


class Fault(msgspec.Struct, frozen=True, gc=False):
    """The first failure, for those who read of it and for those who compare it with the next one.

    key       its kind and place (`ValueError at train.py:12`), or the signal; empty where that says nothing
    finished  the step that the rank had finished, -1 before training; None where nobody knows
    ranks     those that have failed by themselves, the first one first
    pid       of the first rank, without a rank of the agent that was told to end; 0 where it is not known
    host      the machine of that process
    kind      signal, exit, exception, hang, told-to-end, node-lost or error (of ttprun itself); empty where
              it is not known
    status    of the process that failed first (negative: the signal)
    """

    key: str = ""
    finished: int | None = None
    ranks: tuple[int, ...] = ()
    pid: int = 0
    host: str = ""
    kind: str = ""
    status: int | None = None

    @property
    def when(self) -> str:
        """Return how far the rank had come, in words."""
        if self.finished is None:
            return ""
        return f"after step {self.finished}" if self.finished >= 0 else "before training"


class Verdict(Message, frozen=True, kw_only=True):
    """The end of an incident.

    `outcome` is saved, nothing or lost; `leaves`: nodes that leave the job; `lost`: the agent of one is gone;
    `newest`: the newest step that anyone had finished, -1 where none is known; `stop`: why the job is not
    started again, whatever restarts are left.
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
    fault: Fault = Fault()
    newest: int = -1
    stop: str = ""


class Recovered(Message, frozen=True):
    """The incident is over and all workers go on from `step`; it comes before the workers are told `Proceed`.

    line      for the user
    replaced  ranks with a new process
    retried   ranks that had raised, and whose processes live
    seconds   from the fault, as the controller heard of it, to this
    """

    incident: int
    step: int
    line: str
    fault: Fault = Fault()
    replaced: tuple[int, ...] = ()
    retried: tuple[int, ...] = ()
    seconds: float = 0.0


class Dismissed(Message, frozen=True):
    """The controller's last message: every rank has ended, or its node leaves; nothing is saved any more."""


class ReplayComplete(Message, frozen=True):
    """The agent of `node` has told a new controller again all that it had told the one that is lost.

    `verdict`: the one that it had been given, which stands.
    """

    node: Number
    verdict: Verdict | None = None


FromWorker = (
    Hello
    | Layout
    | Refused
    | Raised
    | Unprotected
    | TerminationRequested
    | BusyReport
    | Modules
    | Frozen
    | Written
    | WriteFailed
    | Renamed
    | Joined
    | RegroupFailed
    | Present
    | TimelineEvent
)
ToWorker = BusyProbe | ModulesProbe | PresenceProbe | Freeze | Dump | Rename | Regroup | Proceed | Exit
FromAgent = (
    FromWorker
    | AgentHello
    | AgentTerminationRequested
    | NodeStalled
    | NodeResumed
    | Dying
    | Died
    | Progress
    | Prepared
    | Published
    | PublishFailed
    | ReplayComplete
    | Beat
)
ToController = FromAgent | AgentLost
# The messages that the controller passes on to the nodes that stand by.
StandbyState = AgentHello | Layout
ToAgent = Prepare | Publish | Find | Replace | Recovered | Verdict | Dismissed | StandbyState | Beat


class Addressed(Message, frozen=True):
    """An order on its way to one worker."""

    rank: int
    message: ToWorker


ControllerToAgent = Addressed | ToAgent

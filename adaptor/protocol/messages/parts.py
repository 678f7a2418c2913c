"""The base of all messages, and parts of several of them: the state of a rank, its shards, an address."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec


class Phase(IntEnum):
    """The phase of a rank in its step; `finished` on its board is the newest step it has completed."""

    STARTING = 0  # no training state is known yet: nothing can be saved from this rank
    RUNNING = 1  # between two updates: forward, backward, reduction, or outside of a step
    READY = 2  # at the door: gradients reduced and clipped; the update needs nobody else
    UPDATING = 3  # inside the update window
    BROKEN = 4  # an exception left the update window: part of the live state is old, part is new
    ENDED = 5  # the script is at its end: that this process ends is no fault
    UNREADABLE = 6  # its device has failed, or does not answer: nothing can be read from it


class ScriptStage(IntEnum):
    """The stage of a rank's script; a rank in any stage still holds its training state."""

    TRAINING = 0  # the script trains, or does something before or between its steps
    TRAINED = 1  # its training loop is over; the script may still evaluate and save
    FINISHED = 2  # training, last evaluation and last save are done: a death costs nothing any more


# No job has as many ranks, nodes or shards; who says so would have the controller count for hours.
_MANY = 1 << 20
# The bounds are those of what comes over a connection, where a message outside of them is refused.
Number = Annotated[int, msgspec.Meta(ge=0, lt=_MANY)]
Count = Annotated[int, msgspec.Meta(ge=1, le=_MANY)]
# The status of a process that has ended: its exit code, or minus the signal.
Status = Annotated[int, msgspec.Meta(ge=-128, le=255)]
PhaseNumber = Annotated[int, msgspec.Meta(ge=0, le=int(max(Phase)))]
StageNumber = Annotated[int, msgspec.Meta(ge=0, le=int(max(ScriptStage)))]


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
    stage: StageNumber = ScriptStage.TRAINING

    @property
    def phase_name(self) -> str:
        """Return the name of the phase, for people."""
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

    `can_write`: it can write the group's files, too; a rank that has other experts can give the shard alone.
    """

    group: str
    index: Number
    count: Count
    can_write: bool = True


# Bytes of a call in `Standing.stack_hashes`.
CALL = 4


class Standing(msgspec.Struct, frozen=True, gc=False):
    """The position of a main thread: whether it `waits` for other ranks, and the innermost calls.

    `stack_hashes`: a checksum of `CALL` bytes for each call, the outermost first.
    """

    waits: bool
    where: str
    stack_hashes: bytes = b""


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The features by which an exception is known when it comes again.

    Attributes:
        kind: its type
        where: file and line of the innermost call that is neither Python's, nor a package's, nor ours
        finished: the step that the rank had finished, -1 before training
        mistake: another start would fail alike (arguments, imports, a missing driver); the first start alone
        lasting: it came before or behind training, from the code, its arguments or a checkpoint: not from the
            system, the network or another rank
    """

    kind: str = ""
    where: str = ""
    finished: int = -1
    mistake: bool = False
    lasting: bool = False


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """The address of a listener; port 0: `address` is the name of an abstract unix socket of this machine."""

    address: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


# The kind of an incident that nobody has failed in: all workers start again, on more nodes.
NODES_JOIN = "nodes-join"


class Fault(msgspec.Struct, frozen=True, gc=False):
    """The first failure, for those who read of it and for those who compare it with the next one.

    Attributes:
        key: its kind and place (`ValueError at train.py:12`), or the signal; empty where that says nothing
        finished: the step that the rank had finished, -1 before training; None where nobody knows
        ranks: those that have failed by themselves, the first one first
        pid: of the first rank, without a rank of the agent that was told to end; 0 where it is not known
        host: the machine of that process
        kind: signal, exit, exception, hang, told-to-end, node-lost, nodes-join or error (of ttprun itself);
            empty where it is not known
        status: of the process that failed first (negative: the signal)
        lasting: see `parts.Origin`; before training alone
        on_all_ranks: every rank has raised it, at the same place
    """

    key: str = ""
    finished: int | None = None
    ranks: tuple[int, ...] = ()
    pid: int = 0
    host: str = ""
    kind: str = ""
    status: int | None = None
    lasting: bool = False
    on_all_ranks: bool = False

    @property
    def when(self) -> str:
        """Return how far the rank had come, in words."""
        if self.finished is None:
            return ""
        return f"after step {self.finished}" if self.finished >= 0 else "before training"


class Verdict(Message, frozen=True, kw_only=True):
    """The end of an incident.

    `outcome` is saved, nothing or lost; `leaves`: nodes that leave the job; `lost`: those whose agents are
    gone; `newest`: the newest step that anyone had finished, -1 where none is known; `stop`: why the job is
    not started again, whatever restarts are left; `unprotected`: the job trained without protection, so
    nobody has counted its steps.
    """

    incident: int
    outcome: str
    step: int
    line: str
    cause_rank: int
    exit_code: int
    save: str
    leaves: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    fault: Fault = Fault()
    newest: int = -1
    stop: str = ""
    unprotected: bool = False

    @property
    def is_requested(self) -> bool:
        """Return whether nothing has failed: a `ttprun` was told to end."""
        return self.fault.kind == "told-to-end" and self.cause_rank < 0


class Recovered(Message, frozen=True):
    """The incident is over and all workers go on from `step`; it comes before the workers are told `Proceed`.

    Attributes:
        line: for the user
        replaced: ranks with a new process
        retried: ranks that had raised, and whose processes live
        seconds: from the fault, as the controller heard of it, to this
    """

    incident: int
    step: int
    line: str
    fault: Fault = Fault()
    replaced: tuple[int, ...] = ()
    retried: tuple[int, ...] = ()
    seconds: float = 0.0

"""The base of all messages, parts of several messages (state of a rank, shards, addresses), and the end of an
incident.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec


class Phase(IntEnum):
    """The phase of a rank in its step; `finished` on its board is the newest completed step."""

    STARTING = 0  # no training state is known yet: nothing can be saved from this rank
    RUNNING = 1  # between two updates: forward, backward, reduction, or outside of a step
    READY = 2  # at the door: gradients reduced and clipped; the update needs no other rank
    UPDATING = 3  # inside the update window
    BROKEN = 4  # an exception left the update window: part of the live state is old, part is new
    ENDED = 5  # the script is at its end: the end of the process is no fault
    UNREADABLE = 6  # the device has failed, or does not answer: nothing can be read from the rank


class ScriptStage(IntEnum):
    """The stage of a rank's script; a rank in any stage still holds its training state."""

    TRAINING = 0  # the script trains, or is before or between its steps
    TRAINED = 1  # its training loop is over; the script may still evaluate and save
    FINISHED = 2  # training, last evaluation and last save are done: a death costs nothing any more


# No job has as many ranks, nodes or shards; larger numbers would make the controller count for hours.
_MANY = 1 << 20
# The bounds for connections: a message with a number outside of the bounds is refused.
Number = Annotated[int, msgspec.Meta(ge=0, lt=_MANY)]
Count = Annotated[int, msgspec.Meta(ge=1, le=_MANY)]
# The status of a process that has ended: its exit code, or minus the signal.
Status = Annotated[int, msgspec.Meta(ge=-128, le=255)]
PhaseNumber = Annotated[int, msgspec.Meta(ge=0, le=int(max(Phase)))]
StageNumber = Annotated[int, msgspec.Meta(ge=0, le=int(max(ScriptStage)))]


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all messages.

    A message is a frozen tree without cycles, so the garbage collector need not visit messages: otherwise a
    controller of 100,000 ranks would spend half of each decision on garbage collection.
    """


class BoardRecord(Message, frozen=True):
    """A reading of a rank's board.

    `inside` is the current step of the rank, -1 between steps (evaluation, saves). `slowest`: seconds of the
    slowest of its recent steps, 0 before enough steps. `usual`: the longest seconds of earlier phases of the
    current kind (evaluation, a save); 0 for the first phase of its kind, -1 in no phase. `turns` counts the
    begins and ends of phases.

    `oldest` to `finished` are the steps whose state this rank has: none while an update changes the state,
    several if steps were skipped (no update) since the last update. With a local copy, steps from before the
    last or current update are included. `ahead` is the step of the update for which the rank is READY, or in
    which it is. `kernel_timeout`: the seconds after which kernels of the rank stop waiting for
    another rank; 0: never. `copies`: the steps of the rank's whole copies in host memory, to which a
    recovery can go back.
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
    kernel_timeout: float = 0.0
    copies: tuple[int, ...] = ()

    @property
    def phase_name(self) -> str:
        """Return the name of the phase, for people."""
        return Phase(self.phase).name

    def provides(self, step: int) -> bool:
        """Return True if this rank can give the state of `step`; a READY rank can also give the next step."""
        if self.phase in (Phase.STARTING, Phase.ENDED, Phase.UNREADABLE):
            return False
        if self.oldest <= step <= self.finished:
            return True
        return self.phase in (Phase.READY, Phase.UPDATING) and step == self.ahead


class Share(msgspec.Struct, frozen=True, gc=False):
    """A shard on a rank: number `index` of `count` of the optimizer state of `group`.

    `can_write`: whether the rank can also write the group's files; a rank with other experts can give only
    the shard.
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
    """The features by which a repeated exception is recognised.

    Attributes:
        where: file and line of the innermost call outside of Python, packages and the adaptor
        finished: the newest finished step of the rank, -1 before training
        mistake: whether another start would fail in the same way (arguments, imports, a missing driver);
            first start only
        lasting: whether the exception came before or after training, from the code, its arguments or a
            checkpoint, and not from the system, the network or another rank
        may_be_echo: whether the exception may only follow from the end of another rank
    """

    kind: str = ""
    where: str = ""
    finished: int = -1
    mistake: bool = False
    lasting: bool = False
    may_be_echo: bool = False


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """The address of a listener; port 0: `address` is the name of an abstract unix socket of this machine."""

    address: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


# The kind of an incident without a failure: all workers start again, on more nodes.
NODES_JOIN = "nodes-join"


class Fault(msgspec.Struct, frozen=True, gc=False):
    """The first failure, for people and for the comparison with the next failure.

    Attributes:
        key: kind and place (`ValueError at train.py:12`), or the signal; "" without meaning
        finished: the newest finished step of the rank, -1 before training; None if unknown
        ranks: the ranks that have failed by themselves, the first failure first
        pid: of the first rank, or of the agent that was told to end; 0 if unknown
        kind: signal, exit, exception, hang, told-to-end, node-lost, nodes-join, corruption or error (of
            ttprun itself); "" if unknown
        status: of the process that failed first (negative: the signal)
        why: how the kernel has ended that process for want of memory; else ""
        lasting: see `parts.Origin`; before training alone
        on_all_ranks: whether every rank has raised the exception at the same place
    """

    key: str = ""
    finished: int | None = None
    ranks: tuple[int, ...] = ()
    pid: int = 0
    host: str = ""
    kind: str = ""
    status: int | None = None
    why: str = ""
    lasting: bool = False
    on_all_ranks: bool = False

    @property
    def when(self) -> str:
        """Return the progress of the rank in words."""
        if self.finished is None:
            return ""
        return f"after step {self.finished}" if self.finished >= 0 else "before training"


class Verdict(Message, frozen=True, kw_only=True):
    """The end of an incident.

    `outcome` is saved, nothing or lost; `leaves`: nodes that leave the job; `lost`: nodes whose agents are
    gone; `newest`: the newest finished step of any rank, -1 if unknown; `stop`: why the job is not started
    again, even with restarts left; `unprotected`: whether the job trained without protection, so its steps
    were not counted; `agreed`: after a corruption the newest step on which the holders agree, so copies of
    later steps are not used; `store`: a new rendezvous store, for the restart of a job whose store was lost
    with node 0, of the next node 0 or of the spare node in its place; None: none is needed, or none could be
    opened.
    """

    incident: int
    outcome: str
    step: int
    line: str
    cause_rank: int
    exit_code: int
    save_folder: str
    leaves: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    fault: Fault = Fault()
    newest: int = -1
    stop: str = ""
    unprotected: bool = False
    agreed: int | None = None
    store: Endpoint | None = None

    @property
    def is_requested(self) -> bool:
        """Return True if nothing has failed: a `ttprun` was told to end."""
        return self.fault.kind == "told-to-end" and self.cause_rank < 0


class Recovered(Message, frozen=True):
    """The incident is over and all workers go on from `step`; sent before the workers get `Proceed`.

    Attributes:
        made_again: the finished steps after `step`, which all make once more
        retried: ranks that had raised, and whose processes live
        seconds: from the report of the fault to this message
        store: the rendezvous store, if a spare node has taken the place of node 0 in this generation
    """

    incident: int
    step: int
    line: str
    fault: Fault = Fault()
    replaced: tuple[int, ...] = ()
    retried: tuple[int, ...] = ()
    seconds: float = 0.0
    made_again: int = 0
    store: Endpoint | None = None

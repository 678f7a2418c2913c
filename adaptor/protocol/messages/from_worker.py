"""The messages of a worker to its agent, which forwards the messages for the controller."""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages.parts import (
    BoardRecord,
    Message,
    Number,
    Origin,
    ScriptStage,
    Share,
    StageNumber,
    Standing,
)
from adaptor.protocol.naming import FileEntry


class Hello(Message, frozen=True):
    """First message of a worker."""

    rank: Number
    pid: int


class Layout(Message, frozen=True):
    """The shards of the rank, the folder of checkpoints, and the step that the job started from.

    `save_folder`: "" if handlers of the script write and name checkpoints (`adaptor.mindio`).
    `has_local_copy`: whether the rank keeps a local copy of the state before an update (TTP_LOCAL_COPY).
    `online`: why the rank cannot take part in an online recovery, in a few words for the user; "off" if
    TTP_ONLINE is 0; "" if the rank can. `nodes`: the numbers of nodes that fit the job; empty: unknown.
    `in_parts`: whether the publishing agent joins last words of parts (`torch_dist`). `copied`: the most
    steps between two copies in host memory; 0: the rank makes no copies. `most_recoveries`: how often the
    process can exchange its process groups; 0: any number of times.
    """

    rank: Number
    shares: tuple[Share, ...]
    save_folder: str
    origin: int
    fingerprint: str
    has_local_copy: bool = False
    online: str = "off"
    nodes: tuple[Number, ...] = ()
    in_parts: bool = False
    copied: int = 0
    most_recoveries: Number = 0


class Refused(Message, frozen=True):
    """The refusal of a rank to train; `reason` is one line for the user."""

    rank: Number
    reason: str


class Raised(Message, frozen=True):
    """An exception has left the training script of the rank; its state is intact.

    Attributes:
        calls: its innermost calls, in lines: the process may be replaced before a report
    """

    rank: Number
    error: str
    exit_code: int
    origin: Origin = Origin()
    calls: str = ""
    stage: StageNumber = ScriptStage.TRAINING


class Corruption(Message, frozen=True):
    """The holders of the state differ in a verified step (TTP_VERIFY_EVERY); every rank sends the message.

    Attributes:
        step: of the update after which the sums were computed
        shard: the first shard, or part of the model, that differs
        text: what differs, a sentence without the ranks
        named: the ranks whose state or computation is wrong
        suspects: the holders, one of which is wrong, where no rank can be named
        agreed: the newest step whose state all holders agree on, without `named`; -1: none
        stops: whether the job ends (TTP_CORRUPTION=stop)
    """

    rank: Number
    step: int
    shard: str
    text: str
    named: tuple[Number, ...]
    suspects: tuple[Number, ...]
    agreed: int
    stops: bool = False


class Unprotected(Message, frozen=True):
    """The script of the rank trains, and its state cannot be saved; `why` is one line for the user."""

    rank: Number
    why: str


class TerminationRequested(Message, frozen=True):
    """A request to end the process, by `signal`; its state is intact."""

    rank: Number
    signal: str


class BusyReport(Message, frozen=True):
    """The answer to `BusyProbe`: whether a debugger or a compiler holds the main thread."""

    rank: Number
    busy: bool


class ChangedVariable(msgspec.Struct, frozen=True):
    """An environment variable that a script changes.

    Attributes:
        after: the newest imported module at the first change
        code: of the last value (`script_imports.code_of_variable`), which may be a secret
    """

    after: str
    code: bytes


class Modules(Message, frozen=True):
    """The answer to `ModulesProbe`.

    Attributes:
        path: `sys.path`
        origins: by the name of each imported module, in the order of import: its file, or its kind
        names: by the name of each module that the script has imported, its functions and classes at the end
            of its import (`script_imports.codes_of`)
        variables: environment variables that have changed between the begin of the script and its last import
    """

    rank: Number
    path: tuple[str, ...]
    origins: dict[str, str]
    names: dict[str, bytes]
    variables: dict[str, ChangedVariable]


class Frozen(Message, frozen=True):
    """The answer to `Freeze`: the door is closed and no update is in flight.

    `standing`: the position of the main thread, if requested.
    """

    rank: Number
    incident: int
    board: BoardRecord
    standing: Standing | None = None


class Written(Message, frozen=True):
    """The files of a group are in their temporary folder; `not_finite` names parts that are not finite."""

    rank: Number
    incident: int
    attempt: int
    group: str
    files: tuple[FileEntry, ...]
    not_finite: str = ""


class WriteFailed(Message, frozen=True):
    """The failure of a rank to do its part for a group; or the shards of `doubted` ranks are not finite.

    `board`: the rank's board afterwards; an exception may have left the update to which the rank was let
    through.
    """

    rank: Number
    incident: int
    attempt: int
    group: str
    reason: str
    board: BoardRecord
    doubted: tuple[int, ...] = ()


class Renamed(Message, frozen=True):
    """The result of the script's handler that names the checkpoint; an empty `reason` means success."""

    rank: Number
    incident: int
    reason: str


class Joined(Message, frozen=True):
    """The success of `Regroup`: the rank has new groups and the state of `step`, and waits for `Proceed`.

    `digest`: a checksum of the values that must be equal on all ranks of the job (groups and their ranks, the
    layout of parameters). Two ranks with the same shard have compared the shard themselves.
    """

    rank: Number
    incident: int
    attempt: int
    step: int
    digest: str


class RegroupFailed(Message, frozen=True):
    """The failure of `Regroup` on the rank; its state is unchanged since `Frozen`.

    `is_replaceable`: another process may take its place, because its main thread waits without end.
    `may_be_echo`: an exception came, which the loss of another rank may explain; else the reason is the
    rank's own.
    """

    rank: Number
    incident: int
    attempt: int
    reason: str
    is_replaceable: bool = False
    may_be_echo: bool = False


class Present(Message, frozen=True):
    """The thread that answers the agent runs: the process is neither stopped nor held up."""

    rank: Number
    incident: int


class Copied(Message, frozen=True):
    """The rank has a new copy of its state in host memory, which stays with the agent."""

    rank: Number
    step: int


class SaveEnded(Message, frozen=True):
    """The framework's own save of `step` has ended; `reason`: why the save has failed, "" after success.

    Sent by rank 0 if training goes on in both cases.
    """

    rank: Number
    step: Number
    reason: str = ""


class Drilled(Message, frozen=True):
    """A drill in the running job: could `step` be saved without rank `lost`? `problem`: why not, "" if so."""

    rank: Number
    step: Number
    lost: Number
    problem: str = ""


class Verified(Message, frozen=True):
    """The sums of a rank in a verified step, after the verdict (TTP_TRANSCRIPT).

    Attributes:
        step: of the update after which the sums were computed
        size: the number of ranks
        is_agreed: whether all holders agree; if so, only the first holder of a shard sends the sums
        shards: by label, the sums of each shard that the rank holds, by key; empty: see the first holder
        own: further sums of this rank, by key: weights and random states at the door of the next update
        samples: the consumed samples of the job; None: unknown
        versions: of torch, the framework and the adaptor, with layout and device; from rank 0 alone
    """

    rank: Number
    step: Number
    size: Number
    is_agreed: bool
    shards: dict[str, dict[str, str]]
    own: dict[str, str]
    samples: int | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)


class TimelineEvent(Message, frozen=True):
    """An event for the timeline of the incident."""

    rank: Number
    incident: int
    at: float
    what: str
    detail: str = ""


FromWorker = (
    Hello
    | Layout
    | Refused
    | Raised
    | Corruption
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
    | Copied
    | SaveEnded
    | Drilled
    | Verified
    | TimelineEvent
)

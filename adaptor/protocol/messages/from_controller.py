"""The messages from the controller: orders to workers by way of their agent (`Addressed`), and to agents."""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages.from_agent import AgentHello
from adaptor.protocol.messages.from_worker import Layout
from adaptor.protocol.messages.parts import Message, Recovered, Verdict
from adaptor.protocol.naming import FileEntry


class BusyProbe(Message, frozen=True):
    """The question whether a debugger or compiler holds the main thread, before a hang is reported.

    The answer is `BusyReport`; both stay on the node.
    """


class ModulesProbe(Message, frozen=True):
    """The question for the modules that a spare has to import, answered on the node by `Modules`."""


class PresenceProbe(Message, frozen=True):
    """The question for a sign of life during an online recovery; the answer is `Present`."""

    incident: int


class Freeze(Message, frozen=True):
    """Close the door, wait for an update in flight, answer `Frozen`.

    `stacks`: whether the job hangs; write the stacks of all threads, and report the position of the main
    thread.
    """

    incident: int
    stacks: bool = False


class GroupOrder(msgspec.Struct, frozen=True, gc=False):
    """The ranks that give the shards of a group, `holders[i]` shard i, and the rank that writes."""

    group: str
    holders: tuple[int, ...]
    writer: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks that take part, in order."""
        return tuple(sorted({*self.holders, self.writer}))


class Dump(Message, frozen=True):
    """Bring the rank to `step` and do its part for each group.

    `as_is`: groups that are written whether finite or not. `in_place`: holders may write their shards into
    the files of the writer, instead of sending them. With `store_port` 0 `store_host` is the name of an
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
    in_place: bool = False


class ShardSource(msgspec.Struct, frozen=True, gc=False):
    """A live rank `source` that gives shard `index` of `group`."""

    group: str
    index: int
    source: int


class Replacement(msgspec.Struct, frozen=True, gc=False):
    """A rank with a new process, and the sources of its state.

    Attributes:
        twin: a survivor with the same part of the model, which gives the record of the step, and the answers
            of other ranks to the questions of a start
        sources: one for each shard of the rank
    """

    rank: int
    twin: int
    sources: tuple[ShardSource, ...]


class Regroup(Message, frozen=True):
    """Go back to the end of `step`, exchange the process groups, answer `Joined`, wait for `Proceed`.

    Sent to all ranks once `step` is on disk, or could not be saved, and each newcomer has sent its `Hello`.
    (A survivor at the door of `step` makes the update first.) Until `Proceed` a survivor can still give the
    state of `step`.

    `origin`: the step that the job was started from, for a newcomer's `Layout`. `replaced`: empty if all
    processes live (an exception). A larger `attempt` supersedes a smaller attempt. The store is the store of
    dumps; its keys begin with the incident and the attempt. With `store_port` 0 `store_host` is the name of
    an abstract unix socket. `timeout_s`: the time limit of each part. `from_copies`: no step can be saved;
    every rank, new processes included, takes the state of `step` from its own copy in host memory.
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
    from_copies: bool = False


class Proceed(Message, frozen=True):
    """Go on from `step`: all ranks have joined. `line`: the incident, for the framework's own logs."""

    incident: int
    step: int
    line: str = ""


class Rename(Message, frozen=True):
    """Let the script's handler name the checkpoint of `step`, which is written. Answer: `Renamed`."""

    incident: int
    step: int


class EndScript(Message, frozen=True):
    """All ranks have finished their training: let the script, and the process, come to their end.

    Answer: `Frozen`, with the phase ENDED, once the script is at its end.
    """

    incident: int


class Exit(Message, frozen=True):
    """The incident is over: end the process.

    Attributes:
        blamed: whether the rank has failed first, or raised first without a rank to blame, and shows its
            traceback
    """

    incident: int
    blamed: bool = False


ToWorker = (
    BusyProbe | ModulesProbe | PresenceProbe | Freeze | Dump | Rename | Regroup | Proceed | EndScript | Exit
)


class Prepare(Message, frozen=True):
    """Make a clean temporary folder for `step`; the answer is `Prepared`.

    `term`: of the controller; `number`: of the folder. An agent that takes the place of another makes a new
    folder: the other may still be at work, on a hanging disk. `first`: whether the order is the first of the
    incident, under the controller of node 0; the framework's own unfinished saves then make room.
    """

    incident: int
    save_folder: str
    step: int
    term: int = 0
    number: int = 0
    first: bool = False


class Publish(Message, frozen=True):
    """Check, name and announce the checkpoint of `step`; `term` and `number` belong to its folder.

    `written`: the number of the folder during the write. An agent that publishes in the place of another,
    which may still be at work, first renames the folder to `number`, so that the other does not find the
    folder any more.
    """

    incident: int
    save_folder: str
    step: int
    files: tuple[FileEntry, ...]
    writers: dict[str, tuple[int, ...]]
    world_size: int
    term: int = 0
    number: int = 0
    written: int = 0


class Replace(Message, frozen=True):
    """Start a new process for `rank`; its first message is `Hello`.

    A live former process is ended, and its `Died` comes before the `Hello`. If the new process ends, another
    `Died` follows. `cold`: no spare, because the last new process has failed.
    """

    incident: int
    attempt: int
    rank: int
    cold: bool = False


class EndRank(Message, frozen=True):
    """End the process of `rank` as a fault would: a user drills the recovery (`ttp drill`)."""

    rank: int


class FillPlaces(Message, frozen=True):
    """Have spare nodes take the places of lost `nodes` while the others train on; the answer: `PlacesFilled`.

    Only the agent of node 0 gets this order: spare nodes wait there. Each agent that takes a place starts a
    new process for each of its ranks, as after `Replace`.
    """

    incident: int
    nodes: tuple[int, ...]


class Find(Message, frozen=True):
    """Let the tracker name the newest checkpoint: a lost controller may have had last words saved.

    Of the framework's own saves only `step`, or a later step, counts. The answer is `Published`, or
    `PublishFailed` without a checkpoint of this generation.
    """

    incident: int
    save_folder: str
    step: int
    number: int = 0


class Dismissed(Message, frozen=True):
    """The controller's last message: every rank has ended, or its node leaves; nothing is saved any more."""


class Welcome(Message, frozen=True):
    """The controller's answer to an agent's hello: this node runs the controller."""


# The messages that the controller passes on to the nodes that stand by.
StandbyState = AgentHello | Layout
ToAgent = (
    Prepare
    | Publish
    | Find
    | Replace
    | EndRank
    | FillPlaces
    | Recovered
    | Verdict
    | Dismissed
    | StandbyState
    | Welcome
)


class Addressed(Message, frozen=True):
    """An order on its way to one worker."""

    rank: int
    message: ToWorker


ControllerToAgent = Addressed | ToAgent

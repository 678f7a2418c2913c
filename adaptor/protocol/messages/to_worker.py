"""The orders and questions to a worker, from the controller by way of its agent, or from the agent itself."""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages.parts import Message


class BusyProbe(Message, frozen=True):
    """The question whether a debugger or compiler holds the main thread, before a hang is reported.

    The answer is `BusyReport`; both stay on the node.
    """


class ModulesProbe(Message, frozen=True):
    """The question for the modules that a spare has to import; the answer is `Modules`; both stay on the
    node.
    """


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
    an abstract unix socket. `timeout_s`: the time limit of each part.
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
    """Go on from `step`: all ranks have joined, and the incident is over.

    Attributes:
        line: the incident, for the framework's own logs
    """

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

"""The orders and questions to a worker: of the controller, by way of its agent, or of the agent itself."""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages.parts import Message


class BusyProbe(Message, frozen=True):
    """The question if a debugger or compiler holds the main thread, before a hang is reported.

    The answer is `BusyReport`; both stay on the node.
    """


class ModulesProbe(Message, frozen=True):
    """The question what a spare has to import; the answer is `Modules`; both stay on the node."""


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
    """Rank `source`, which lives, gives shard `index` of `group`."""

    group: str
    index: int
    source: int


class Replacement(msgspec.Struct, frozen=True, gc=False):
    """A rank whose process is a new one, and where its state comes from.

    Attributes:
        twin: a survivor with the same part of the model: it gives the record of the step, and answers what
            the newcomer would have asked other ranks at its start
        sources: one for each shard that the rank holds
    """

    rank: int
    twin: int
    sources: tuple[ShardSource, ...]


class Regroup(Message, frozen=True):
    """Go back to the end of `step`, exchange the process groups, answer `Joined`, wait for `Proceed`.

    It goes to all once `step` is on disk, or could not be saved, and each newcomer has sent its `Hello`. (A
    survivor that stands at the door makes the update first, if `step` is the one behind it.) Until `Proceed`
    a survivor can still give the state of `step`.

    `origin`: the step that the job was started from, which a newcomer says again in its `Layout`.
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
    """Go on from `step`: all ranks have joined, and the incident is over.

    Attributes:
        line: what happened, for the framework's own logs
    """

    incident: int
    step: int
    line: str = ""


class Rename(Message, frozen=True):
    """Let the script's handler name the checkpoint of `step`: all of it is written. Answer: `Renamed`."""

    incident: int
    step: int


class EndScript(Message, frozen=True):
    """All ranks have finished their training: let the script, and the process, come to their end.

    Answer: `Frozen`, with the phase ENDED, once the script is at its end.
    """

    incident: int


class Exit(Message, frozen=True):
    """The incident is over: end this process.

    Attributes:
        blamed: it has failed first, or raised first where no rank is to blame: it shows its traceback
    """

    incident: int
    blamed: bool = False


ToWorker = (
    BusyProbe | ModulesProbe | PresenceProbe | Freeze | Dump | Rename | Regroup | Proceed | EndScript | Exit
)

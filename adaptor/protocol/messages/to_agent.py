"""The messages of the controller to an agent; `Addressed` has an order for one of its workers."""

from __future__ import annotations

from adaptor.protocol.file_entry import FileEntry
from adaptor.protocol.messages.from_agent import AgentHello
from adaptor.protocol.messages.from_worker import Layout
from adaptor.protocol.messages.parts import Message, Recovered, Verdict
from adaptor.protocol.messages.to_worker import ToWorker


class Prepare(Message, frozen=True):
    """Make a clean temporary folder for `step`; the answer is `Prepared`.

    `term`: of the controller; `number`: of the folder. An agent that takes the place of another makes a new
    one: the other may still be at work, on a disk that hangs. `first`: of the incident, under the controller
    of node 0; the framework's own unfinished saves make room for it.
    """

    incident: int
    save: str
    step: int
    term: int = 0
    number: int = 0
    first: bool = False


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


class FillPlaces(Message, frozen=True):
    """Have spare nodes take the places of lost `nodes` while the others train on; the answer: `PlacesFilled`.

    Only the agent of node 0 is told: spare nodes wait there. Each agent that takes a place starts a new
    process for each rank of it, as if `Replace` were ordered.
    """

    incident: int
    nodes: tuple[int, ...]


class Find(Message, frozen=True):
    """A controller that is lost may have had last words saved: let the tracker name the newest checkpoint.

    Where it is the framework's own save, only `step` counts, or a later one. The answer is `Published`, or
    `PublishFailed` where there is none of this generation.
    """

    incident: int
    save: str
    step: int
    number: int = 0


class Dismissed(Message, frozen=True):
    """The controller's last message: every rank has ended, or its node leaves; nothing is saved any more."""


class Welcome(Message, frozen=True):
    """The controller's answer to an agent's hello: this node runs the controller."""


# The messages that the controller passes on to the nodes that stand by.
StandbyState = AgentHello | Layout
ToAgent = (
    Prepare | Publish | Find | Replace | FillPlaces | Recovered | Verdict | Dismissed | StandbyState | Welcome
)


class Addressed(Message, frozen=True):
    """An order on its way to one worker."""

    rank: int
    message: ToWorker


ControllerToAgent = Addressed | ToAgent

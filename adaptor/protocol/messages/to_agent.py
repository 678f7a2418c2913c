"""The messages of the controller to an agent; `Addressed` wraps an order for a worker of the agent."""

from __future__ import annotations

from adaptor.protocol.file_entry import FileEntry
from adaptor.protocol.messages.from_agent import AgentHello
from adaptor.protocol.messages.from_worker import Layout
from adaptor.protocol.messages.parts import Message, Recovered, Verdict
from adaptor.protocol.messages.to_worker import ToWorker


class Prepare(Message, frozen=True):
    """Make a clean temporary folder for `step`; the answer is `Prepared`.

    `term`: of the controller; `number`: of the folder. An agent that takes the place of another makes a new
    folder: the other may still be at work, on a hanging disk. `first`: whether the order is the first of the
    incident, under the controller of node 0; the framework's own unfinished saves then make room.
    """

    incident: int
    save: str
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
    save: str
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

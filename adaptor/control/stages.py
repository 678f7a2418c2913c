"""The stages of an incident, what it orders, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from adaptor.control.messages import Dump, Find, Freeze, Prepare, Publish, Rename


class State(Enum):
    FREEZING = auto()
    PREPARING = auto()
    DUMPING = auto()
    PUBLISHING = auto()
    FINDING = auto()
    ENDED = auto()


@dataclass(frozen=True)
class Outcome:
    """How it ended: `kind` is saved, nothing or lost; `reason`, or what is to be said, is for the user.

    `unheld`: it is lost because a shard has no live holder, not because a save failed.
    """

    kind: str
    step: int
    reason: str
    unheld: bool = False


class Directive(msgspec.Struct, frozen=True, gc=False):
    """An order to one rank (`rank` set), or to the agent of one node."""

    message: Freeze | Dump | Rename | Prepare | Publish | Find
    rank: int | None = None
    node: int | None = None

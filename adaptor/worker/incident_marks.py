"""Marks incidents in the framework's own logs: those of TensorBoard, and of Weights & Biases.

The rank that writes them knows of each incident from its agent: of one before its start by the environment,
of one that it has survived by the order to go on. The mark is written behind the first step after it, by the
thread that trains, with the values of that step: an order of writes of its own would break W&B's steps.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Protocol

from adaptor import output, text
from adaptor.context import Context
from adaptor.protocol.environment import Generation

# The incident as a point among the curves, and as text.
MARK, LINE = "ttp/incident", "ttp/incident_line"


class Curves(Protocol):
    """The methods of TensorBoard's `SummaryWriter` that marks need."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Add a point to a curve."""

    def add_text(self, tag: str, text: str, step: int, /) -> object:
        """Add a text."""


class Run(Protocol):
    """The function of the module `wandb` that marks need."""

    def log(self, values: Mapping[str, object], step: int, /) -> object:
        """Add values to a step."""


class IncidentMarks:
    """The incidents of a process that are not marked yet, a part of its context."""

    def __init__(self, context: Context) -> None:
        line = context.part(Generation).last_incident
        self._lines = collections.deque([line] if line else [])

    @property
    def are_missing(self) -> bool:
        """Return whether an incident is not marked yet."""
        return bool(self._lines)

    def add(self, line: str) -> None:
        """Add the incident that `line` tells of; any thread may."""
        self._lines.append(line)

    def write(self, step: int, tensorboard: Curves | None, wandb: Run | None) -> None:
        """Mark the incidents that are not marked yet.

        Args:
            step: the one whose values the framework has just written.
            tensorboard, wandb: where they are written; None: not there.
        """
        while self._lines:
            line = self._lines.popleft()
            try:
                if tensorboard is not None:
                    tensorboard.add_scalar(MARK, 1, step)
                    tensorboard.add_text(LINE, line, step)
                if wandb is not None:
                    wandb.log({MARK: 1, LINE: line}, step)
            except Exception as error:  # it is for people: training goes on
                output.tell(
                    f"[ttp] the incident is not marked in the framework's log: {text.describe(error)}"
                )

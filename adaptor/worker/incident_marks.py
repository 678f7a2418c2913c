"""Marks incidents in the framework's own logs: TensorBoard and Weights & Biases.

The rank that writes the logs learns of each incident from its agent: before its start by the environment,
after surviving an incident by the order to go on. The training thread writes the mark after the first step
following the incident, together with the values of the step: separate writes would break the order of W&B's
steps.
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
    """The unmarked incidents of a process, a part of its context."""

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
        """Mark the unmarked incidents.

        Args:
            step: the step whose values the framework has just written.
            tensorboard, wandb: the logs to write to; None: not in use.
        """
        while self._lines:
            line = self._lines.popleft()
            try:
                if tensorboard is not None:
                    tensorboard.add_scalar(MARK, 1, step)
                    tensorboard.add_text(LINE, line, step)
                if wandb is not None:
                    wandb.log({MARK: 1, LINE: line}, step)
            except Exception as error:  # the mark is for people: training goes on
                output.tell(
                    f"[ttp] the incident is not marked in the framework's log: {text.describe(error)}"
                )

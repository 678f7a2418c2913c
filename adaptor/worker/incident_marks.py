"""Marks incidents in the framework's own logs, TensorBoard and Weights & Biases, and ends a run of W&B.

The rank that writes the logs learns of each incident from its agent: before its start by the environment,
after surviving an incident by the order to go on. The training thread writes the mark after the first step
following the incident, together with the values of the step: separate writes would break the order of W&B's
steps.
"""

from __future__ import annotations

import collections
from typing import Any

from adaptor import output, text, threads
from adaptor.context import Context
from adaptor.protocol.environment import Generation

# The incident as a point among the curves, and as text.
MARK, LINE = "ttp/incident", "ttp/incident_line"


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

    def write(self, step: int, tensorboard: Any, wandb: Any) -> None:
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


# Together with the worker's last messages below the time after which the agent ends the worker.
END_OF_RUN_S = 1.5


class OpenRun:
    """The run of Weights & Biases that the framework writes to, a part of its process's context.

    A worker that is ended after a verdict does not take its interpreter down, which would end the run. The
    client's service, a separate process, drops data as soon as the worker is gone: for an offline run
    everything that fits in 32 KiB, for any other run all unsent data.

    Attributes:
        client: the module `wandb`; None: no run
    """

    def __init__(self, _context: Context) -> None:
        self.client: Any = None

    def end(self, limit_s: float = END_OF_RUN_S) -> None:
        """Mark the run as failed and end it; return after `limit_s` seconds at the latest."""
        if (client := self.client) is not None:
            threads.within(limit_s, lambda: _finish(client), name="ttp-open-run")


def _finish(client: Any) -> None:
    try:
        client.finish(exit_code=1)
    except Exception as error:  # the run is for people: the worker leaves
        output.tell(f"[ttp] the run of W&B was not ended: {text.describe(error)}")

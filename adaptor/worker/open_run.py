"""Ends the framework's run of Weights & Biases where a worker is ended after a verdict.

The client's service, a separate process, collects the run's data, and drops the data as soon as the worker is
gone: for an offline run everything that fits in 32 KiB, for any other run all unsent data. A worker that is
ended after a verdict does not take its interpreter down, which would end the run.
"""

from __future__ import annotations

from typing import Protocol

from adaptor import output, text, threads
from adaptor.context import Context

# Together with the worker's last messages below the time after which the agent ends the worker.
LIMIT_S = 1.5


class Client(Protocol):
    """The function of the module `wandb` that ends a run."""

    def finish(self, exit_code: int) -> object:
        """Write and send the rest, and wait until that is done."""


class OpenRun:
    """The run that the framework writes to, a part of its process's context.

    Attributes:
        client: the module `wandb`; None: no run
    """

    def __init__(self, _context: Context) -> None:
        self.client: Client | None = None

    def end(self, limit_s: float = LIMIT_S) -> None:
        """Mark the run as failed and end it; return after `limit_s` seconds at the latest."""
        if (client := self.client) is not None:
            threads.within(limit_s, lambda: _finish(client), name="ttp-open-run")


def _finish(client: Client) -> None:
    try:
        client.finish(exit_code=1)
    except Exception as error:  # the run is for people: the worker leaves
        output.tell(f"[ttp] the run of W&B was not ended: {text.describe(error)}")

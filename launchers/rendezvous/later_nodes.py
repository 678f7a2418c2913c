"""Nodes that come while a job with `--nnodes MIN:MAX` trains: when they are asked for, on node 0.

Invariant: a node is taken in only by a verdict, after the newest step was saved, so no step is lost; and only
where the job could train on the new number of nodes, so a node that comes ends no job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from adaptor import output


class Meeting(Protocol):
    """The rendezvous of the nodes."""

    @property
    def last_call_s(self) -> float:
        """Return how long nodes wait for more of them, in seconds."""

    @property
    def nodes_that_wait(self) -> int:
        """Return how many nodes wait to be taken in."""


class Job(Protocol):
    """The job, as the agent of node 0 knows it."""

    def fits(self, nodes: int) -> bool | None:
        """Return whether it could train on so many nodes; None while nobody knows."""

    def ask_for_nodes(self, count: int) -> None:
        """Have it saved, so that all start again with so many more nodes."""


class LaterNodes:
    """Looks for nodes that wait.

    They are asked for when their number has not changed for as long as nodes that meet wait for more of them
    (`last_call_timeout`, torch's limit for the same question): nodes that come one after the other cost one
    start, not one each.

    Args:
        meeting: the rendezvous.
        job: the job.
        clock: seconds, monotonic.
    """

    def __init__(self, meeting: Meeting, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._meeting = meeting
        self._job = job
        self._clock = clock
        self._count = 0
        self._since = 0.0
        self._refused = 0  # the number of nodes that was said not to fit

    def begin(self) -> None:
        """Begin anew: workers are about to be started."""
        self._count = self._refused = 0

    def look(self, nodes_here: int) -> None:
        """Ask for the nodes that wait, where their time has come.

        Args:
            nodes_here: the number of nodes that train.
        """
        count, time_now = self._meeting.nodes_that_wait, self._clock()
        if count != self._count:
            self._count, self._since = count, time_now
        if not count or time_now - self._since < self._meeting.last_call_s:
            return
        fits = self._job.fits(nodes_here + count)
        if fits:
            self._since = time_now  # asked again, if an incident was open
            self._job.ask_for_nodes(count)
        elif fits is False and self._refused != nodes_here + count:
            self._refused = nodes_here + count
            waiting_text = "1 more node waits" if count == 1 else f"{count} more nodes wait"
            output.tell(
                f"[ttp] {waiting_text}: {nodes_here + count} nodes cannot train this job (parallel sizes, "
                "global batch,"
                f" TTP_REPLICA); it goes on with {nodes_here}"
            )

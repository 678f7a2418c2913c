"""The record of a run: torch elastic makes the agent and returns an exit code alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adaptor.launchers.records.operator_summary import Account
from adaptor.launchers.spares.spare_node import Taken
from adaptor.protocol.messages import Verdict
from adaptor.protocol.spare_node_messages import SpareHello, TakePlace


def _nothing() -> bool:
    return False


@dataclass
class RunRecord:
    """The notes of the agent for `ttprun`, which tells the last line and the exit code of the job.

    Attributes:
        verdict: the last one; None: there was none
        refused_after: the one before `verdict`, where that refuses to go on after a fault
        has_started: whether workers were started
        save: the save folder of the last generation, '' where nobody trained
        stopped: why restarts that were left are not used, as a part of the last line
        account: of incidents, restarts and lost steps
        end_agent: ends the agent's control thread; returns whether that had failed. It keeps the agent to
            the end: torch's rendezvous must not be dropped while a thread of its own uses it
        facts: of this node, which must be the same on all nodes of the job
        script: the script or module of the job, as the command names it
        common: what a spare node must have in common with this one; None: the job takes no spare nodes
        taken: the place that this node has taken as a spare; None: it has one of its own
    """

    verdict: Verdict | None = None
    refused_after: Verdict | None = None
    has_started: bool = False
    save: str = ""
    stopped: str = ""
    account: Account = field(default_factory=lambda: Account(0))
    end_agent: Callable[[], bool] = _nothing
    facts: dict[str, str] = field(default_factory=dict)
    script: str = ""
    common: SpareHello | None = None
    taken: Taken | None = None

    @property
    def place(self) -> TakePlace | None:
        """Return the place that this node has taken; None: it has one of its own."""
        return self.taken.place if self.taken is not None else None

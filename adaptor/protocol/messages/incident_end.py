"""The messages with which an incident ends: its verdict, or that all ranks go on."""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages.parts import Message

# The kind of an incident that nobody has failed in: all workers start again, on more nodes.
NODES_JOIN = "nodes-join"


class Fault(msgspec.Struct, frozen=True, gc=False):
    """The first failure, for those who read of it and for those who compare it with the next one.

    Attributes:
        key: its kind and place (`ValueError at train.py:12`), or the signal; empty where that says nothing
        finished: the step that the rank had finished, -1 before training; None where nobody knows
        ranks: those that have failed by themselves, the first one first
        pid: of the first rank, without a rank of the agent that was told to end; 0 where it is not known
        host: the machine of that process
        kind: signal, exit, exception, hang, told-to-end, node-lost, nodes-join or error (of ttprun itself);
            empty where it is not known
        status: of the process that failed first (negative: the signal)
        lasting: see `parts.Origin`; before training alone
        on_all_ranks: every rank has raised it, at the same place
    """

    key: str = ""
    finished: int | None = None
    ranks: tuple[int, ...] = ()
    pid: int = 0
    host: str = ""
    kind: str = ""
    status: int | None = None
    lasting: bool = False
    on_all_ranks: bool = False

    @property
    def when(self) -> str:
        """Return how far the rank had come, in words."""
        if self.finished is None:
            return ""
        return f"after step {self.finished}" if self.finished >= 0 else "before training"


class Verdict(Message, frozen=True, kw_only=True):
    """The end of an incident.

    `outcome` is saved, nothing or lost; `leaves`: nodes that leave the job; `lost`: those whose agents are
    gone; `newest`: the newest step that anyone had finished, -1 where none is known; `stop`: why the job is
    not started again, whatever restarts are left; `unprotected`: the job trained without protection, so
    nobody has counted its steps.
    """

    incident: int
    outcome: str
    step: int
    line: str
    cause_rank: int
    exit_code: int
    save: str
    leaves: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    fault: Fault = Fault()
    newest: int = -1
    stop: str = ""
    unprotected: bool = False

    @property
    def is_requested(self) -> bool:
        """Return whether nothing has failed: a `ttprun` was told to end."""
        return self.fault.kind == "told-to-end" and self.cause_rank < 0


class Recovered(Message, frozen=True):
    """The incident is over and all workers go on from `step`; it comes before the workers are told `Proceed`.

    Attributes:
        line: for the user
        replaced: ranks with a new process
        retried: ranks that had raised, and whose processes live
        seconds: from the fault, as the controller heard of it, to this
    """

    incident: int
    step: int
    line: str
    fault: Fault = Fault()
    replaced: tuple[int, ...] = ()
    retried: tuple[int, ...] = ()
    seconds: float = 0.0

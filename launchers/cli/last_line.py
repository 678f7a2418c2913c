"""The end of `ttprun`: its last line and its exit code, by what the run of the job returns or raises."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from adaptor import engines, output, text
from adaptor.errors import AdaptorError
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


USAGE_EXIT_CODE = 2


def run_to_the_last_line(parsed: argparse.Namespace, engine: engines.Engine, record: RunRecord) -> int:
    """Run the job and tell its last line; return the exit code. What touches disks may come afterwards.

    Args:
        parsed: the flags of the job.
        engine: knows exit codes of its own.
        record: of what the agent does meanwhile.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from adaptor.launchers.records import log
    from adaptor.launchers.rendezvous import rendezvous_errors

    try:
        run.run(parsed)  # type: ignore[no-untyped-call]
    except AdaptorError as error:
        verdict = record.verdict
        if verdict is None:
            output.tell(f"ttprun: error: {error}")
            return USAGE_EXIT_CODE
        _conclude(f"{verdict.line}; the workers cannot be started again: {error}", verdict.save)
        return int(verdict.exit_code)
    except rendezvous_errors.NotTakenInError as error:
        output.tell(f"[ttp] {error}")
        return 1
    except (*rendezvous_errors.UNMET, AssertionError, OSError, RuntimeError, ValueError) as error:
        verdict = record.verdict
        if engine.has_own_agent and not record.has_started:
            output.tell(f"ttprun: error: {rendezvous_errors.why_not(error, parsed)}")
            return USAGE_EXIT_CODE
        if verdict is not None and rendezvous_errors.lacks_means(error):
            reason = text.describe(error)
            _conclude(f"{verdict.line}; the workers cannot be started again: {reason}", verdict.save)
            return int(verdict.exit_code)
        if verdict is None:
            raise
        if not isinstance(error, rendezvous_errors.UNMET):
            log.tell_error("an error in ttprun itself", error)
            _conclude(f"{verdict.line}; ttprun has failed: {text.describe(error)}", verdict.save)
            return 1
        reason = rendezvous_errors.why_not_again(error, parsed)
        _conclude(f"{verdict.line}; nodes cannot meet again, {reason}", verdict.save)
        return int(verdict.exit_code)
    except SignalException as error:
        return end_by(error.sigval, record)
    except ChildFailedError as error:
        verdict = record.verdict
        if verdict is None:
            code = error.get_first_failure()[1].exitcode
            meant = engine.exit_code(code)
            if meant is None:
                return USAGE_EXIT_CODE
            output.tell(text.say(error))
            return _of_a_process(meant)
        if record.refused_after is not None:
            last = record.refused_after
            record.account.failed(f"{last.line}; not started again: {verdict.line}")
            return int(last.exit_code)
        if verdict.outcome == "refused":
            output.tell(f"ttprun: error: {verdict.line}")
        else:
            record.account.failed(f"{verdict.line}{record.stopped}")
        return int(verdict.exit_code)
    record.account.ended()
    return 0


def end_by(sigval: signal.Signals, record: RunRecord) -> int:
    """Tell the last line of a job that a signal has ended; return the exit code.

    Further signals are ignored: what is left takes some seconds at most, also where the disk hangs.
    """
    from adaptor.launchers.rendezvous import waiting

    waiting.ignore_signals()
    verdict = record.verdict
    if verdict is None:
        _conclude(f"ended by {sigval.name}, and the workers with it", record.save)
    else:
        record.account.failed(verdict.line)
    return 128 + sigval


def _conclude(line: str, save: str = "") -> None:
    from adaptor.launchers.records.operator_summary import conclude

    conclude(line, save)


def _of_a_process(code: int) -> int:
    """Return the exit code of a process as a shell has it: 128 + N after signal N."""
    return code if code > 0 else 128 - code

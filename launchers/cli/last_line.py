"""The end of `ttprun`: the last line and the exit code, from the result or exception of the run."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from adaptor import engines, output, text
from adaptor.errors import AdaptorError
from adaptor.launchers.records.log import Account
from adaptor.launchers.spares.spare_node import Taken
from adaptor.protocol.messages import Verdict
from adaptor.protocol.spare_messages import SpareHello, TakePlace


def _nothing() -> bool:
    return False


@dataclass
class RunRecord:
    """The notes of the agent for `ttprun`; torch elastic itself returns only an exit code.

    Attributes:
        verdict: the last verdict; None without one
        refused_after: the verdict before `verdict`, if `verdict` refuses to go on after a fault
        has_started: whether workers were started
        save: the save folder of the last generation, '' without training
        stopped: why remaining restarts are not used, as a part of the last line
        account: of incidents, restarts and lost steps
        end_agent: ends the agent's control thread; returns whether the thread had failed. The function keeps
            the agent alive: torch's rendezvous must not be deleted while its own thread uses it
        facts: of the node, which must be the same on all nodes of the job
        script: the script or module of the job, as in the command
        common: the facts that a spare node must share with this node; None: the job takes no spare nodes
        taken: the place that this spare node has taken; None for other nodes
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
        """Return the place that the spare node has taken; None for other nodes."""
        return self.taken.place if self.taken is not None else None


USAGE_EXIT_CODE = 2


def run_to_the_last_line(parsed: argparse.Namespace, engine: engines.Engine, record: RunRecord) -> int:
    """Run the job and print its last line; return the exit code. Work on disks may follow.

    Args:
        engine: knows its own exit codes.
        record: the notes of the agent.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from adaptor.launchers.records import log
    from adaptor.launchers.rendezvous import waiting

    try:
        run.run(parsed)  # type: ignore[no-untyped-call]
    except AdaptorError as error:
        verdict = record.verdict
        if verdict is None:
            output.tell(f"ttprun: error: {error}")
            return USAGE_EXIT_CODE
        _conclude(f"{verdict.line}; the workers cannot be started again: {error}", verdict.save)
        return int(verdict.exit_code)
    except waiting.NotTakenInError as error:
        output.tell(f"[ttp] {error}")
        return 1
    except (*waiting.UNMET, AssertionError, OSError, RuntimeError, ValueError) as error:
        verdict = record.verdict
        if engine.has_own_agent and not record.has_started:
            output.tell(f"ttprun: error: {waiting.no_start_reason(error, parsed)}")
            return USAGE_EXIT_CODE
        if verdict is not None and waiting.lacks_means(error):
            reason = text.describe(error)
            _conclude(f"{verdict.line}; the workers cannot be started again: {reason}", verdict.save)
            return int(verdict.exit_code)
        if verdict is None:
            raise
        if not isinstance(error, waiting.UNMET):
            log.tell_error("an error in ttprun itself", error)
            _conclude(f"{verdict.line}; ttprun has failed: {text.describe(error)}", verdict.save)
            return 1
        reason = waiting.no_restart_reason(error, parsed)
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
    """Print the last line of a job ended by a signal; return the exit code.

    Further signals are ignored: the remaining work takes some seconds at most, also if the disk hangs.
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
    from adaptor.launchers.records.log import conclude

    conclude(line, save)


def _of_a_process(code: int) -> int:
    """Return the exit code of a process as in a shell: 128 + N after signal N."""
    return code if code > 0 else 128 - code

"""The runtime of a worker: its session and its processor, created before the script begins."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptor import context, engines, hooks, output, text
from adaptor.config import Config
from adaptor.errors import AdaptorError, StartError, StepError, UnsupportedError
from adaptor.protocol import environment
from adaptor.protocol.board import Board
from adaptor.protocol.environment import (
    AGENT,
    BOARD,
    BOARD_RANKS,
    GENERATION,
    IN_A_CHILD,
    NOT_BY_TTPRUN,
    SCRATCH,
    Generation,
    Nodes,
)
from adaptor.protocol.messages import Copied, Layout, Origin, Raised, Refused, Unprotected
from adaptor.protocol.state_provider import Trainee
from adaptor.worker import stacks
from adaptor.worker.origin import calls_of, innermost, may_be_an_echo, origin_of, outline
from adaptor.worker.processor import Processor
from adaptor.worker.session import Session, drop_sigchld_handler
from adaptor.worker.unprotected import UnprotectedTraining, WorkerRuntime

# TTP_ONLINE is 0: nobody needs to know why.
OFF = "off"
# A custom loop has not made its first step, which reports the loop.
UNDECIDED = "its training loop has not begun"

_runtime: WorkerRuntime | None = None


class Runtime:
    """The session and its processor, connected to the agent.

    Raises:
        StartError: the process was not started by ttprun.
    """

    def __init__(self, settings: Config, environ: Mapping[str, str]) -> None:
        for name in (AGENT, BOARD, BOARD_RANKS, "RANK"):
            if name not in environ:
                raise StartError(NOT_BY_TTPRUN)
        self.rank = int(environ["RANK"])
        self.pid = os.getpid()
        self._timeout_s = settings.timeout_s
        self.processor = Processor(
            self.rank,
            environ[AGENT],
            settings.timeout_s,
            int(environ.get("MASTER_PORT", "0")),
            environment.stack_folder(settings.log_path, environ.get(GENERATION, "")),
        )
        board = Board(self.rank, environ[BOARD], environ[BOARD_RANKS])
        board.hold_lifeline()
        self.session = Session(
            board, self._send_layout, self._send_broken_barrier, self._print_protected, hooks.of_worker()
        )
        # The reason, for the user, why this rank is not recovered online; empty: the rank is recovered.
        self.online = "its training loop cannot be called again" if settings.online_s else OFF
        self.groups: Any = None  # `online.groups.Groups`, remembered for an online recovery
        self.processor.start(self.session)

    def raised(self, error: str, exit_code: int, by: BaseException | None = None) -> None:
        """Report to the agent that an exception left the script; the state is kept.

        Args:
            by: the exception, whose identity is recognised when repeated.
        """
        trains, is_restart = self.session.trainee is not None, context.part(Generation).is_restart
        self.session.window.give_up()
        self.session.board.fail(error)
        self.processor.exit_code = exit_code
        origin, calls = Origin(), ""
        if by is not None:
            # The origin is for comparing and for people: an exception without one is reported all the same.
            with contextlib.suppress(Exception):
                finished, stage = self.session.board.finished, self.session.board.stage
                origin = origin_of(by, finished, stage, trains=trains, is_restart=is_restart)
                calls = innermost(by)
        stage = self.session.board.stage
        self.processor.say(Raised(self.rank, text.encodable(error), exit_code, origin, calls, stage))

    def hear_signals(self) -> None:
        """See `Processor.hear_signals`, and `stacks.write_when_told`."""
        self.processor.hear_signals()
        stacks.write_when_told(environment.stack_scratch(Path(os.environ[SCRATCH]), self.rank))

    def tell_of_copy(self, step: int) -> None:
        """Tell the agent of a new copy of this rank's state in host memory; from any thread."""
        self.processor.say(Copied(self.rank, step))

    def refuse(self, reason: str) -> None:
        """Tell the agent in one line that the job is refused, and wait to be ended."""
        self.processor.say(Refused(self.rank, text.encodable(reason)))
        self.session.hold()

    def finish(self) -> None:
        """Mark the end of the script.

        While an incident is open, first wait until the controller lets the script end, because this rank may
        be a holder.
        """
        context.part(UnprotectedTraining).end_of_script()
        if self.session.door.closed:
            self.session.hold(self.session.script_may_end)
        self.session.board.end()
        if self.session.script_may_end.is_set():
            self.processor.tell_end_of_script()
        for hook in hooks.of_worker():
            hook.close()
        stacks.end_leftovers_after(self._timeout_s, self.rank)

    def not_protected(self, reason: str) -> None:
        """Report that the script's training cannot be saved; the script goes on."""
        self.processor.say(Unprotected(self.rank, reason))
        if self.rank == 0:
            output.tell(f"[ttp] NOT PROTECTED: {reason}")

    def hold_after(self, error: BaseException) -> None:
        """Report an exception that leaves the script, and keep the process, whose state may be saved."""
        drop_sigchld_handler()  # torch's would raise in the middle of this
        self.tell_of(error)
        self.session.hold()

    def tell_of(self, error: BaseException) -> None:
        """Report an exception that has left the training loop, or the script.

        An exception that may only follow from another rank's death is printed if the verdict blames this
        rank; the incident report has the exception in any case.
        """
        if isinstance(error, StepError):
            if not self.session.may_have_finished_a_step:
                self.refuse(text.say(error))
            self._raised_in_one_line(error)
        elif isinstance(error, AdaptorError):
            self._raised_in_one_line(error)
        elif self.session.door.closed or may_be_an_echo(error):
            self.processor.held = outline(error)
            self.raised(summarize(error), 1, error)
            self.processor.held = text.trace(error)  # last, because reading sources may hang with their disk
        else:
            self.raised(summarize(error), 1, error)
            output.tell(text.trace(error))

    def _raised_in_one_line(self, error: AdaptorError) -> None:
        self.raised(summarize(error), 1, error)
        output.tell(f"[ttp] rank {self.rank}: {text.encodable(text.say(error))}")

    def _send_layout(self, trainee: Trainee, origin: int) -> None:
        from adaptor import patching
        from adaptor.checkpoint import save_folder_claim

        if "torch" in sys.modules:  # as in every training: a dump then need not read this from a disk
            from adaptor.worker import dump_store  # noqa: F401

        if text.encodable(trainee.save_folder, len(trainee.save_folder)) != trainee.save_folder:
            raise UnsupportedError(
                f"--save is {text.encodable(trainee.save_folder)}: its name is not UTF-8, so the adaptor"
                " cannot save into it: choose another folder"
            )
        save_folder_claim.require_same_user(trainee.save_folder)
        save_folder_claim.tell_of_own_disk(trainee.save_folder)
        if self.online not in ("", OFF, UNDECIDED):
            self._go_without_online()
        fingerprint = patching.fingerprint("ttp")
        # Sent before the first update: a rank that ends without a layout has finished no step.
        self.processor.send(
            Layout(
                self.rank,
                trainee.shares,
                trainee.save_folder,
                origin,
                fingerprint,
                trainee.has_local_copy,
                self.online,
                context.part(Nodes).fitting,
                trainee.in_parts,
                self.session.copier.steps_between if self.session.copier is not None else 0,
                0 if self.groups is None else self.groups.most_exchanges,
            )
        )

    def _go_without_online(self) -> None:
        """Report that this job is not recovered online, and undo the preparation of online recovery."""
        from adaptor import patching

        patching.disarm("online")
        if self.groups is not None:
            self.groups.forget()
        if self.rank == 0 and not context.part(Generation).is_restart:
            output.tell(not_online(self.online))

    def _print_protected(self, trainee: Trainee, step: int) -> None:
        if self.rank == 0:
            output.tell(f"[ttp] protected from step {step} ({trainee.survives})")

    def _send_broken_barrier(self, error: str) -> None:
        self.processor.say(Raised(self.rank, text.encodable(error), 1))


def summarize(error: BaseException) -> str:
    """Return an exception in one line; without a message, with the place of its `raise`."""
    kind, calls = type(error).__name__, calls_of(error)
    if not text.say(error) and calls:
        path, line = calls[-1]
        return text.encodable(f"{kind} ({path}, line {line})")
    return text.describe(error)


def not_online(reason: str) -> str:
    """Return the start-up line for a job without online recovery."""
    return f"[ttp] online recovery: no ({reason}); a fault restarts all ranks"


def of_this_process() -> WorkerRuntime | None:
    """Return the runtime if this process is a worker or was forked from one, else None."""
    return _runtime


def training() -> bool:
    """Return whether a training loop runs in this process: begun, and not ended."""
    return _runtime is not None and _runtime.session.is_training


def begin() -> WorkerRuntime:
    """Make the runtime of this process, a worker started by ttprun, by TTP_ENGINE. Raises StartError."""
    global _runtime
    if AGENT not in os.environ:
        raise StartError(NOT_BY_TTPRUN)
    settings = context.get().settings
    engine = engines.find(settings.engine)
    worker_runtime: WorkerRuntime = pkgutil.resolve_name(engine.runtime)(settings, os.environ)
    _runtime = worker_runtime
    return worker_runtime


def get() -> WorkerRuntime:
    """Return the runtime of this worker.

    Raises:
        StartError: the process was not started by `ttprun`, or is a child of a worker: a child has the
            worker's environment, and after a fork its memory, but board and connection belong to the parent.
    """
    if _runtime is None:
        raise StartError(IN_A_CHILD if AGENT in os.environ else NOT_BY_TTPRUN)
    if _runtime.pid != os.getpid():
        raise StartError(IN_A_CHILD)
    return _runtime

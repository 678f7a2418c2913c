"""This worker's one session, made when it is first asked for."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from adaptor import config
from adaptor._start import NOT_BY_TTPRUN
from adaptor.control import stacks
from adaptor.control.board import Board
from adaptor.control.messages import Layout, Raised, Refused
from adaptor.control.processor import Processor
from adaptor.control.session import Session, Trainee
from adaptor.errors import StartError

if TYPE_CHECKING:
    from adaptor.mindio.client.runtime import MindioRuntime

# What the agent tells its workers (besides what torch elastic tells them).
AGENT = "TTP_AGENT"
BOARD = "TTP_BOARD"
BOARD_RANKS = "TTP_BOARD_RANKS"
SCRATCH = "TTP_SCRATCH"
GENERATION = "TTP_GENERATION"
RESUME = "TTP_RESUME"

_runtime: Runtime | MindioRuntime | None = None


class Runtime:
    """The session and its processor, connected to the agent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        for name in (AGENT, BOARD, BOARD_RANKS, "RANK"):
            if name not in environ:
                raise StartError(NOT_BY_TTPRUN)
        self.rank = int(environ["RANK"])
        settings = config.load(environ)
        self.processor = Processor(
            self.rank,
            environ[AGENT],
            settings.timeout_s,
            int(environ.get("MASTER_PORT", "0")),
            stacks.folder(settings.log_path, environ.get(GENERATION, "")),
        )
        board = Board(self.rank, environ[BOARD], environ[BOARD_RANKS])
        board.hold_lifeline()
        self.session = Session(board, self._say_layout, self._say_broken)
        self.processor.start(self.session)

    def raised(self, error: str, exit_code: int) -> None:
        """Tell the agent that an exception left the script; the state stays what it is."""
        self.session.give_up()
        self.session.board.fail(error)
        self.processor.exit_code = exit_code
        self.processor.say(Raised(self.rank, error, exit_code))

    def hear_signals(self) -> None:
        """See `Processor.hear_signals`, and `stacks.write_when_told`."""
        self.processor.hear_signals()
        stacks.write_when_told(stacks.scratch(Path(os.environ[SCRATCH]), self.rank))

    def refuse(self, reason: str) -> None:
        """Tell the agent that the job is refused, in one line, and wait to be ended."""
        self.processor.say(Refused(self.rank, reason))
        self.session.hold()

    def finish(self) -> None:
        """The script has come to its end; while an incident is open, this rank may be a holder."""
        if self.session.door.closed:
            self.session.hold()
        self.session.board.end()

    def stand_by(self, error: BaseException) -> None:
        """An exception leaves the script: say so, and keep the process, whose state may be saved."""
        summary = summarize(error)
        if self.session.door.closed:
            print(f"[ttp] rank {self.rank}, after the fault: {summary}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        self.raised(summary, 1)
        self.session.hold()

    def _say_layout(self, trainee: Trainee, origin: int) -> None:
        from adaptor import patching

        fingerprint = patching.fingerprint("ttp")
        self.processor.say(
            Layout(self.rank, trainee.shares, trainee.save, origin, fingerprint, trainee.goes_back)
        )

    def _say_broken(self, error: str) -> None:
        self.processor.say(Raised(self.rank, error, 1))


def summarize(error: BaseException) -> str:
    """What is said of an exception in one line; of one that says nothing itself, where it was raised."""
    kind, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
    if not str(error) and frames:
        return f"{kind} ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"{kind}: {error}".splitlines()[0].removesuffix(": ")


def training() -> bool:
    """Whether training has begun in this process."""
    return _runtime is not None and _runtime.session.trainee is not None


def get() -> Runtime | MindioRuntime:
    """The runtime of this worker, by TTP_ENGINE.

    Raises:
        StartError: the process was not started by `ttprun`.
    """
    global _runtime
    if _runtime is None:
        _runtime = _made()
    return _runtime


def _made() -> Runtime | MindioRuntime:
    if config.load().engine == "builtin":
        return Runtime(os.environ)
    from adaptor.mindio.client.runtime import MindioRuntime

    return MindioRuntime(os.environ)

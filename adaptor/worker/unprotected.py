"""Warns of unprotected training, and refuses an update that did not pass the hooks of its optimizer.

Hooks of torch run around each step of any optimizer. A script without an optimizer, for example for data
preparation, gets no warning. In a job that no framework has claimed (`adaptor.patching.claim`) the adaptor
adds only these hooks to the training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Protocol
from weakref import WeakKeyDictionary

import wrapt

from adaptor import patching
from adaptor.context import Context
from adaptor.errors import StartError
from adaptor.worker.session import Session


class WorkerRuntime(Protocol):
    """A worker's session and its reports of failures, the same for each engine (TTP_ENGINE)."""

    rank: int
    pid: int  # of the worker; a forked child has another number, and is no worker
    session: Session

    def hear_signals(self) -> None:
        """Install the handlers of signals; on the main thread."""

    def refuse(self, reason: str) -> None:
        """Refuse the job, in one line; does not return."""

    def raised(self, error: str, exit_code: int, by: BaseException | None = None) -> None:
        """Report that an exception left the script; the state is kept."""

    def hold_after(self, error: BaseException) -> None:
        """Report the exception, and keep the process, whose state may be saved."""

    def not_protected(self, reason: str) -> None:
        """Report why the training of this process cannot be saved."""

    def finish(self) -> None:
        """Report that the script has come to its end."""


# The number of updates of an optimizer that count as training. A framework makes one or two empty ones, to
# create the state that an optimizer has after its first update.
TRAINING = 3

_PROTECT = "call adaptor.protect before the training loop and protection.step in each step"
_CLAIM = (
    "install a plug-in for the framework of the script, or call adaptor.enable() before Megatron is imported"
    " and adaptor.protect before the training loop"
)
_OFF = "or set ENABLE_TTP=False"

_NO_STEP = (
    "an optimizer that adaptor.protect was given makes an update, and no step was begun; "
    f"put each step inside of `with protection.step(number):`, {_OFF}"
)


class UnprotectedUpdates:
    """Counts this process's optimizer updates, and reports updates that would not be saved.

    Args:
        worker: the session shows whether training has begun; the worker passes on why the training is not
            protected.
        expected: the facts known about the script.
    """

    def __init__(self, worker: WorkerRuntime, expected: UnprotectedTraining) -> None:
        self._worker = worker
        self._expected = expected
        self._pid = worker.pid  # a forked child is no worker
        self._updates: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._most = 0  # of one optimizer
        self._kind = ""  # of the optimizer of the first update, which may be gone at the end
        self._said: set[str] = set()

    def before_update(self, optimizer: object, *_: object) -> None:
        """Check an update before it is made.

        Raises:
            StartError: the update is not protected, and TTP_REQUIRE_PROTECTION forbids unprotected updates.
        """
        if os.getpid() != self._pid:
            return
        session = self._worker.session
        if session.trainee is None:
            if self._expected.is_refused and not patching.is_claimed("ttp"):  # before any training
                self._say(_unknown(session, type(optimizer).__name__, self._expected.framework))
        elif not session.counts_steps and session.window.owns(optimizer):
            self._say(_NO_STEP)

    def after_update(self, optimizer: object, *_: object) -> None:
        """Count a finished update.

        Raises:
            StartError: the update is not protected, and TTP_REQUIRE_PROTECTION forbids unprotected updates.
            UnsupportedError: the update belongs to a step, and the optimizer's own hooks have not reported
                the update.
        """
        if os.getpid() != self._pid:
            return
        session = self._worker.session
        if session.trainee is not None and session.window.owns(optimizer):
            session.require_hooks(optimizer)  # torch calls the hooks of all optimizers last
            return
        if session.window.is_open:  # a part of a known update
            return
        self._kind = self._kind or type(optimizer).__name__
        count = self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        self._most = max(self._most, count)
        if count >= TRAINING:
            self._say(_unknown(session, type(optimizer).__name__, self._expected.framework))

    def end(self) -> None:
        """The script has come to its end."""
        session = self._worker.session
        if self._expected.framework and self._most < TRAINING:  # an evaluation
            return
        if self._kind and session.trainee is None and not self._said:
            self._worker.not_protected(_unknown(session, self._kind, self._expected.framework))

    def _say(self, reason: str) -> None:
        """Say once why something is not protected and what to do, or raise StartError."""
        if reason in self._said:
            return
        if self._expected.is_refused:
            raise StartError(
                f"NOT PROTECTED: {reason}; to train all the same set TTP_REQUIRE_PROTECTION=False"
            )
        self._said.add(reason)
        self._worker.not_protected(reason)


class UnprotectedTraining:
    """The watch of this process, and the facts known about its script; a part of the process's context.

    Attributes:
        framework: the framework whose parser has read the script's arguments; '' without a framework
        is_refused: TTP_REQUIRE_PROTECTION
    """

    def __init__(self, context: Context) -> None:
        self.is_refused = context.settings.require_protection
        self.framework = ""
        self._armed = False
        self._watch: UnprotectedUpdates | None = None
        self._remove: list[Callable[[], None]] = []

    def expect(self, framework: str) -> None:
        """Note that the parser of `framework`, whose own loop is protected, reads the script's arguments."""
        self.framework = framework

    def why_unclaimed(self) -> str:
        """Return why nobody claims the job before process groups or an optimizer are made, and what to do."""
        reason = "it makes process groups or an optimizer before it has called adaptor.enable()"
        if self.framework:
            reason = (
                f"it uses the parser of {self.framework}, but the code that calls the parser does not import"
                f" the training loop of {self.framework}, so it has another loop"
            )
        return f"{reason}; {_CLAIM}"

    def arm(self, worker: Callable[[], WorkerRuntime | None]) -> None:
        """Watch the updates of this process from now on, if the process is a worker."""
        self._armed = True
        wrapt.register_post_import_hook(partial(self._hook, worker), "torch.optim.optimizer")

    def disarm(self) -> None:
        """Stop watching: remove the hooks."""
        while self._remove:
            self._remove.pop()()
        self._watch = None
        self.framework = ""
        self._armed = False  # torch may not have been imported yet

    def end_of_script(self) -> None:
        """Report unprotected training at the end of the script, unless reported before."""
        if self._watch is not None:
            self._watch.end()

    def _hook(self, of_this_process: Callable[[], WorkerRuntime | None], module: ModuleType) -> None:
        worker = of_this_process() if self._armed else None
        if worker is None or self._remove:
            return
        self._watch = UnprotectedUpdates(worker, self)
        self._remove.append(module.register_optimizer_step_pre_hook(self._watch.before_update).remove)
        self._remove.append(module.register_optimizer_step_post_hook(self._watch.after_update).remove)


def _unknown(session: Session, kind: str, framework: str) -> str:
    if session.trainee is not None:
        return (
            f"{kind} makes updates, and adaptor.protect was not given it, so its state is in no checkpoint; "
            "if it takes the place of the optimizer that was given, call adaptor.protect again with it, else "
            f"put its state into `extra`, {_OFF}"
        )
    if framework:
        return f"{kind} makes updates outside of the training loop of {framework}; {_CLAIM}, {_OFF}"
    return f"{kind} makes updates, and adaptor.protect was not called; {_PROTECT}, {_OFF}"

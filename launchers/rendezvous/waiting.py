"""Waits for other nodes, which a signal ends at once; the signals that end a job; why nodes have not met.

torch waits inside C++ functions, where no Python signal handler runs. So a thread waits, and the main thread
stays free for signals and for lines that name the awaited nodes.

`EndRequests`: the first signal saves the job, the second ends the job at once. Signals after the second are
ignored, as is a signal shortly after the first that repeats the same request. torch's handlers raise an
exception in the main thread. If the exception is lost (log handlers and destructors drop exceptions), the
agent raises it again when it looks at its workers.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import utils
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from adaptor import output, text
from adaptor.errors import ConfigError
from adaptor.launchers.cli import flags
from adaptor.protocol.environment import BY_HAND, ending_signals
from adaptor.protocol.spare_messages import Gate

# Seconds before the first line: nodes started together meet faster.
FIRST_S = 1.5
# Seconds between two lines.
AGAIN_S = 10.0
# The name of a thread that may wait for a lost store until the process ends.
ABANDONED = "ttp-abandoned"
# SIGTERM and SIGHUP may come twice for one request. At a time limit Slurm's daemons and srun send SIGTERM,
# some hundredths of a second apart. When a terminal closes, its shell sends SIGHUP, and the kernel again at
# the end of the shell; systemd sends SIGHUP after SIGTERM. A person who asks again waits longer, or presses
# Ctrl-C.
SAME_REQUEST_S = 5.0
_SENT_TWICE = {signal.SIGTERM, signal.SIGHUP}
# A signal that the agent has not taken within this time was lost, and the next signal counts. torch writes a
# log line in between.
TAKEN_S = 1.0
# torch's errors after which nodes have not met.
UNMET = (DistError, RendezvousError)
_TAKEN = "EADDRINUSE"
# The further time for the answer of a store, which answers at the time-out of a question at the latest. torch
# waits without a limit where the process of the store is stopped, or its machine is switched off.
ANSWERS_S = 5.0
# A spare node of c10d has no place to take.
MEETS = "all workers of the job start again: this node meets the others"
# torch's limits of waits for other nodes, by the key of --rdzv-conf: with --node-rank and without.
_TIMEOUTS_S = {"timeout": 900, "join_timeout": 600}

T = TypeVar("T")


class Interrupted(BaseException):
    """The signal `sigval` has ended the wait for `what`; like KeyboardInterrupt no Exception.

    torch's own SignalException is not used, because torch prints its own lines about it.
    """

    def __init__(self, awaited_text: str, sigval: signal.Signals) -> None:
        super().__init__(f"{sigval.name} while it waited for {awaited_text}")
        self.what = awaited_text
        self.sigval = sigval


def wait_for(
    work: Callable[[], T],
    awaited_text: Callable[[], str],
    *,
    quiet: bool = False,
    limit: Callable[[], str] = lambda: "",
    first_s: float = FIRST_S,
    look: Callable[[], float | None] | None = None,
    limit_s: float = math.inf,
) -> T:
    """Run `work` in a thread and return its result; call on the main thread.

    Args:
        work: waits for other nodes.
        awaited_text: returns the awaited thing, in words; empty: no line. It must not block.
        quiet: print no lines.
        limit: returns the longest wait and its setting; empty: unknown or unlimited.
        first_s: seconds before the first line.
        look: is called as often as lines are printed, or after the seconds that it has returned, in another
            thread, because a disk may hang; an exception of `look` ends the wait, as a signal does.
        limit_s: the longest wait for a store that answers.

    Raises:
        SilentStoreError: `work` has taken `limit_s` and `ANSWERS_S`. It goes on until the process ends.
        Interrupted: SIGINT, SIGTERM or another signal handled by torch came first. `work` goes on until the
            process ends.
    """
    finished = threading.Event()
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # the main thread raises it
            raised.append(error)
        finally:
            finished.set()

    def watch(look: Callable[[], float | None]) -> None:
        pause_s = first_s
        try:
            while not finished.wait(pause_s):
                pause_s = look() or AGAIN_S
        except Exception as error:
            raised.append(error)
            thread.name = ABANDONED
            finished.set()

    with _signals_raise():
        try:
            # Inside the `try`: a signal during the start of the thread counts as a signal during the wait.
            thread = threading.Thread(target=run, name="ttp-waiting", daemon=True)
            thread.start()
            if look is not None:
                threading.Thread(target=watch, args=[look], name="ttp-look", daemon=True).start()
            wait_s, until = first_s, time.monotonic() + limit_s + ANSWERS_S
            while not finished.wait(min(wait_s, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until:
                    thread.name = ABANDONED
                    raise SilentStoreError(
                        f"the rendezvous store has not answered for {limit_s + ANSWERS_S:g} s: its process is"
                        f" stopped, or its machine is switched off; this node waited for {awaited_text()}"
                    )
                if not quiet:
                    _say(awaited_text(), limit())
                wait_s = AGAIN_S
        except KeyboardInterrupt:
            ignore_signals()
            raise Interrupted(awaited_text(), signal.SIGINT) from None
        except SignalException as error:
            ignore_signals()
            raise Interrupted(awaited_text(), error.sigval) from None
    if not returned:
        raise raised[0]
    return returned[0]


def ask(store: Any, work: Callable[[], T], awaited_text: Callable[[], str]) -> T:
    """Return the result of `work`, a question to a rendezvous store, as `wait_for` does.

    Raises:
        SilentStoreError: the store has not answered within its own time-out.
    """
    return wait_for(work, awaited_text, limit_s=store.timeout.total_seconds())


def is_abandoned() -> bool:
    """Return whether the thread of an ended wait still waits: it would abort the interpreter at its end."""
    return any(thread.name == ABANDONED for thread in threading.enumerate())


def require_awaited() -> None:
    """Check that the wait of this thread has not ended: its late result would undo what the main thread does.

    Raises:
        SilentStoreError: the wait has ended.
    """
    if threading.current_thread().name == ABANDONED:
        raise SilentStoreError("it has answered too late")


def ignore_signals() -> None:
    """Ignore further signals until `hear_signals`: a sender may send two signals at once.

    timeout(1) and some schedulers do, and the second signal would end the process before its last line.
    """
    if threading.current_thread() is threading.main_thread():
        for number in ending_signals():
            signal.signal(number, signal.SIG_IGN)


def hear_signals() -> None:
    """Let the next signal raise SignalException, and ignore later signals.

    SIGHUP stays ignored if it is: by nohup, or because the job has ended meanwhile.
    """
    if threading.current_thread() is threading.main_thread():
        for number in ending_signals():
            if number in BY_HAND or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _raise_once)


def _raise_once(number: int, frame: FrameType | None) -> None:
    ignore_signals()
    raise SignalException("", sigval=signal.Signals(number))


def _say(awaited_text: str, limit: str) -> None:
    if awaited_text:
        output.tell(f"[ttp] waiting for {awaited_text}{limit and f', {limit}'}")


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM raise SignalException; before the first workers torch has no handler for SIGTERM."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SignalException("", sigval=signal.Signals(number))

    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:  # otherwise SIGTERM is ignored from now on
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class EndRequests:
    """Signal handlers that call torch's handlers, which raise the exception that ends the job.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._first: tuple[int, float] | None = None  # number and time of the first signal
        self._taken = False
        self._has_ended = False  # by the second signal

    def install(self) -> None:
        """Wrap the current handlers; ignored signals stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ending_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler != self.hear:
                self._handlers[number] = handler
                signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: call the wrapped handler, or ignore the signal."""
        if self._has_ended or self._is_the_same(number):
            return
        if self._taken:
            self._has_ended = True
        else:
            self._first = number, self._clock()
        self._call(number, frame)

    def take(self) -> None:
        """Note that the agent has begun to serve the first signal: the next signal is the second."""
        self._taken = True

    def raise_again(self) -> None:
        """Call the handler of the first signal again, if its exception was lost."""
        if self._first is not None and not self._taken:
            self._call(self._first[0], None)

    def _is_the_same(self, number: int) -> bool:
        if self._first is None:
            return False
        first, at = self._first
        since = self._clock() - at
        if {first, number} <= _SENT_TWICE:
            return since < SAME_REQUEST_S
        return not self._taken and since < TAKEN_S

    def _call(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers.get(number)
        if handler is not None:
            handler(number, frame)


class SilentStoreError(RendezvousConnectionError):
    """The rendezvous store does not answer."""


class NotTakenInError(RendezvousError):
    """The job for which the node waited has ended."""


class StoreLostError(NotTakenInError):
    """The rendezvous store was lost while the node waited to be taken in; the job may go on at another."""


class MovedError(NotTakenInError):
    """The job has gone on at another rendezvous store while the node waited at the store of its flags."""


class PlaceLostError(MovedError):
    """The job trains, and a process before this one was the node with this number: this one is a spare."""


class FullJobError(MovedError):
    """The job trains on all of its nodes: this node waits at a gate as a spare node.

    Attributes:
        gate: of the node with the controller.
    """

    def __init__(self, gate: Gate) -> None:
        super().__init__("the job trains on all of its nodes: this node waits as a spare node")
        self.gate = gate


class GateLostError(MovedError):
    """The gate is lost that has given this spare node a place: this node is a spare node again."""


class OtherSideError(RendezvousError):
    """The other side of a cut network goes on without this node."""


class HostUnknownError(RendezvousConnectionError):
    """The host of the rendezvous has no address on the node."""


def plain_node(adaptor_node: str, plain: str) -> ConfigError:
    """Return the refusal of a job with a node, `plain`, that runs without the adaptor."""
    return ConfigError(
        f"the nodes of this job differ: ENABLE_TTP is True on {adaptor_node}, and {plain} runs plain"
        " torchrun, as with ENABLE_TTP=False; give all nodes the same"
    )


def lacks_means(error: Exception) -> bool:
    """Return whether the machine has no process, thread, descriptor or room left."""
    if isinstance(error, UNMET):
        return False
    return isinstance(error, OSError) or "can't start new thread" in text.say(error)


def no_restart_reason(error: Exception, parsed: argparse.Namespace) -> str:
    """Return why the workers could not be started again, as the end of a sentence.

    Args:
        error: the exception of `torch.distributed.run.run`.
        parsed: the flags of the run.
    """
    if isinstance(error, SilentStoreError | OtherSideError):
        return f"for {error}"
    if isinstance(error, RendezvousTimeoutError):
        return f"for too few came {_in_time(parsed)}"
    return "for their store is lost"


def _in_time(parsed: argparse.Namespace) -> str:
    """Return how long nodes wait for each other, with the setting."""
    name = "timeout" if parsed.rdzv_backend == "static" else "join_timeout"
    seconds = utils._parse_rendezvous_config(parsed.rdzv_conf).get(name, _TIMEOUTS_S[name])
    return f"within {seconds} s (--rdzv-conf {name})"


def no_start_reason(error: Exception, parsed: argparse.Namespace) -> str:
    """Return why the job could not start, in one line with the flags to change.

    Args:
        error: the exception of `torch.distributed.run.run`.
        parsed: the flags of the run, as torch has completed them.
    """
    endpoint = flags.rendezvous_of(parsed)
    match error:
        case RuntimeError() if _TAKEN in str(error):  # of torch 2.4 it is no DistError
            return (
                f"the port of {endpoint} is taken on this machine: another job has it, or what is left of"
                " one; choose another one (--master-port, or the port in --rdzv-endpoint)"
            )
        case RendezvousClosedError():
            return (
                f"the rendezvous at {endpoint} was closed before the job began: another node has ended, and"
                " its last line says why"
            )
        case SilentStoreError():
            return str(error)
        case HostUnknownError():
            return (
                f"the host name {str(error)!r} does not resolve on this node: correct --master-addr or"
                " --rdzv-endpoint, give an address there, or add the name to /etc/hosts or the DNS"
            )
        case DistError() | RendezvousConnectionError() if parsed.nnodes.rpartition(":")[2].strip() == "1":
            return (
                f"this node does not reach its own rendezvous store at {endpoint}: {text.describe(error)};"
                " with one node, leave out --master-addr and --rdzv-endpoint"
            )
        case DistError() | RendezvousConnectionError():
            return (
                f"no rendezvous answers at {endpoint}: ttprun has to run on the node with that address, and"
                " this one has to reach it (--master-addr and --master-port, or --rdzv-endpoint)"
            )
        case RendezvousTimeoutError() if parsed.rdzv_backend == "static":
            return (
                f"{error} did not come to {endpoint} {_in_time(parsed)}; ttprun has to run on each node, with"
                " the same --nnodes, --master-addr and --master-port, and a --node-rank of its own"
            )
        case RendezvousTimeoutError():
            return (
                f"--nnodes is {parsed.nnodes}: fewer nodes came to the rendezvous at {endpoint}"
                f" {_in_time(parsed)}; ttprun has to run on each of them, with the same --rdzv-endpoint and"
                " --rdzv-id"
            )
    return f"torch does not start: {type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")

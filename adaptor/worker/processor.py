"""The processor: the thread of a worker that connects to its agent and answers it.

Only the processor reads and writes the connection (other threads queue their messages), so the connection
survives a fork. Freezing and dumping may take long, so each runs in its own thread, and the processor can
still receive an order to replace an attempt or to exit.

The signals that end a job become a report of the worker instead of the worker's end (`EndSignals`).
Invariant: no signal that `ttprun` handles (SIGTERM, and the signals of --signals-to-handle) ends a worker,
unless the script has set its own handler, which stays, or the signal is ignored; the signals still end
children. The process may be a holder, and a scheduler that signals all processes would end all holders. The
main thread may hang, where no Python handler runs; so the adaptor reads the byte that the interpreter writes
into a pipe at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec

from adaptor import context, output, text, threads
from adaptor.descriptors import Descriptors
from adaptor.protocol import environment, wire
from adaptor.protocol.environment import ending_signals
from adaptor.protocol.messages import (
    BusyProbe,
    BusyReport,
    Dump,
    EndScript,
    Exit,
    Freeze,
    FromWorker,
    Frozen,
    Hello,
    ModulesProbe,
    Phase,
    PresenceProbe,
    Present,
    Proceed,
    Regroup,
    RegroupFailed,
    Rename,
    Renamed,
    Standing,
    TerminationRequested,
    TimelineEvent,
    ToWorker,
)
from adaptor.worker import abort_collectives, dump_order, script_imports, stacks
from adaptor.worker.incident_marks import IncidentMarks, OpenRun
from adaptor.worker.session import Session

T = TypeVar("T")

# A worker ended after an incident of another rank has not failed: the agent knows the verdict.
EXIT_SURVIVOR = 0
EXIT_ORPHAN = 76
# The exit code of a worker that no longer reads its agent's orders, because of an error of the adaptor.
EXIT_DEAF = 77
# Threads of an incident: to freeze, to look at the main thread or its device, to dump, a thread for hanging
# work, a thread to read the begun collectives, and a thread in which the main thread may wait for a message
# (`adaptor.waits`). And a thread to look at imported modules, which may hang in an object of a module.
RESERVE = 7
# Descriptors of an incident: the files of some groups, and sockets to the holders of their shards.
DESCRIPTORS = 32
# The time for the last lines: shorter than the agent waits for the worker's end, if a terminal blocks.
LAST_LINES_S = 1.0
# In a hang: the time to read the position of the main thread, and the begun collectives, and to write
# both down. The file system may hang, and the controller waits for the answer.
LOOK_S = 1.0


class CannotRejoinError(Exception):
    """This rank cannot take part in an online recovery; the text says why, for the user."""


class MainThreadHangsError(CannotRejoinError):
    """The main thread waits for what will not come any more."""


class Processor:
    """Connects to the agent at `address` (an abstract unix socket) and serves it until the process ends."""

    def __init__(
        self, rank: int, address: str, timeout_s: float, store_port: int, stacks_folder: Path
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._stacks_folder = stacks_folder
        self._store_port = store_port
        self._outbox: queue.SimpleQueue[tuple[FromWorker, ...]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._end_signals = EndSignals(
            lambda name: self.say(TerminationRequested(self._rank, name)), self._wake_writer
        )
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect("\0" + address)
        self._session: Session  # from `start` on
        self._current = (0, 0)  # the incident and the attempt of the newest order
        self._handlers: Any = None  # `mindio.job.Job`, where a script has its own save handlers
        self._rejoin: Any = None  # `online.rejoin.Rejoin`, where the training loop can be called again
        self._rejoin_is_known = threading.Event()
        self.exit_code = EXIT_SURVIVOR
        self._descriptors = Descriptors(DESCRIPTORS)
        self._modules_probed = False
        self.held = ""  # shown for this rank if the verdict blames the rank

    def use_handlers(self, handlers: Any) -> None:
        """Let the script's own handlers name what was saved, and be told before the process ends."""
        self._handlers = handlers

    def start(self, session: Session) -> None:
        self._session = session
        self.say(Hello(self._rank, os.getpid()))
        threads.reserve.prepare(RESERVE)
        threading.Thread(target=self._serve, name="ttp-processor", daemon=True).start()

    def hear_signals(self) -> None:
        """Report the signals that end a job, and keep running; call on the main thread."""
        self._end_signals.install()

    def say(self, *messages: FromWorker) -> None:
        """Queue messages for the agent, to be sent together; from any thread."""
        self._outbox.put(messages)
        os.write(self._wake_writer, b"\0")

    def send(self, *messages: FromWorker) -> None:
        """Send messages to the agent before returning: the agent reads them even if this process dies."""
        self.say(*messages)
        with contextlib.suppress(OSError):  # the connection is broken: the thread that reads it ends
            self._send_queued()

    def tell_end_of_script(self) -> None:
        """Answer `EndScript`; from any thread."""
        self.say(Frozen(self._rank, self._current[0], self._session.board.record()))

    def _serve(self) -> None:
        try:
            self._hear()
        except (EOFError, OSError):
            # Nobody waits for this worker, or would end the worker. After the agent's death the kernel sends
            # SIGKILL (`worker_main.die_with_the_agent`): this branch is for a live agent that has closed.
            _leave(EXIT_ORPHAN)
        except BaseException as error:
            # This worker cannot answer any more; the agent learns of the error from the worker's end.
            output.tell(
                f"[ttp] rank {self._rank}: the thread that answers the agent has failed: {text.trace(error)}"
            )
            _leave(EXIT_DEAF)

    def _hear(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(self._wake_reader, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if self._wake_reader in ready:
                woken_by = os.read(self._wake_reader, 4096)
                self._end_signals.hear(woken_by)
                self._send_queued()
            if self._connection in ready:
                self._obey(wire.receive(self._connection, wire.to_worker))

    def _send_queued(self) -> None:
        with self._sending:
            while not self._outbox.empty():
                self._connection.sendall(b"".join(map(wire.frame, self._outbox.get_nowait())))

    def _obey(self, order: ToWorker) -> None:
        match order:
            case Freeze():
                self._descriptors.release()
                is_repeated = order.incident == self._current[0]
                if not is_repeated:  # a repeated order only asks for a sign of life
                    self._current = (order.incident, 0)
                    self._session.script_may_end.clear()
                    if self._rejoin is not None:
                        self._rejoin.freeze(order.incident)
                    # A lost controller may have let the main thread through: the answer must stay true.
                    self._session.door.let_through(None)
                self._in_thread("freeze", functools.partial(self._freeze, is_repeated=is_repeated), order)
            case Dump():
                self._current = (order.incident, order.attempt)
                # Here, not in a thread: in the order of the attempts, so that no older one opens the door.
                self._session.door.let_through(order.step)
                self._in_thread("dump", self._dump, order)
            case Regroup():
                self._current = (order.incident, order.attempt)
                self._session.door.let_through(order.step)
                self._in_thread("regroup", self._regroup, order)
            case Proceed():
                self.exit_code, self.held = EXIT_SURVIVOR, ""
                self._rejoin.proceed(order)
                self._descriptors = Descriptors(DESCRIPTORS)  # for the next incident
                context.part(IncidentMarks).add(order.line)  # for people: after all else
            case Rename():
                self._in_thread("rename", self._rename, order)
            case BusyProbe():
                self.say(BusyReport(self._rank, self._session.end_step_left_by_break() or stacks.busy()))
            case PresenceProbe():
                self.say(Present(self._rank, order.incident))
            case ModulesProbe():
                # The agent repeats the question until answered; a finished or hanging look is not repeated.
                if not self._modules_probed:
                    self._modules_probed = True
                    self._in_thread("modules", self._tell_modules, order)
            case EndScript():
                self._session.script_may_end.set()
            case Exit():
                self._send_queued()
                if self._handlers is not None:
                    self._handlers.leave()
                if order.blamed and self.held:
                    output.tell(self.held)
                context.part(OpenRun).end()  # for people: after all else
                _leave(self.exit_code)

    def _in_thread(self, name: str, act: Callable[[T], None], order: T) -> None:
        threads.reserve.run(f"ttp-{name}", functools.partial(self._do, act, order))

    def _do(self, act: Callable[[T], None], order: T) -> None:
        """Run `act`; after an error the order stays unanswered, and its time limit decides."""
        try:
            act(order)
        except Exception as error:
            self._note("failed", f"{type(order).__name__}: {text.describe(error)}")
            output.tell(
                f"[ttp] rank {self._rank}: the order {type(order).__name__} has failed: {text.trace(error)}"
            )

    def _note(self, event_name: str, detail: str = "") -> None:
        self.say(self._event(event_name, detail))

    def _say_noted(self, message: FromWorker, event_name: str, detail: str) -> None:
        self.say(self._event(event_name, detail), message)

    def _event(self, event_name: str, detail: str) -> TimelineEvent:
        return TimelineEvent(self._rank, self._current[0], time.time(), event_name, detail)

    def _freeze(self, order: Freeze, is_repeated: bool) -> None:
        standing = self._look(order.incident) if order.stacks else None
        board = self._session.freezer.freeze(self._timeout_s / 2, is_repeated)
        if board is not None:  # None: this rank is no holder, and the controller does not wait longer
            if board.phase == Phase.UNREADABLE:
                self._note("unreadable", board.error)
            if self._rejoin is not None:
                board = msgspec.structs.replace(board, copies=self._rejoin.copied_steps())
            self.say(Frozen(self._rank, order.incident, board, standing))

    def _look(self, incident: int) -> Standing | None:
        """Read the position of the main thread before any answer, because the answer may release or end the
        main thread.

        The recorded collectives are read at the same time, with the same limit: after the answers of all
        ranks the incident, and this process, may be over within a tenth of a second.
        """
        until = time.monotonic() + LOOK_S
        collectives = threads.Background(lambda: self._note_collectives(incident), "ttp-collectives")
        path = environment.stack_folder_of(self._stacks_folder, incident) / f"rank{self._rank}.txt"
        standing = stacks.look(path, LOOK_S, lambda: self._note("stacks", str(path)))
        collectives.within(max(0.0, until - time.monotonic()))
        return standing

    def _tell_modules(self, _probe: ModulesProbe) -> None:
        """Report the imported modules, foreign objects, which may raise anything, or hang."""
        try:
            module_report = script_imports.modules_of_this_process(self._rank)
        except BaseException as error:
            output.tell(
                f"[ttp] rank {self._rank}: no spare process waits on its node: what it has imported cannot be"
                f" listed: {text.trace(error)}"
            )
        else:
            self.say(module_report)

    def _note_collectives(self, incident: int) -> None:
        """Report the collectives begun by this rank; a hang may keep the thread."""
        path = (
            environment.stack_folder_of(self._stacks_folder, incident) / f"rank{self._rank}.collectives.json"
        )
        with contextlib.suppress(Exception):  # the record is for people; the save goes on without the record
            if collectives_text := stacks.write_collectives(path):
                self._note("collectives", collectives_text)

    def _dump(self, order: Dump) -> None:
        dump_order.follow(
            order,
            self._rank,
            self._session,
            store_port=self._store_port,
            is_current=lambda: self._current == (order.incident, order.attempt),
            sockets=self._rejoin.sockets if self._rejoin is not None else lambda: None,
            say=self._say_noted,
            note=self._note,
        )

    def go_round_by(self, rejoin: Any) -> None:
        """Set how the training loop is called again, at the start of a worker; None: not at all."""
        self._rejoin = rejoin
        self._rejoin_is_known.set()

    def _regroup(self, order: Regroup) -> None:
        keep = frozenset({self._store_port, order.store_port})
        try:
            self._rejoin_is_known.wait(order.timeout_s)  # a new process is told at once
            if self._rejoin is None:
                raise CannotRejoinError("its training loop cannot be called again")
            self._rejoin.regroup(order, abort_collectives.Waker(keep))
        except Exception as error:
            if self._current == (order.incident, order.attempt):
                self.say(failed(self._rank, order, error))

    def _rename(self, order: Rename) -> None:
        reason = ""
        try:
            self._handlers.name(order.step)
        except (Exception, SystemExit) as error:  # the script's own exception decides the end of the job
            reason = text.describe(error)
        self.say(Renamed(self._rank, order.incident, reason))


def failed(rank: int, order: Regroup, error: Exception) -> RegroupFailed:
    """Return the answer of `rank` when `error` prevents `order`."""
    is_own = isinstance(error, CannotRejoinError)
    return RegroupFailed(
        rank,
        order.incident,
        order.attempt,
        text.say(error) if is_own else text.describe(error),
        is_replaceable=isinstance(error, MainThreadHangsError),
        may_be_echo=not is_own,
    )


def _leave(code: int) -> None:
    """End the process now: the main thread may hang for ever, and nothing of it is needed any more."""
    output.leave(code, LAST_LINES_S)


class EndSignals:
    """The handlers of the signals that end a job, in this process.

    Args:
        report: tells the agent the name of a signal, from any thread; a second report has no effect.
        wake_writer: the pipe into which the interpreter writes signal numbers.
    """

    def __init__(self, report: Callable[[str], None], wake_writer: int) -> None:
        self._report = report
        self._wake_writer = wake_writer
        self._handlers: dict[signal.Signals, object] = {}  # the handlers of children

    def install(self) -> None:
        """Take the signals; call on the main thread."""
        for number in ending_signals():
            handler = signal.getsignal(number)
            if handler is signal.SIG_IGN:
                continue
            self._handlers[number] = handler
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        taken = self._handlers.keys()
        # A signal to a child waits until the child has set its own handler.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, taken),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, taken),
            after_in_child=self._give_back_in_child,
        )

    def hear(self, numbers: bytes) -> None:
        """Report the signals among `numbers`, which were read from the pipe."""
        for number in self._handlers:
            if number in numbers and self._is_taken(number):
                self._report(number.name)

    def _is_taken(self, number: signal.Signals) -> bool:
        return signal.getsignal(number) == self._on_signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Report a signal if a script has taken the pipe away."""
        self._report(signal.Signals(number).name)

    def _give_back_in_child(self) -> None:
        for number, handler in self._handlers.items():
            if self._is_taken(number):
                signal.set_wakeup_fd(-1)
                signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal has returned
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers.keys())

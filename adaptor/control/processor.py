"""The processor: the thread of a worker that answers its agent.

It alone reads and writes the connection (other threads queue what they want said), so nothing here breaks on
a fork. Freezing and dumping may take long, so each runs in a thread of its own and the processor stays able
to hear that a newer attempt has replaced it, or that it is time to exit.
"""

from __future__ import annotations

import functools
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from adaptor.control import stacks, wake, wire
from adaptor.control.messages import (
    Dump,
    Exit,
    Freeze,
    FromWorker,
    Frozen,
    GroupOrder,
    Hello,
    Look,
    Looked,
    Noted,
    Phase,
    Rename,
    Renamed,
    Standing,
    Told,
    ToWorker,
    WriteFailed,
    Written,
)
from adaptor.control.session import DumpRun, NotFiniteError, Session

# A worker that is ended after an incident it did not cause has not failed: its agent knows the verdict.
EXIT_SURVIVOR = 0
EXIT_ORPHAN = 76
# Where a job hangs: so long it may take to find out where the main thread stands, and to write it down. The
# file system may be what hangs, and an answer is waited for.
LOOK_S = 1.0


class Processor:
    """Connects to the agent at `address` (an abstract unix socket) and serves it until the process ends."""

    def __init__(
        self, rank: int, address: str, timeout_s: float, store_port: int, stacks_folder: Path
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._stacks_folder = stacks_folder
        self._store_port = store_port
        self._outbox: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect("\0" + address)
        self._session: Session | None = None
        self._current = (0, 0)  # the incident and the attempt of the newest order
        # Of a script whose own handlers write what is saved.
        self.rename: Callable[[int], None] | None = None
        self.before_exit: Callable[[], None] = lambda: None
        self.exit_code = EXIT_SURVIVOR

    def start(self, session: Session) -> None:
        self._session = session
        self.say(Hello(self._rank, os.getpid()))
        threading.Thread(target=self._serve, name="ttp-processor", daemon=True).start()

    def hear_signals(self) -> None:
        """On the main thread: from now on SIGTERM does not end this process, the agent is told of it.

        It may be a holder, and whoever ends a whole job by signals would end all holders. The main thread may
        hang, where no handler of Python's runs; so what counts is what the interpreter writes into a pipe at
        once. A script that sets a handler of its own has its way. Children end as they ever did.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.siginterrupt(signal.SIGTERM, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        # What is sent to a child before it has put its own handler in place waits for that.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
            after_in_child=self._hear_no_signals,
        )

    @property
    def _hears_sigterm(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """For a script that has taken the pipe away; whoever is told twice hears it once."""
        self.say(Told(self._rank, "SIGTERM"))

    def _hear_no_signals(self) -> None:
        if self._hears_sigterm:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def say(self, message: FromWorker) -> None:
        """Queue a message for the agent; from any thread."""
        self._outbox.put(message)
        os.write(self._wake_writer, b"\0")

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(self._wake_reader, selectors.EVENT_READ)
        try:
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_reader in ready:
                    woken_by = os.read(self._wake_reader, 4096)
                    if signal.SIGTERM in woken_by and self._hears_sigterm:
                        self._outbox.put(Told(self._rank, "SIGTERM"))
                    self._send_queued()
                if self._connection in ready:
                    self._obey(wire.receive(self._connection, wire.to_worker))
        except (EOFError, OSError):
            # Without its agent nobody waits for this worker, and nobody would end it.
            _leave(EXIT_ORPHAN)

    def _send_queued(self) -> None:
        while not self._outbox.empty():
            self._connection.sendall(wire.frame(self._outbox.get_nowait()))

    def _obey(self, order: ToWorker) -> None:
        match order:
            case Freeze():
                assert self._session is not None
                again = order.incident == self._current[0]
                if not again:  # else it is asked whether it is there
                    self._current = (order.incident, 0)
                    # A controller that is lost may have let the main thread through: what is told must hold.
                    self._session.let_through(None)
                self._in_thread("freeze", functools.partial(self._freeze, again=again), order)
            case Dump():
                self._current = (order.incident, order.attempt)
                assert self._session is not None
                # Here, not in a thread: in the order of the attempts, so that no older one opens the door.
                self._session.let_through(order.step)
                self._in_thread("dump", self._dump, order)
            case Rename():
                self._in_thread("rename", self._rename, order)
            case Look():
                self.say(Looked(self._rank, stacks.takes_its_time()))
            case Exit():
                self._send_queued()
                self.before_exit()
                _leave(self.exit_code)

    def _in_thread(self, name: str, act: Callable[[Any], None], order: ToWorker) -> None:
        threading.Thread(target=act, args=(order,), name=f"ttp-{name}", daemon=True).start()

    def _note(self, what: str, detail: str = "") -> None:
        self.say(Noted(self._rank, self._current[0], time.time(), what, detail))

    def _freeze(self, order: Freeze, again: bool) -> None:
        assert self._session is not None
        standing = self._look() if order.stacks else None
        board = self._session.freeze(self._timeout_s / 2, again)
        if board is not None:  # else this rank is no holder: the controller does not wait longer than that
            if board.phase == Phase.UNREADABLE:
                self._note("unreadable", board.error)
            self.say(Frozen(self._rank, order.incident, board, standing))

    def _look(self) -> Standing | None:
        """Before anything is answered: an answer may let the main thread go on, or end this process."""
        path = self._stacks_folder / f"rank{self._rank}.txt"
        return stacks.look(path, LOOK_S, lambda: self._note("stacks", str(path)))

    def _is_current(self, order: Dump) -> bool:
        return self._current == (order.incident, order.attempt)

    def _dump(self, order: Dump) -> None:
        session = self._session
        assert session is not None
        assert session.trainee is not None
        group = order.groups[0]
        try:
            behind = session.board.finished < order.step
            keep = frozenset({self._store_port, order.store_port})
            session.bring_to(order.step, lambda: wake.shut_collectives(keep), order.timeout_s)
            past = session.is_past(order.step)
            if behind or past:
                self._note("from-the-local-copy" if past else "through-the-door", f"step {order.step}")
            record = session.record_of(order.step)
            for group in order.groups:
                remarks: list[str] = []
                run = DumpRun(
                    rank=self._rank,
                    folder=order.folder,
                    attempt=order.attempt,
                    connect=lambda ranks, group=group: _connect(order, group, self._rank, ranks),  # type: ignore[misc]
                    progress=session.board.advance,
                    cancelled=lambda: not self._is_current(order),
                    as_is=group.group in order.as_is,
                    remark=remarks.append,
                    past=past,
                    groups=order.groups,
                    wake=lambda: wake.shut_collectives(keep),
                )
                files = session.trainee.dump(record, group, run)
                if group.writer == self._rank:
                    not_finite = "; ".join(filter(None, remarks))
                    self._note("written", f"{group.group}; {not_finite}" if not_finite else group.group)
                    self.say(
                        Written(self._rank, order.incident, order.attempt, group.group, files, not_finite)
                    )
                else:
                    self._note("gathered", group.group)
        except (Exception, SystemExit) as error:  # whatever it was, the controller decides what comes next
            if self._is_current(order):
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                doubted = error.ranks if isinstance(error, NotFiniteError) else ()
                self._note("failed", reason)
                where = (order.incident, order.attempt, group.group)
                self.say(WriteFailed(self._rank, *where, reason, session.board.record(), doubted))

    def _rename(self, order: Rename) -> None:
        reason = ""
        try:
            assert self.rename is not None
            self.rename(order.step)
        except (Exception, SystemExit) as error:  # the script's own: it decides what the job ends with
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self.say(Renamed(self._rank, order.incident, reason))


def _connect(order: Dump, group: GroupOrder, rank: int, ranks: tuple[int, ...]) -> Any:
    """A gloo group of `ranks` that owes nothing to the groups of the framework."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=order.timeout_s)
    store = TCPStore(order.store_host, order.store_port, is_master=False, timeout=timeout)
    prefix = f"ttp/{order.incident}/{order.attempt}/{group.group}"
    return ProcessGroupGloo(PrefixStore(prefix, store), ranks.index(rank), len(ranks), timeout)


def _leave(code: int) -> None:
    """End the process now: the main thread may hang for ever, and nothing of it is needed any more."""
    os._exit(code)

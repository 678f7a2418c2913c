"""A platform that starts a process for each card: on each node one process runs the agent, the others wait.

The other processes connect to an abstract socket of the first process and get its exit code. So nothing
remains in a file system, and a killed process cannot be taken for a running process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import TracebackType

from adaptor import output
from adaptor.launchers.platforms.reading import Card, Machine, PlatformError
from adaptor.protocol.authentication import is_same_user

# The platform starts the processes of a node together; a process that comes late to a job that failed at once
# still gets the exit code.
LATE_S = 30.0
_KILLED = 1
# Variables for one card; workers of the node must not see them.
OF_A_CARD = ("RANK_ID", "ASCEND_DEVICE_ID", "DEVICE_ID")


class First:
    """The process that runs the agent of the node; a context whose end tells the others.

    Args:
        card: the place of this process.
        late_s: seconds for which `tell` waits for processes that have not connected yet.

    Raises:
        PlatformError: another process of this job already is the first.
    """

    def __init__(self, card: Card, late_s: float = LATE_S) -> None:
        self._others = card.count - 1
        self._late_s = late_s
        self._connections: list[socket.socket] = []
        self._changed = threading.Condition()
        self._told = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_name(card))
        except OSError as error:
            self._listener.close()
            raise PlatformError(
                f"this process has the first card of its node, but cannot be met there ({error.strerror}): is"
                " another one running?"
            ) from None
        self._listener.listen(card.count)
        threading.Thread(target=self._accept, name="ttp-cards", daemon=True).start()

    def __enter__(self) -> First:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tell(_KILLED)

    def tell(self, code: int) -> None:
        """Send the exit code to all other processes and close; only the first call counts."""
        if self._told:
            return
        self._told = True
        deadline = time.monotonic() + self._late_s
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._connections) >= self._others, max(deadline - time.monotonic(), 0)
            )
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.sendall(bytes([code & 0xFF]))
            except OSError:  # the process has ended
                pass
            connection.close()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if not is_same_user(connection):
                connection.close()
                continue
            with self._changed:
                self._connections.append(connection)
                self._changed.notify()


def wait_for_first(card: Card, machine: Machine) -> int:
    """Wait in another process until the agent has ended; return the exit code of the agent.

    A platform ends a job by SIGTERM to all processes: the agent saves, and this process ends with the agent.

    Raises:
        PlatformError: the first process was not started.
    """
    connection = _connect(card, machine)
    for sent in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sent, signal.SIG_IGN)
    machine.tell(f"[ttp] card {card.index} of {card.count} of this node: the process of card 0 runs ttprun")
    return _code_of_first(connection)


def _code_of_first(connection: socket.socket) -> int:
    with connection:
        try:
            code = connection.recv(1)
        except OSError:
            code = b""
    if not code:
        output.tell("[ttp] the process of card 0 was ended before it told its exit code")
        return _KILLED
    return code[0]


def _connect(card: Card, machine: Machine) -> socket.socket:
    connections: list[socket.socket] = []

    def connected() -> str:
        attempt = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            attempt.connect(_name(card))
            if is_same_user(attempt):
                connections.append(attempt)
                return ""
        except OSError:
            pass
        attempt.close()
        return "the process of card 0 of this node"

    machine.wait(connected)
    return connections[0]


def _name(card: Card) -> str:
    return f"\0ttp-card-0-{os.getuid()}-{card.job}"

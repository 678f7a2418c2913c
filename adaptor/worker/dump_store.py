"""The worker's end of the store over which the survivors of a dump find each other.

torch's own stores authenticate nobody, so any client could give gloo other addresses, fill the store's
memory, or block the store with half a message. The dump store is a part of the controller's agent
(`DumpStoreServer` in `launchers.control.dump_store_server`); an order to dump carries the store's address and
secret.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo, Store

from adaptor.protocol import wire
from adaptor.protocol.messages import Endpoint
from adaptor.protocol.wire import Ask, Keep, from_store, is_same_user

# Between two attempts, the pause of a rejected agent, too.
PAUSE_S = 0.2
# The store closed the connection before the proof was complete, or the store's queue was full.
_TURNED_OUT = (EOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError, BlockingIOError)


class DumpStore(Store):
    """A torch store with the three calls of gloo: `set`, `wait` and `get`.

    Used by a single thread, until `rest`. Must live as long as the process group.

    Args:
        place: the address of the store; port 0: an abstract unix socket.
        secret: both sides prove knowledge of the secret.
        timeout_s: seconds for connecting, and for each wait without a time-out of its own.

    Raises:
        OSError, EOFError: no store listens there, or the store does not accept within `timeout_s`.
    """

    def __init__(self, place: Endpoint, secret: bytes, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._place = place
        self._secret = secret
        self._connection: socket.socket | None = _connect(place, secret, timeout_s)
        self._lock = threading.Lock()
        self._calls: set[socket.socket] = set()  # the connections of current calls, after `rest`
        self._is_abandoned = False

    def set(self, key: str, value: Any) -> None:
        """Let others find `value` under `key`."""
        with self._connected() as connection:
            connection.settimeout(self._timeout_s)
            connection.sendall(wire.frame(Keep(key, bytes(value))))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when the store has all `keys`. Raises TimeoutError: keys are missing after `timeout`."""
        until = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        missing = [key for key in keys if key not in self._values]
        if not missing:
            return
        with self._connected() as connection:
            for key in missing:
                self._ask(connection, key, until)

    def _ask(self, connection: socket.socket, key: str, until: float) -> None:
        if key in self._values:  # the value came with the answer to another key
            return
        connection.sendall(wire.frame(Ask(key)))
        try:
            while key not in self._values:
                connection.settimeout(max(until - time.monotonic(), 0.001))
                self._values.update(wire.receive(connection, from_store).values)
        except TimeoutError:
            raise TimeoutError(
                f"a rank has not come to the store ({key.rpartition('/')[2]} is not there)"
            ) from None

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether this end knows all `keys`; torch calls the method."""
        return all(key in self._values for key in keys)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        connection = self._connection
        if connection is not None:
            yield connection
            return
        try:
            with _connect(self._place, self._secret, self._timeout_s) as connection:
                with self._lock:
                    if self._is_abandoned:
                        raise ConnectionAbortedError("the meeting of the ranks is over")
                    self._calls.add(connection)
                try:
                    yield connection
                finally:
                    with self._lock:
                        self._calls.discard(connection)
        except (OSError, EOFError) as error:
            # The error of torch's own store: the failure follows from the fault of another process.
            raise DistStoreError(f"the store at which the ranks meet: {error}") from error

    def rest(self, timeout_s: float) -> None:
        """Close the connection; from now on each call opens a connection of its own, from any thread.

        A call then raises torch's DistStoreError in the place of OSError and EOFError.

        Args:
            timeout_s: seconds for connecting, and for each wait without a time-out of its own.
        """
        self.close()
        self._connection, self._timeout_s = None, timeout_s

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def abandon(self) -> None:
        """Make waiting threads raise, and after `rest` later callers, too; from any thread."""
        with self._lock:
            self._is_abandoned = True
            waiting = self._calls if self._connection is None else {self._connection}
            for connection in waiting:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def meet(store: Store, prefix: str, rank: int, size: int, timeout_s: float) -> ProcessGroupGloo:
    """Return a gloo group of `size` processes, independent of the framework's groups.

    The processes find each other in `store` below `prefix`; a collective may take `timeout_s` seconds.
    """
    return ProcessGroupGloo(PrefixStore(prefix, store), rank, size, timedelta(seconds=timeout_s))


def _connect(place: Endpoint, secret: bytes, timeout_s: float) -> socket.socket:
    """Return a connection on which both sides have proved knowledge of the secret.

    A store with more clients than it can serve at once rejects some; rejected clients connect again.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return _connect_once(place, secret, max(until - time.monotonic(), 0.001))
        except _TURNED_OUT:
            if time.monotonic() + PAUSE_S >= until:
                raise
            time.sleep(PAUSE_S)


def _connect_once(place: Endpoint, secret: bytes, timeout_s: float) -> socket.socket:
    connection = _reach(place, timeout_s)
    try:
        connection.settimeout(timeout_s)
        wire.prove_agent_blocking(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def _reach(place: Endpoint, timeout_s: float) -> socket.socket:
    if place.port:
        return socket.create_connection((place.address, place.port), timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{place.address}")
        if not is_same_user(connection):
            raise ConnectionError("another user listens at the address of the store")
    except BaseException:
        connection.close()
        raise
    return connection

"""The check of `ttp doctor --nodes` that connects nodes: each listens, and each connects to all others.

It listens on TTP_PORT, where agents reach a controller, on the port of the rendezvous, and on one that the
system chooses, as gloo and NCCL do; over TLS where the job has certificates. Whoever connects gets a greeting
and nothing else.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from adaptor.launchers.control.agent_listener import bind
from adaptor.launchers.control.tls import Contexts
from adaptor.launchers.doctor.finding import Finding

_GREETING = b"ttp-doctor"
# Nodes of one job answer in milliseconds; a firewall that drops packets never does.
CONNECT_S = 3.0
# With 1,000 nodes behind such a firewall it takes a minute and a half, within the time in which nodes meet.
_AT_ONCE = 64
_REMEDY = (
    "open TCP between the nodes: TTP_PORT, the port of the rendezvous, and those that systems choose"
    " (net.ipv4.ip_local_port_range)"
)


class Peer(NamedTuple):
    """Another node: its name, where it is reached, and its ports."""

    host: str
    address: str
    ports: tuple[int, ...]


class Listening:
    """The ports on which this node listens until `close`.

    Args:
        ports: TTP_PORT and that of the rendezvous; one is left out where another program has it.
        contexts: of the certificates; None: without TLS.
    """

    def __init__(self, ports: Sequence[int], contexts: Contexts | None) -> None:
        self._contexts = contexts
        self._selector = selectors.DefaultSelector()
        self.ports: list[int] = []
        for wanted_port in (*dict.fromkeys(ports), 0):
            with contextlib.suppress(OSError):
                listeners = bind("", wanted_port)
                self.ports.append(int(listeners[0].getsockname()[1]))
                for listener in listeners:
                    self._selector.register(listener, selectors.EVENT_READ)
        self._wake, self._ends = socket.socketpair()
        self._selector.register(self._ends, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._accept, name="ttp-doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._wake.send(b".")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._wake.close()

    def _accept(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ends:
                    return
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    connection, _ = key.fileobj.accept()
                    connection.settimeout(CONNECT_S)
                    # Each in a thread of its own: one that says nothing keeps no other waiting.
                    threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._contexts is None:
                connection.sendall(_GREETING)
                return
            with self._contexts.server.wrap_socket(connection, server_side=True) as secured:
                secured.sendall(_GREETING)


def reach(peers: Sequence[Peer], contexts: Contexts | None) -> Iterator[Finding]:
    """Connect to all ports of all peers.

    Args:
        peers: all other nodes.
        contexts: of the certificates; None: without TLS.
    """
    connections_tried = [(peer, port) for peer in peers for port in peer.ports if peer.address]
    if not connections_tried:
        yield Finding("ports", "WARN", "no other node says where it listens: connections were not tried")
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(
            pool.map(
                lambda peer_and_port: _why_not(peer_and_port[0].address, peer_and_port[1], contexts),
                connections_tried,
            )
        )
    wrong = [
        (peer, port, reason)
        for (peer, port), reason in zip(connections_tried, answers, strict=True)
        if reason
    ]
    for peer, port, reason in wrong:
        description = f"port {port} of {peer.host} ({peer.address}) cannot be reached from here: {reason}"
        yield Finding(
            "ports",
            "FAIL",
            description,
            _REMEDY if "TLS" not in reason else "give all nodes certificates of one signer",
        )
    if not wrong:
        count, over_tls = len({peer for peer, _ in connections_tried}), " over TLS" if contexts else ""
        yield Finding(
            "ports",
            "OK",
            f"this node has reached {count} others{over_tls}, {len(connections_tried)} ports in all",
        )


def _why_not(address: str, port: int, contexts: Contexts | None) -> str:
    """Return why a port of a node cannot be reached; '' if it can."""
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((address, port), CONNECT_S))
            if contexts is not None:
                connection = stack.enter_context(contexts.client.wrap_socket(connection))
            if connection.recv(len(_GREETING)) == _GREETING:
                return ""
            return "another program answers, or one side has TLS and the other has not"
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except ssl.SSLError as error:
        return f"TLS is refused ({error.reason or 'the connection ended'})"
    except OSError as error:
        return error.strerror or "the connection broke"

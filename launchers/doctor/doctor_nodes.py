"""The checks of `ttp doctor` that need all nodes at once: ports, locks, clocks and routes between nodes.

Each node rewrites a file in a subfolder of the save folder, with its clock, until each node has read the
files of all others. Meanwhile one node holds a lock that no other node may get.

Each node listens on TTP_PORT, where agents reach a controller, on the rendezvous port, and on a port chosen
by the system, as gloo and NCCL do; over TLS where the job has certificates. A client gets only a greeting.

Invariants: a file without a living writer counts for nothing; a node waits at most `MEET_S` for the others;
the folder is removed last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from adaptor.checkpoint import disk
from adaptor.config import Config
from adaptor.launchers.cli.start_checks import INTERFACES
from adaptor.launchers.control import credentials
from adaptor.launchers.control.agent_connections import bind
from adaptor.launchers.control.credentials import Contexts
from adaptor.launchers.doctor.doctor_job import CheckResult

# srun starts its tasks within seconds; a client of NFS sees a new file after its cache of a minute at most.
MEET_S = 120.0
_PAUSE_S = 0.1
# A new name is looked up until DNS caches have forgotten its absence.
NAME_S = 35.0
# Only reports for people compare times of nodes; their events are out of order by as much.
SKEW_S = 1.0
# The variables of the meeting address that torch's launcher reads.
_MEETING_POINTS = ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
# Asks for the address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915


class _NodeFile(msgspec.Struct):
    """The content of the file of a node.

    Attributes:
        clock: the time of writing, in Unix seconds by the node's own clock
        count: the number of writes
        address: where other nodes reach the node; '' if unknown
        stage: present; locked: holds the lock for the others to try; done: needs nothing more
        ports: on which the node listens, for the others to try
        tried: the node has tried the ports of all others
    """

    host: str
    clock: float
    count: int
    address: str
    stage: str
    ports: list[int] = []
    tried: bool = False


class _Meeting:
    """The files of all nodes that run the doctor."""

    def __init__(self, place: Path, nodes: int) -> None:
        self._place = place
        self._nodes = nodes
        self._until = time.monotonic() + MEET_S
        host = socket.gethostname()
        self.name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}.node"
        self.own = _NodeFile(host, 0.0, 0, _own_address(), "present")
        self._first: dict[str, int] = {}  # the first count read from each file
        self.others: dict[str, _NodeFile] = {}  # the newest content of each file
        self.there: set[str] = set()  # the files at the last look
        self.ahead: dict[str, float] = {}  # the least seconds by which a node's clock is ahead

    def wait(self, is_done: Callable[[], bool], limit_s: float = MEET_S) -> bool:
        """Write and read until `is_done`; return False after `limit_s` seconds."""
        until = min(self._until, time.monotonic() + limit_s)
        while True:
            self._write()
            self._read()
            if len(self.others) == self._nodes - 1 and is_done():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_S)  # the file system does not announce new files

    def leave(self) -> None:
        """Remove the node's file, and the folder after the last file."""
        with contextlib.suppress(OSError):
            (self._place / self.name).unlink()
        with contextlib.suppress(FileNotFoundError):  # another node that leaves has removed the folder
            if not any(self._place.glob("*.node")):
                disk.remove(self._place)

    def _write(self) -> None:
        self.own.count += 1
        self.own.clock = time.time()
        scratch = self._place / f"{self.name}.new"
        scratch.write_bytes(msgspec.json.encode(self.own))
        scratch.replace(self._place / self.name)

    def _read(self) -> None:
        paths = list(self._place.glob("*.node"))
        self.there = {path.name for path in paths}
        for path in paths:
            try:
                node = msgspec.json.decode(path.read_bytes(), type=_NodeFile)
            except (OSError, msgspec.MsgspecError):
                continue  # the node has just left, or the file is of another kind
            time_now = time.time()
            if path.name == self.name or self._first.setdefault(path.name, node.count) == node.count:
                continue
            self.others[path.name] = node
            self.ahead[path.name] = max(self.ahead.get(path.name, 0.0), node.clock - time_now)


def between(folder: Path, nodes: int, settings: Config, rendezvous_port: int) -> Iterator[CheckResult]:
    """Meet the other nodes, and try the connections between nodes.

    Args:
        folder: the shared folder in which nodes meet.
        settings: with TTP_PORT and the certificates.

    Raises:
        ConfigError: the certificates cannot be used.
    """
    certificates = credentials.load(settings)
    contexts = certificates.contexts if certificates is not None else None
    place = folder / f"{disk.PROBE}doctor_nodes"
    folder.mkdir(parents=True, exist_ok=True)
    place.mkdir(exist_ok=True)
    meeting = _Meeting(place, nodes)
    listening = Listening((settings.port, rendezvous_port), contexts)
    meeting.own.ports = listening.ports
    try:
        if not meeting.wait(lambda: True):
            hosts_met = ", ".join(sorted(node.host for node in meeting.others.values())) or "no other node"
            description = f"{hosts_met} of {nodes - 1} others met this one in {folder} within {MEET_S:.0f} s"
            remedy = "run it on all nodes at once (srun), with a --save that all of them share"
            yield CheckResult("nodes", "FAIL", description, remedy)
            return
        yield CheckResult("nodes", "OK", f"{nodes} nodes share {folder}")
        yield from _ports(meeting, contexts)
        yield _lock(place, meeting)
        yield _clocks(meeting)
        yield from _routes(meeting)
        yield from _rendezvous(meeting)
    finally:
        listening.close()
        meeting.leave()


def _ports(meeting: _Meeting, contexts: credentials.Contexts | None) -> Iterator[CheckResult]:
    """Connect to all other nodes; no node stops listening before all have tried."""
    other_nodes = sorted(meeting.others.values(), key=lambda node: node.host)
    yield from reach([Peer(node.host, node.address, tuple(node.ports)) for node in other_nodes], contexts)
    meeting.own.tried = True
    if not meeting.wait(lambda: all(node.tried or not node.ports for node in meeting.others.values())):
        yield CheckResult(
            "ports", "WARN", "the other nodes did not finish trying their connections", "run it again"
        )


def _lock(place: Path, meeting: _Meeting) -> CheckResult:
    """Try whether the lock of one node keeps the others out; no node leaves before all have tried."""
    holder = min(meeting.name, *meeting.others)
    remedy = "mount it so that locks reach all nodes (Lustre: -o flock, not localflock; NFS: no nolock)"
    late = CheckResult("locks", "WARN", "the other nodes did not finish trying a lock", "run it again")
    with (place / "lock").open("a") as file:
        if holder == meeting.name:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return CheckResult("locks", "FAIL", f"flock does not work ({error.strerror})", remedy)
            meeting.own.stage = "locked"
            if not meeting.wait(lambda: all(node.stage == "done" for node in meeting.others.values())):
                return late
            return CheckResult("locks", "OK", "this node held a lock, which the others tried to get")
        if not meeting.wait(lambda: meeting.others[holder].stage == "locked" or holder not in meeting.there):
            return late
        holder_host = meeting.others[holder].host
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            finding = CheckResult("locks", "OK", f"a lock of {holder_host} keeps this node out")
        except OSError as error:
            finding = CheckResult("locks", "FAIL", f"flock does not work ({error.strerror})", remedy)
        else:
            fcntl.flock(file, fcntl.LOCK_UN)
            finding = CheckResult("locks", "FAIL", f"this node got a lock that {holder_host} holds", remedy)
        meeting.own.stage = "done"
        return finding if meeting.wait(lambda: holder not in meeting.there) else late


def _clocks(meeting: _Meeting) -> CheckResult:
    """Compare clocks: a time written before the read may not be later than now."""
    name, most_ahead_s = max(meeting.ahead.items(), key=lambda pair: pair[1])
    if most_ahead_s < SKEW_S:
        return CheckResult("clocks", "OK", f"no clock of the others is ahead of this one by {SKEW_S:.0f} s")
    description = (
        f"the clock of {meeting.others[name].host} is ahead of this one by at least {most_ahead_s:.1f} s"
    )
    return CheckResult(
        "clocks", "WARN", description, "run chrony or ntpd: times in reports would be in a wrong order"
    )


def _routes(meeting: _Meeting) -> Iterator[CheckResult]:
    own_address = meeting.own.address
    wrong = 0
    for node in sorted(meeting.others.values(), key=lambda node: node.host):
        leaves = _source(node.address)
        if own_address and leaves != own_address:
            wrong += 1
            route_text = (
                f"leaves from {leaves}" if leaves else f"does not exist (to {node.address or 'no address'})"
            )
            description = (
                f"the route to {node.host} {route_text}, and others reach this node at {own_address}"
            )
            yield CheckResult(
                "routes", "WARN", description, f"set {INTERFACES} to the interface that nodes share"
            )
    if not own_address:
        yield CheckResult("routes", "WARN", "this node has no address for others", f"set {INTERFACES}")
    elif not wrong:
        yield CheckResult(
            "routes", "OK", f"the routes to the others leave from {own_address}, where they reach this node"
        )


def _rendezvous(meeting: _Meeting) -> Iterator[CheckResult]:
    """Look up the meeting name of the job's nodes; the name of a pod is new in DNS."""
    variable = next((name for name in _MEETING_POINTS if os.environ.get(name)), None)
    if variable is None:
        return
    host = re.sub(r":\d+$", "", os.environ[variable])
    addresses_found: list[str] = []

    def is_known() -> bool:
        addresses_found[:] = _addresses(host)
        return bool(addresses_found)

    if not meeting.wait(is_known, NAME_S):
        remedy = "on Kubernetes a headless Service with publishNotReadyAddresses gives pods their names"
        yield CheckResult("rendezvous", "FAIL", f"{variable}: {host} has no address here", remedy)
        return
    nodes = [node.host for node in (meeting.own, *meeting.others.values()) if node.address in addresses_found]
    yield CheckResult("rendezvous", "OK", f"{variable}: {host} is {', '.join(nodes or addresses_found)}")


def _addresses(host: str) -> list[str]:
    """Return the addresses of `host`; none if unknown."""
    try:
        return sorted({str(at[0]) for *_, at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _own_address() -> str:
    """Return the address at which gloo would listen; '' if none."""
    named = os.environ.get(INTERFACES, "").split(",")[0]
    try:
        if not named:
            return socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
            request_answer = fcntl.ioctl(asks, _SIOCGIFADDR, struct.pack("256s", named.encode()))
            return socket.inet_ntoa(request_answer[20:24])
    except OSError:
        return ""


def _source(address: str) -> str:
    """Return the local address for packets to `address`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


_GREETING = b"ttp-doctor"
# Nodes of one job answer in milliseconds; a firewall that drops packets never answers.
CONNECT_S = 3.0
# With 1,000 nodes behind a firewall the check takes 90 s, within MEET_S.
_AT_ONCE = 64
_REMEDY = (
    "open TCP between the nodes: TTP_PORT, the port of the rendezvous, and those that systems choose"
    " (net.ipv4.ip_local_port_range)"
)


class Peer(NamedTuple):
    """Another node: name, address and ports."""

    host: str
    address: str
    ports: tuple[int, ...]


class Listening:
    """The ports on which this node listens until `close`.

    Args:
        ports: TTP_PORT and the rendezvous port; a port of another program is left out.
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
        """Stop listening."""
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
                    # One thread per connection: a silent client delays no other client.
                    threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._contexts is None:
                connection.sendall(_GREETING)
                return
            with self._contexts.server.wrap_socket(connection, server_side=True) as secured:
                secured.sendall(_GREETING)


def reach(peers: Sequence[Peer], contexts: Contexts | None) -> Iterator[CheckResult]:
    """Connect to all ports of all peers."""
    connections_tried = [(peer, port) for peer in peers for port in peer.ports if peer.address]
    if not connections_tried:
        yield CheckResult("ports", "WARN", "no other node says where it listens: connections were not tried")
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(
            pool.map(
                lambda peer_and_port: _unreachable_reason(
                    peer_and_port[0].address, peer_and_port[1], contexts
                ),
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
        yield CheckResult(
            "ports",
            "FAIL",
            description,
            _REMEDY if "TLS" not in reason else "give all nodes certificates of one signer",
        )
    if not wrong:
        count, over_tls = len({peer for peer, _ in connections_tried}), " over TLS" if contexts else ""
        yield CheckResult(
            "ports",
            "OK",
            f"this node has reached {count} others{over_tls}, {len(connections_tried)} ports in all",
        )


def _unreachable_reason(address: str, port: int, contexts: Contexts | None) -> str:
    """Return why a port of a node cannot be reached; '' if reachable."""
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

"""The checks of `ttp doctor` that need all nodes at once: ports, locks, clocks and routes between them.

Each node has a file in a folder of the save folder, which it writes anew all the time with its clock, until
each has found the files of all others. One of them holds a lock meanwhile, which the others may not get.

Invariants: a file that nobody writes any more, left by one that was killed, counts for nothing; a node waits
`MEET_S` for the others at most; the last thing that is removed is the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from adaptor.checkpoint import disk, folder_rights
from adaptor.config import Config
from adaptor.launchers.cli.start_checks import INTERFACES
from adaptor.launchers.control import tls
from adaptor.launchers.doctor import doctor_ports
from adaptor.launchers.doctor.doctor_ports import Peer
from adaptor.launchers.doctor.finding import Finding

# srun starts its tasks within seconds; a client of NFS sees a new file after its cache of a minute at most.
MEET_S = 120.0
_PAUSE_S = 0.1
# A name that is new is looked up until caches of DNS have forgotten that it was not there.
NAME_S = 35.0
# Times of nodes are compared for people alone: the events of a report are out of order by as much.
SKEW_S = 1.0
# Where the nodes of the job are to meet, as torch's launcher takes it from the environment.
_MEETING_POINTS = ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
# Asks for the address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915


class _Node(msgspec.Struct):
    """The content of the file of a node.

    Attributes:
        clock: when it wrote this, in Unix seconds by its own clock
        count: how often it has written
        address: where other nodes reach it; '' where that is not known
        stage: present; locked: it has the lock, for the others to try; done: it needs nothing more
        ports: on which it listens, for the others to try
        tried: it has tried those of all others
    """

    host: str
    clock: float
    count: int
    address: str
    stage: str
    ports: list[int] = []
    tried: bool = False


class _Meeting:
    """The files of all nodes that are at it."""

    def __init__(self, place: Path, nodes: int) -> None:
        self._place = place
        self._nodes = nodes
        self._until = time.monotonic() + MEET_S
        host = socket.gethostname()
        self.name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}.node"
        self.own = _Node(host, 0.0, 0, _own_address(), "present")
        self._first: dict[str, int] = {}  # the counts that were seen first, by the names of files
        self.others: dict[str, _Node] = {}  # by the names of their files, as each was read last
        self.there: set[str] = set()  # files that were there then
        self.ahead: dict[str, float] = {}  # by how much a clock is ahead of this node's, at least

    def wait(self, is_done: Callable[[], bool], limit_s: float = MEET_S) -> bool:
        """Write and read until `is_done`; return False when it has not come in time, at most `limit_s`."""
        until = min(self._until, time.monotonic() + limit_s)
        while True:
            self._write()
            self._read()
            if len(self.others) == self._nodes - 1 and is_done():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_S)  # a file of another node can only be looked for again

    def leave(self) -> None:
        """Remove the own file, and the folder after the last one."""
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
                node = msgspec.json.decode(path.read_bytes(), type=_Node)
            except (OSError, msgspec.MsgspecError):
                continue  # it has just left, or is another kind of file
            time_now = time.time()
            if path.name == self.name or self._first.setdefault(path.name, node.count) == node.count:
                continue
            self.others[path.name] = node
            self.ahead[path.name] = max(self.ahead.get(path.name, 0.0), node.clock - time_now)


def between(folder: Path, nodes: int, settings: Config, rendezvous_port: int) -> Iterator[Finding]:
    """Meet the other nodes, and try what they do together.

    Args:
        folder: in which they meet; they all have it.
        nodes: how many there are, this one included.
        settings: with TTP_PORT and the certificates.
        rendezvous_port: at which node 0 of the job will await the others.

    Raises:
        ConfigError: the certificates cannot be used.
    """
    certificates = tls.load(settings)
    contexts = certificates.contexts if certificates is not None else None
    place = folder / f"{folder_rights.PROBE}doctor_nodes"
    folder.mkdir(parents=True, exist_ok=True)
    place.mkdir(exist_ok=True)
    meeting = _Meeting(place, nodes)
    listening = doctor_ports.Listening((settings.port, rendezvous_port), contexts)
    meeting.own.ports = listening.ports
    try:
        if not meeting.wait(lambda: True):
            hosts_met = ", ".join(sorted(node.host for node in meeting.others.values())) or "no other node"
            description = f"{hosts_met} of {nodes - 1} others met this one in {folder} within {MEET_S:.0f} s"
            remedy = "run it on all nodes at once (srun), with a --save that all of them share"
            yield Finding("nodes", "FAIL", description, remedy)
            return
        yield Finding("nodes", "OK", f"{nodes} nodes share {folder}")
        yield from _ports(meeting, contexts)
        yield _lock(place, meeting)
        yield _clocks(meeting)
        yield from _routes(meeting)
        yield from _rendezvous(meeting)
    finally:
        listening.close()
        meeting.leave()


def _ports(meeting: _Meeting, contexts: tls.Contexts | None) -> Iterator[Finding]:
    """Connect to all others; nobody goes on, and ceases to listen, before all have tried."""
    other_nodes = sorted(meeting.others.values(), key=lambda node: node.host)
    yield from doctor_ports.reach(
        [Peer(node.host, node.address, tuple(node.ports)) for node in other_nodes], contexts
    )
    meeting.own.tried = True
    if not meeting.wait(lambda: all(node.tried or not node.ports for node in meeting.others.values())):
        yield Finding(
            "ports", "WARN", "the other nodes did not finish trying their connections", "run it again"
        )


def _lock(place: Path, meeting: _Meeting) -> Finding:
    """Try whether a lock of one node keeps the others out; nobody leaves before all have tried."""
    holder = min(meeting.name, *meeting.others)
    remedy = "mount it so that locks reach all nodes (Lustre: -o flock, not localflock; NFS: no nolock)"
    late = Finding("locks", "WARN", "the other nodes did not finish trying a lock", "run it again")
    with (place / "lock").open("a") as file:
        if holder == meeting.name:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return Finding("locks", "FAIL", f"flock does not work ({error.strerror})", remedy)
            meeting.own.stage = "locked"
            if not meeting.wait(lambda: all(node.stage == "done" for node in meeting.others.values())):
                return late
            return Finding("locks", "OK", "this node held a lock, which the others tried to get")
        if not meeting.wait(lambda: meeting.others[holder].stage == "locked" or holder not in meeting.there):
            return late
        holder_host = meeting.others[holder].host
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            finding = Finding("locks", "OK", f"a lock of {holder_host} keeps this node out")
        except OSError as error:
            finding = Finding("locks", "FAIL", f"flock does not work ({error.strerror})", remedy)
        else:
            fcntl.flock(file, fcntl.LOCK_UN)
            finding = Finding("locks", "FAIL", f"this node got a lock that {holder_host} holds", remedy)
        meeting.own.stage = "done"
        return finding if meeting.wait(lambda: holder not in meeting.there) else late


def _clocks(meeting: _Meeting) -> Finding:
    """Compare clocks: what another has written before it was read may not be later than now."""
    name, most_ahead_s = max(meeting.ahead.items(), key=lambda pair: pair[1])
    if most_ahead_s < SKEW_S:
        return Finding("clocks", "OK", f"no clock of the others is ahead of this one by {SKEW_S:.0f} s")
    description = (
        f"the clock of {meeting.others[name].host} is ahead of this one by at least {most_ahead_s:.1f} s"
    )
    return Finding(
        "clocks", "WARN", description, "run chrony or ntpd: times in reports would be in a wrong order"
    )


def _routes(meeting: _Meeting) -> Iterator[Finding]:
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
            yield Finding(
                "routes", "WARN", description, f"set {INTERFACES} to the interface that nodes share"
            )
    if not own_address:
        yield Finding("routes", "WARN", "this node has no address for others", f"set {INTERFACES}")
    elif not wrong:
        yield Finding(
            "routes", "OK", f"the routes to the others leave from {own_address}, where they reach this node"
        )


def _rendezvous(meeting: _Meeting) -> Iterator[Finding]:
    """Look up the name at which the nodes of the job are to meet; that of a pod is new in DNS."""
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
        yield Finding("rendezvous", "FAIL", f"{variable}: {host} has no address here", remedy)
        return
    nodes = [node.host for node in (meeting.own, *meeting.others.values()) if node.address in addresses_found]
    yield Finding("rendezvous", "OK", f"{variable}: {host} is {', '.join(nodes or addresses_found)}")


def _addresses(host: str) -> list[str]:
    """Return the addresses of `host`; none where it is not known."""
    try:
        return sorted({str(at[0]) for *_, at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _own_address() -> str:
    """Return the address at which gloo would listen; '' if there is none."""
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
    """Return the address from which this node sends to `address`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""

"""The cards of Ascend clusters: the rank table of all nodes, and the processes of one node.

A rank table is the file in RANK_TABLE_FILE, with the cards of all nodes and their ranks. The first three
forms are documented for HCCL, the last for ModelArts:

1.0, 1.2    servers with an address and the cards of each
2.0         cards alone, with the rank of each and its number on its node; no server and no address
group_list  containers with the cards of each, whose ranks follow the numbers at the ends of their names

The Ascend operator and ModelArts write the file while containers start: the status is `initializing` until
all cards are known.

Some platforms start a process for each card: on each node one process runs the agent, the others wait. They
connect to an abstract socket of the first process and get its exit code. So nothing remains in a file system,
and a killed process cannot be taken for a running process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptor import output
from adaptor.launchers.platforms.reading import (
    Card,
    Machine,
    PlatformError,
    Reading,
    Value,
    host,
    number,
    shown,
)
from adaptor.protocol.wire import is_same_user

_FILE = "RANK_TABLE_FILE"
_RANK = "RANK_ID"
_SIZE = "RANK_SIZE"
_DEVICE = "ASCEND_DEVICE_ID"
# The address of its container, by ModelArts.
_OWN_ADDRESS = "MA_CURRENT_IP"
# RANK_TABLE_FILE is a folder in some images of ModelArts.
_IN_FOLDER = ("jobstart_hccl.json", "hccl.json")
# The table of 65,536 cards has about 15 MiB.
MAX_BYTES = 64 << 20
# The Ascend operator empties the file before writing, so a reader can see a part of the file for a moment.
WRITING_S = 10.0
_GROUPS = "group_list"
# The most nodes that are named in a line.
_NAMED = 4
# Keys of the addresses of a node, the best first.
_ADDRESSES = ("container_ip", "server_ip", "host_ip", "server_id")
# The platform starts the processes of a node together; a process that comes late to a job that failed at once
# still gets the exit code.
LATE_S = 30.0
_KILLED = 1
# Variables for one card; workers of the node must not see them.
OF_A_CARD = ("RANK_ID", "ASCEND_DEVICE_ID", "DEVICE_ID")


@dataclass(frozen=True)
class _Node:
    """One node: the ranks of its cards, in order, and its names and addresses."""

    ranks: list[int]
    names: list[str]


def is_here(environ: Mapping[str, str]) -> bool:
    """Return whether a rank table is set."""
    return bool(environ.get(_FILE))


def read(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return the values of the rank table; wait while the table is incomplete.

    Raises:
        PlatformError: the table cannot be read, is not completed in time, contradicts itself, or contradicts
            RANK_ID and RANK_SIZE.
    """
    if not is_here(environ):
        raise PlatformError(f"{_FILE} is not set")
    path = _path(environ[_FILE])
    table, digest = _completed(path, machine)
    table_nodes = _nodes(table, str(path))
    _require_ranks(table_nodes, str(path))
    total = sum(len(node.ranks) for node in table_nodes)
    if _SIZE in environ and number(environ, _SIZE).value != total:
        raise PlatformError(f"{_SIZE} is {environ[_SIZE]}, but {path} has {total} ranks")
    own_place = _own_by_rank(table_nodes, environ, path)
    per_node = len(table_nodes[0].ranks)
    node_rank: Value[int] | None = None
    card = None
    if own_place is not None:
        rank = number(environ, _RANK).value
        node_rank = Value(own_place, f"{_RANK} in {path}")
        if _DEVICE in environ:
            number(environ, _DEVICE)
            # Jobs that share a machine can have their tables at the same path: their cards differ.
            card = Card(rank - table_nodes[own_place].ranks[0], per_node, f"{digest}-{own_place}")
    elif len(table_nodes) == 1:
        node_rank = Value(0, str(path))
    elif any(node.names for node in table_nodes):
        node_rank = Value(_own_by_name(table_nodes, environ, machine, path), f"own address in {path}")
    names = table_nodes[0].names
    address = None
    if len(table_nodes) > 1 and names:
        address = Value(host(names[0], str(path)), f"of rank 0 in {path}")
    return Reading(
        "ranktable",
        Value(len(table_nodes), str(path)),
        node_rank,
        Value(per_node, str(path)),
        address,
        card=card,
    )


def _path(path_text: str) -> Path:
    path = Path(path_text)
    if path.is_dir():
        for name in _IN_FOLDER:
            if (path / name).exists():
                return path / name
        raise PlatformError(f"{_FILE} is the folder {path}: there is no {' or '.join(_IN_FOLDER)} in it")
    return path


def _completed(path: Path, machine: Machine) -> tuple[dict[str, object], str]:
    """Return the table once its status is `completed`, and a digest of the file."""
    completed_tables: list[tuple[dict[str, object], str]] = []

    def written() -> str:
        completed_tables[:] = [(_parse(data := _load(path), path), hashlib.sha256(data).hexdigest())]
        return "" if completed_tables[0][0] else f"the rank table {path}, which is no JSON object yet"

    def completed() -> str:
        machine.wait(written, WRITING_S)
        return _pending(completed_tables[0][0], path)

    machine.wait(completed)
    return completed_tables[0]


def _load(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would keep the reader
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a path with a null byte raises the second
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlatformError(f"{_FILE} is {shown(str(path))}: the file cannot be read ({reason})") from None
    if len(data) > MAX_BYTES:
        raise PlatformError(f"{_FILE} is {path}: the file has more than {MAX_BYTES >> 20} MiB")
    return data


def _parse(data: bytes, path: Path) -> dict[str, object]:
    """Return the JSON object in `data`; {} if `data` is empty or no JSON."""
    try:
        table = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(table, dict):
        raise PlatformError(f"{path} is no rank table: it has no JSON object, but {shown(table)}")
    return table


def _pending(table: dict[str, object], path: Path) -> str:
    status = table.get("status")
    if status == "completed":
        return ""
    if status == "initializing":
        return f"the rank table {path}, whose status is initializing"
    raise PlatformError(f"{path} has the status {shown(status)}: it must be completed or initializing")


def _nodes(table: dict[str, object], table_name: str) -> list[_Node]:
    """Return the nodes, in the order of their ranks."""
    version = table.get("version")
    if _GROUPS in table:
        table_nodes = _nodes_of_groups(table, table_name)
    elif version in ("1.0", "1.2"):
        table_nodes = _nodes_of_servers(table, table_name)
    elif version == "2.0":
        return _nodes_of_cards(table, table_name)
    else:
        raise PlatformError(f"{table_name} has the version {shown(version)}: 1.0, 1.2 and 2.0 are known")
    return sorted(table_nodes, key=lambda node: min(node.ranks))


def _nodes_of_servers(table: dict[str, object], table_name: str) -> list[_Node]:
    servers = _list(table, "server_list", table_name)
    _require_count(table, "server_count", len(servers), table_name)
    table_nodes = []
    for server in servers:
        cards = _list(server, "device", table_name)
        names = [str(server[key]) for key in _ADDRESSES if server.get(key)]
        table_nodes.append(_Node([_number(card, "rank_id", table_name) for card in cards], names))
    return table_nodes


def _nodes_of_groups(table: dict[str, object], table_name: str) -> list[_Node]:
    groups = _list(table, _GROUPS, table_name)
    _require_count(table, "group_count", len(groups), table_name)
    if len(groups) != 1:
        raise PlatformError(f"{table_name} has {len(groups)} groups: which one trains is known for one alone")
    instances = _list(groups[0], "instance_list", table_name)
    _require_count(groups[0], "instance_count", len(instances), table_name)
    table_nodes: list[_Node] = []
    total = 0
    for instance in _by_number(instances, table_name):
        count = len(_list(instance, "devices", table_name))
        names = [str(instance[key]) for key in (*_ADDRESSES, "pod_name") if instance.get(key)]
        table_nodes.append(_Node(list(range(total, total + count)), names))
        total += count
    _require_count(groups[0], "device_count", total, table_name)
    return table_nodes


def _by_number(instances: list[dict[str, object]], table_name: str) -> list[dict[str, object]]:
    """Return containers in the order of their ranks: by the numbers in their names, as davincirun does.

    Names without a number (one container, or another writer) keep the order of the list.
    """
    names = [str(instance.get("pod_name", "")) for instance in instances]
    # More digits are no number of a container, and a million of them would take minutes to read.
    numbers = [int(number_match[1]) for name in names if (number_match := re.search(r"-([0-9]{1,9})$", name))]
    if not numbers:
        return instances
    if len(set(numbers)) != len(names):
        listed = ", ".join(map(shown, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
        raise PlatformError(
            f"{table_name} has containers with the pod_name {listed}: each must end in a number of its own,"
            " by which they have their ranks"
        )
    numbered = dict(zip(numbers, instances, strict=True))
    return [numbered[number] for number in sorted(numbered)]


def _nodes_of_cards(table: dict[str, object], table_name: str) -> list[_Node]:
    """Return nodes of consecutive ranks; a node ends where the numbers of cards begin again."""
    cards = _list(table, "rank_list", table_name)
    _require_count(table, "rank_count", len(cards), table_name)
    table_nodes: list[_Node] = []
    last = -1
    for rank, local in sorted(
        (_number(c, "rank_id", table_name), _number(c, "local_id", table_name)) for c in cards
    ):
        if not table_nodes or local <= last:
            table_nodes.append(_Node([], []))
        table_nodes[-1].ranks.append(rank)
        last = local
    return table_nodes


def _require_ranks(table_nodes: list[_Node], table_name: str) -> None:
    """Refuse ranks that torchrun would not assign: consecutive from 0 on, the same number on each node."""
    ranks = sorted(rank for node in table_nodes for rank in node.ranks)
    for place, rank in enumerate(ranks):
        if rank < place:
            raise PlatformError(f"{table_name} has the rank {rank} twice")
        if rank > place:
            raise PlatformError(f"{table_name} has no rank {place}, but {len(ranks)} ranks up to {ranks[-1]}")
    counts = {len(node.ranks) for node in table_nodes}
    if len(counts) > 1:
        raise PlatformError(
            f"{table_name} has nodes with {' and '.join(map(str, sorted(counts)))} cards: all must have"
            " as many"
        )
    for node in table_nodes:
        if node.ranks != list(range(node.ranks[0], node.ranks[0] + len(node.ranks))):
            listed = ", ".join(map(str, node.ranks[:8]))
            raise PlatformError(
                f"{table_name} gives a node the ranks {listed}: torchrun gives each node consecutive ones"
            )


def _own_by_rank(table_nodes: list[_Node], environ: Mapping[str, str], path: Path) -> int | None:
    """Return the node with the rank of this process; None where the platform assigns no rank."""
    if _RANK not in environ:
        return None
    rank = number(environ, _RANK).value
    for n, node in enumerate(table_nodes):
        if rank in node.ranks:
            return n
    raise PlatformError(f"{_RANK} is {rank}, but {path} has no such rank")


def _own_by_name(table_nodes: list[_Node], environ: Mapping[str, str], machine: Machine, path: Path) -> int:
    own_names = {machine.hostname, environ.get(_OWN_ADDRESS, machine.hostname)}
    places = [
        n
        for n, node in enumerate(table_nodes)
        if any(name in own_names or machine.owns(name) for name in node.names)
    ]
    if len(places) != 1:
        listed = ", ".join(node.names[0] for node in table_nodes[:_NAMED] if node.names)
        listed += ", ..." if len(table_nodes) > _NAMED else ""
        how_often = "more than one" if places else "no"
        raise PlatformError(f"{how_often} node of {path} has an address of this machine (there are {listed})")
    return places[0]


def _list(holder: object, key: str, table_name: str) -> list[dict[str, object]]:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, list) or not value or not all(isinstance(element, dict) for element in value):
        raise PlatformError(
            f"{table_name}: {key} is {shown(value)}: it must be a list of objects, and not empty"
        )
    return value


def _number(holder: dict[str, object], key: str, table_name: str) -> int:
    """Return a number; versions before 2.0 store numbers as text."""
    if key not in holder:
        raise PlatformError(f"{table_name}: a card has no {key}")
    try:
        return number({key: str(holder[key])}, key).value
    except PlatformError as error:
        raise PlatformError(f"{table_name}: {error}") from None


def _require_count(holder: dict[str, object], key: str, listed: int, table_name: str) -> None:
    if key in holder and _number(holder, key, table_name) != listed:
        raise PlatformError(f"{table_name}: {key} is {holder[key]}, but {listed} are listed")


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

    def __exit__(self, *_: object) -> None:
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

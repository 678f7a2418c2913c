"""The store of a rendezvous: found, met at by nodes with fixed numbers, and replaced after its loss.

One agent has the store, and the others connect to it. torch goes by names: an agent on the machine of
`--rdzv-endpoint` tries to open the store, and connects if another agent of the machine was faster. torch does
not tell which of the two has happened, and the loss of the agent with the store ends the rendezvous. So
`connect` tries the two cases one after the other.

After the loss of node 0 the node that has taken the controller over opens a new store (`NextStore`), and
becomes node 0 (`move.py`). The verdict has the address of the new store, so only agents that obey this
verdict know the address. The lease of the save folder names it for nodes whose flags name the lost store
(`MovedJob`): a node that comes back after its loss, or comes for the first time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import utils
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from adaptor import output
from adaptor.checkpoint import lease
from adaptor.errors import StartError
from adaptor.launchers.cli import flags
from adaptor.launchers.platforms import reading
from adaptor.launchers.rendezvous import dynamic_nodes
from adaptor.launchers.rendezvous.waiting import HostUnknownError, MovedError, plain_node, wait_for
from adaptor.protocol.messages import Endpoint

# The pause between two tries whether the store answers, and the longest try: the kernel repeats its request
# meanwhile. The pause is not shorter because the tries of a thousand nodes reach node 0.
TRY_S = 0.5
ONE_TRY_S = 10.0
_LEAST_TRY_S = 0.1
# torch's own defaults for the store of c10d.
_TIMEOUT_S = 60
_PORT = 29400
_LOOPBACK = "127.0.0.1"
# The time for the new store to answer. The store was open before its address was sent, so a silent store is
# lost with its node.
_ANSWERS_S = 10.0
# The time for the others to go on without node 0: they save, end their workers, and ask for spare nodes.
MOVES_S = 60.0
# Seconds between two checks of node 0: the store's own wait writes two warnings at each time-out.
_LOOK_S = 0.1
# The most nodes that are named in a line.
_NAMED = 4
_ALL = "all are here"


def ignore(trouble: str) -> None:
    """Ignore the reason for a wait."""


def connect(registry: Any, params: Any, note: Callable[[str], None] = ignore) -> tuple[Any, bool]:
    """Return torch's rendezvous handler, and whether the store of the rendezvous ends with this agent.

    A store outside of agents (etcd) ends with its machine: all agents of the machine count as having the
    store.

    Args:
        registry: torch's registry of handlers.
        params: torch's parameters of the rendezvous.
        note: is called with the reason for a wait, in words.

    Raises:
        RendezvousConnectionError: the store does not answer.
        StartError: the host name of this node, which other nodes need, does not resolve.
    """
    if params.backend == "static":
        return registry.get_rendezvous_handler(params), False
    if params.backend != "c10d" or params.get("store_type", "tcp").strip().lower() != "tcp":
        has_store = params.backend != "c10d" and _is_here(_host_and_port(params)[0])
        return registry.get_rendezvous_handler(_with_own_address(params)), has_store
    host, port = _host_and_port(params)
    host_setting = params.get_as_bool("is_host")
    if _is_here(host) if host_setting is None else host_setting:
        params = _with_own_address(params)
        try:
            return registry.get_rendezvous_handler(_with_is_host(params, is_host=True)), True
        except RendezvousConnectionError:
            if host_setting is not None:
                raise
    timeout_s = params.get_as_int("read_timeout", _TIMEOUT_S)
    wait_until_it_answers(host, port, time.monotonic() + timeout_s, note)
    return registry.get_rendezvous_handler(_with_is_host(params, is_host=False)), False


def limit(params: Any) -> str:
    """Return the time limit of `connect`, in words; empty: unknown."""
    if params.backend != "c10d":
        return ""
    return f"{params.get_as_int('read_timeout', _TIMEOUT_S)} s at most (--rdzv-conf read_timeout)"


def _with_is_host(params: Any, *, is_host: bool) -> Any:
    copied_parameters = copy.copy(params)
    copied_parameters.config = {**params.config, "is_host": is_host}
    return copied_parameters


def _host_and_port(params: Any) -> tuple[str, int]:
    host, port = utils.parse_rendezvous_endpoint(params.endpoint, default_port=_PORT)
    return str(host), int(port)


def _is_here(host: str) -> bool:
    """Return whether `host` is this machine; torch raises if the machine's name has no address."""
    try:
        return bool(utils._matches_machine_hostname(host))
    except socket.gaierror:
        return any(map(reading.owns, _addresses_of(host)))


def _with_own_address(params: Any) -> Any:
    """Return `params` with an address of this node that resolves.

    Workers and other nodes reach the node by --local-addr, or by its host name. A job of one node gets the
    loopback address if the host name is no address of the machine.

    Raises:
        StartError: the job has several nodes, and the host name has no address.
    """
    if params.local_addr:
        return params
    addresses = _addresses_of(name := socket.getfqdn())
    if params.max_nodes > 1:
        if addresses:
            return params
        raise StartError(
            f"the host name of this node, {name!r}, does not resolve: give ttprun --local-addr with the"
            " address at which the other nodes reach this one, or add the name to /etc/hosts or the DNS"
        )
    if any(map(reading.owns, addresses)):
        return params
    own_params = copy.copy(params)
    own_params.local_addr = _LOOPBACK
    if _host_and_port(own_params)[0] == "localhost" and not _addresses_of("localhost"):
        own_params.endpoint = own_params.endpoint.replace("localhost", _LOOPBACK)
    return own_params


def _addresses_of(host: str) -> list[str]:
    """Return the IP addresses of `host`; none if `host` does not resolve."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)]
    except (OSError, ValueError):
        return []


def wait_until_it_resolves(host: str, deadline: float, note: Callable[[str], None]) -> None:
    """Wait until `host` has an address: some platforms publish the name of a node after its start.

    Args:
        host: a name or an address.
        deadline: on the monotonic clock.
        note: is called with the reason for the wait, in words.

    Raises:
        HostUnknownError: `host` had no address until `deadline`.
    """
    while not _addresses_of(host):
        note(f"the name {host} does not resolve on this node")
        if time.monotonic() >= deadline:
            raise HostUnknownError(host)
        time.sleep(TRY_S)
    note("")


def wait_until_it_answers(
    host: str, port: int, deadline: float, note: Callable[[str], None] = ignore
) -> None:
    """Wait until something listens at `host`:`port`.

    torch's own client waits, too, but prints the stack of its C++ functions after each failed try.

    Args:
        host, port: the address.
        deadline: on the monotonic clock.
        note: is called with the reason for the wait, in words.

    Raises:
        HostUnknownError: `host` had no address until `deadline`.
        RendezvousConnectionError: nothing listened until then.
    """
    wait_until_it_resolves(host, deadline, note)
    while True:
        try:
            remaining_s = deadline - time.monotonic()
            try_s = max(min(remaining_s, ONE_TRY_S), _LEAST_TRY_S)
            socket.create_connection((host.strip("[]"), port), try_s).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(f"nothing answers at {host}:{port}: {error}") from None
            time.sleep(TRY_S)


class NextStore:
    """The next rendezvous store of one agent.

    Args:
        registry: torch's registry of handlers.
        params: torch's parameters of the lost rendezvous.

    Attributes:
        store_of_agents: the connection to the store, after `connect`.
    """

    store_of_agents: TCPStore

    def __init__(self, registry: Any, params: Any) -> None:
        self._registry = registry
        self._params = params
        self._opened: list[TCPStore] = []  # each lives as long as this agent
        self._lost_handlers: list[Any] = []  # torch's own threads may still use them

    def open(self, address: str) -> Endpoint | None:
        """Open a store in this process, at a free port; return its address, None if the system refuses.

        Args:
            address: of this node.
        """
        with contextlib.suppress(RuntimeError, OSError):  # the job ends, saved
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            self._opened.append(store)
            return Endpoint(address, int(store.port))
        return None

    def connect(self, endpoint: Endpoint) -> Store:
        """Connect to the store at `endpoint`; return it with the prefix of the job.

        Raises:
            RendezvousConnectionError: nothing answers there.
            RuntimeError: torch cannot connect.
        """
        wait_until_it_answers(endpoint.address, endpoint.port, time.monotonic() + _ANSWERS_S, ignore)
        self.store_of_agents = TCPStore(
            endpoint.address, endpoint.port, is_master=False, wait_for_workers=False
        )
        return PrefixStore(self._params.run_id, self.store_of_agents)

    def handler(self, lost_handler: Any, endpoint: Endpoint, *, has_store: bool) -> Any:
        """Return torch's handler of a rendezvous of changing nodes (c10d) at `endpoint`.

        The number of the round goes on from the lost rendezvous, so that later nodes see that the job had
        workers before. The agent with the store calls this method before all other agents.

        Args:
            lost_handler: torch's handler of the lost rendezvous.
            has_store: whether the store is in the process of this agent.

        Raises:
            RendezvousConnectionError: the store does not answer.
        """
        self._lost_handlers.append(lost_handler)
        params = copy.copy(self._params)
        params.endpoint = f"{endpoint.address}:{endpoint.port}"
        params.config = {**params.config, "is_host": False}  # the store is open
        if has_store and not params.local_addr:
            params.local_addr = endpoint.address
        handler, _ = connect(self._registry, params)
        holder = handler._state_holder
        if has_store:
            holder.sync()
            holder.state.round = lost_handler._state_holder.state.round + 1
            holder.mark_dirty()
            holder.sync()
        dynamic_nodes.put_in_order(handler, has_store=has_store)
        return handler


class FixedNodes:
    """The first meeting of nodes with fixed numbers (--node-rank), over the store on node 0.

    Attributes:
        is_host: the node has the store
        met: all nodes have come
        missing: the awaited nodes, in words
        trouble: why the address of node 0 cannot be reached, in words; '' if unknown
    """

    def __init__(self, handler: Any) -> None:
        self._node, self._nodes = int(handler.rank), int(handler.world_size)
        self._run_id = str(handler.run_id)
        self.is_host = self._node == 0
        self._timeout = handler.timeout
        self._address, self._port = str(handler.master_addr), int(handler.master_port)
        self.met = False
        self.missing = self.trouble = ""
        self._name_missing([0] if self._node else range(1, self._nodes))

    def meet(self) -> TCPStore:
        """Return the store, after all nodes have come to it.

        Raises:
            RendezvousConnectionError: the store on node 0 has not answered within torch's limit.
            RendezvousTimeoutError: some nodes have not come within torch's limit.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        if self._node:
            wait_until_it_answers(self._address, self._port, deadline, self._note)
        else:
            wait_until_it_resolves(self._address, deadline, self._note)
        store = TCPStore(
            self._address,
            self._port,
            self._nodes,
            self.is_host,
            self._timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        keys = PrefixStore(f"{self._run_id}/ttp/met", store)
        keys.set(_here(self._node), "")
        if self._node == 0:
            self._wait_for_all(keys, PrefixStore(self._run_id, store), deadline)
            keys.set(_ALL, "")
        else:
            self.missing = f"the other nodes of {self._nodes}"
            try:
                keys.wait([_ALL], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError:  # raised by a lost store, and after the limit
                if time.monotonic() < deadline:
                    raise
                raise RendezvousTimeoutError(self.missing) from None
        self.met, self.missing = True, ""
        return store

    def move(self, handler: Any, store: TCPStore, endpoint: Endpoint, number: int) -> None:
        """Let the node be node `number` of the nodes at another store, where nobody waits for all nodes.

        Nodes that are lost on the way are noticed at the gate of node 0.
        """
        handler._store, handler.rank, handler.master_addr = store, number, endpoint.address
        handler.master_port = endpoint.port
        self._node, self.is_host, self.met = number, number == 0, True
        if self.is_host:
            PrefixStore(f"{self._run_id}/ttp/met", store).set(_ALL, "")

    def _note(self, trouble: str) -> None:
        self.trouble = trouble

    def _wait_for_all(self, keys: PrefixStore, torchs: PrefixStore, deadline: float) -> None:
        awaited = list(range(1, self._nodes))
        while awaited:
            if not keys.check([_here(awaited[0])]):
                self._require_ours(awaited[0], keys, torchs)
                if time.monotonic() >= deadline:
                    raise RendezvousTimeoutError(self.missing)
                time.sleep(_LOOK_S)
                continue
            awaited = [node for node in awaited if not keys.check([_here(node)])]
            self._name_missing(awaited)

    def _require_ours(self, node: int, keys: PrefixStore, torchs: PrefixStore) -> None:
        """Refuse a node that is in torch's rendezvous without having announced itself before."""
        if torchs.check([f"torchelastic/role_info/{node}"]) and not keys.check([_here(node)]):
            raise plain_node(f"node {self._node}", f"node {node}")

    def _name_missing(self, nodes: Sequence[int]) -> None:
        named = ", ".join(map(str, nodes[:_NAMED]))
        omitted = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        self.missing = (
            f"node{'s' if len(nodes) > 1 else ''} {named}{omitted} of {self._nodes}" if nodes else ""
        )


def _here(node: int) -> str:
    return f"here/{node}"


class MovedJob:
    """The job of the flags, which may have moved to another store.

    Args:
        parsed: the flags, which `find` changes.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._parsed = parsed
        self._is_spare = parsed.ttp_spare
        save = flags.script_option(parsed.training_script_args, "--save")
        is_alone = parsed.standalone or parsed.nnodes.rpartition(":")[2].strip() == "1"
        # With fixed numbers only a job that may have spare nodes moves, and this node would be a spare node.
        may_move = flags.may_have_spares(parsed) if parsed.rdzv_backend == "static" else not is_alone
        self._lease = lease.StoreOfJob(Path(save)) if save and may_move else None
        self._goes_on = f"the job that saves in {save} goes on, without its first node 0, at"

    @property
    def comes_back(self) -> bool:
        """Return whether this node has a number, and waits as a spare node."""
        return self._parsed.ttp_spare and not self._is_spare

    def find(self) -> None:
        """Let the flags name the store of a living job that has moved.

        With fixed numbers the node becomes a spare node: all places have been given away.
        """
        parsed, store_of_job = self._parsed, self._lease
        if store_of_job is None:
            return
        store = wait_for(store_of_job.find, lambda: "a sign of life of the job that saves in --save")
        if not store:
            return
        host, port = utils.parse_rendezvous_endpoint(store, -1)
        if parsed.rdzv_backend != "static":
            output.tell(f"[ttp] {self._goes_on} {store}: this node asks to be taken in there")
        elif not parsed.ttp_spare:
            output.tell(f"[ttp] {self._goes_on} {store}: this node waits there, as a spare node")
            parsed.ttp_spare = True
        go_to_store(parsed, Endpoint(host, port))

    def moves(self) -> bool:
        """Wait until the job goes on at another store, `MOVES_S` at most; return whether it does.

        The store of the flags is lost.
        """

        def has_moved() -> bool:
            deadline = time.monotonic() + MOVES_S
            while time.monotonic() < deadline:
                try:
                    self.look()
                except MovedError:
                    return True
                time.sleep(TRY_S)
            return False

        if self._lease is None:
            return False
        return wait_for(has_moved, lambda: "the node that takes the place of node 0")

    def look(self) -> None:
        """Look into the lease while this node waits at the store of its flags.

        Raises:
            MovedError: the job has moved.
        """
        store = self._lease.look() if self._lease is not None else ""
        if store and store != flags.rendezvous_of(self._parsed):
            raise MovedError(
                f"{self._goes_on} {store}: this node leaves the address of its flags, and goes there"
            )


def go_to_store(parsed: argparse.Namespace, store: Endpoint, *, is_host: bool = False) -> None:
    """Let the flags name `store`, which is open, or which this node is to open (c10d, `is_host`)."""
    if parsed.rdzv_backend == "static":
        parsed.master_addr, parsed.master_port = store.address, store.port
    else:
        settings = utils._parse_rendezvous_config(parsed.rdzv_conf)
        parsed.rdzv_conf = ",".join(
            f"{name}={value}" for name, value in {**settings, "is_host": int(is_host)}.items()
        )
    if parsed.rdzv_backend != "static" or parsed.rdzv_endpoint:
        parsed.rdzv_endpoint = f"{store.address}:{store.port}"

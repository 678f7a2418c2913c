"""The store of a rendezvous: one agent has the store (c10d), and the others connect to it.

torch goes by names: an agent on the machine of `--rdzv-endpoint` tries to open the store, and connects if
another agent of the machine was faster. torch does not tell which of the two has happened, and the loss of
the agent with the store ends the rendezvous. So this module tries the two cases one after the other.
"""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import utils
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from adaptor.errors import StartError
from adaptor.launchers.platforms import reading
from adaptor.launchers.rendezvous.rendezvous_errors import HostUnknownError

# The pause between two tries whether the store answers, and the longest try: the kernel repeats its request
# meanwhile. The pause is not shorter because the tries of a thousand nodes reach node 0.
TRY_S = 0.5
ONE_TRY_S = 10.0
_LEAST_TRY_S = 0.1
# torch's own defaults for the store of c10d.
_TIMEOUT_S = 60
_PORT = 29400
_LOOPBACK = "127.0.0.1"


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

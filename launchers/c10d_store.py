"""The store of a rendezvous: one agent has it (c10d), and the others connect to it.

torch goes by names: an agent on the machine of `--rdzv-endpoint` tries to have the store, and connects to it
where another agent of that machine was faster. torch does not tell which of the two has happened, and the
loss of the agent with the store ends the rendezvous. So it is tried here, one after the other.
"""

from __future__ import annotations

import copy
import socket
import time
from typing import Any

from torch.distributed.elastic.rendezvous import utils
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

# How often a node tries whether the store answers, and how long one try may take: the kernel itself sends its
# request again meanwhile. Not more often, because each try of a thousand nodes reaches node 0.
TRY_S = 0.5
ONE_TRY_S = 10.0
_LEAST_TRY_S = 0.1
# torch's own defaults for the store of c10d.
_TIMEOUT_S = 60
_PORT = 29400


def connect(registry: Any, params: Any) -> tuple[Any, bool]:
    """Return torch's rendezvous handler, and whether what the nodes meet at ends with this agent.

    A store that is no agent's (etcd) ends with its machine: all agents of that machine count as having it.

    Args:
        registry: torch's, of handlers.
        params: torch's, of the rendezvous.

    Raises:
        RendezvousConnectionError: the store does not answer.
    """
    if params.backend == "static" or params.get("store_type", "tcp").strip().lower() != "tcp":
        return registry.get_rendezvous_handler(params), False
    host, port = utils.parse_rendezvous_endpoint(params.endpoint, default_port=_PORT)
    if params.backend != "c10d":
        return registry.get_rendezvous_handler(params), utils._matches_machine_hostname(host)
    told = params.get_as_bool("is_host")
    if utils._matches_machine_hostname(host) if told is None else told:
        try:
            return registry.get_rendezvous_handler(_told(params, is_host=True)), True
        except RendezvousConnectionError:
            if told is not None:
                raise
    timeout_s = params.get_as_int("read_timeout", _TIMEOUT_S)
    wait_until_it_answers(host, port, time.monotonic() + timeout_s)
    return registry.get_rendezvous_handler(_told(params, is_host=False)), False


def limit(params: Any) -> str:
    """Return for how long `connect` waits at most, in words; empty: it is not known."""
    if params.backend != "c10d":
        return ""
    return f"{params.get_as_int('read_timeout', _TIMEOUT_S)} s at most (--rdzv-conf read_timeout)"


def _told(params: Any, *, is_host: bool) -> Any:
    told = copy.copy(params)
    told.config = {**params.config, "is_host": is_host}
    return told


def wait_until_it_answers(host: str, port: int, deadline: float) -> None:
    """Wait until something listens at `host`:`port`.

    torch's own client waits, too, but writes the stack of its C++ functions each time it tries in vain.

    Raises:
        RendezvousConnectionError: nothing did until `deadline`, on the monotonic clock.
    """
    while True:
        try:
            left = deadline - time.monotonic()
            try_s = max(min(left, ONE_TRY_S), _LEAST_TRY_S)
            socket.create_connection((host.strip("[]"), port), try_s).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(f"nothing answers at {host}:{port}: {error}") from None
            time.sleep(TRY_S)

"""The rendezvous store in the place of a store that was lost with node 0.

The node that has taken the controller over opens the new store, and becomes node 0 (`move.py`). The verdict
has the address of the new store, so only agents that obey this verdict know the address.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from adaptor.launchers.rendezvous import c10d_store, dynamic_nodes
from adaptor.protocol.messages import Endpoint

# The time for the new store to answer. The store was open before its address was sent, so a silent store is
# lost with its node.
_ANSWERS_S = 10.0


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
        self._opened: TCPStore | None = None
        self._lost_handlers: list[Any] = []  # torch's own threads may still use them

    def open(self, address: str) -> Endpoint | None:
        """Open a store in this process, at a free port; return its address, None if the system refuses.

        Args:
            address: of this node.
        """
        with contextlib.suppress(RuntimeError, OSError):  # the job ends, saved
            self._opened = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            return Endpoint(address, int(self._opened.port))
        return None

    def connect(self, endpoint: Endpoint) -> Store:
        """Connect to the store at `endpoint`; return it with the prefix of the job.

        Raises:
            RendezvousConnectionError: nothing answers there.
            RuntimeError: torch cannot connect.
        """
        c10d_store.wait_until_it_answers(
            endpoint.address, endpoint.port, time.monotonic() + _ANSWERS_S, c10d_store.ignore
        )
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
        # The thread of its heartbeats may wait for the lost store until the connection ends.
        threading.Thread(target=lost_handler._stop_heartbeats, name="ttp-lost-store", daemon=True).start()
        self._lost_handlers.append(lost_handler)
        params = copy.copy(self._params)
        params.endpoint = f"{endpoint.address}:{endpoint.port}"
        params.config = {**params.config, "is_host": False}  # the store is open
        if has_store and not params.local_addr:
            params.local_addr = endpoint.address
        handler, _ = c10d_store.connect(self._registry, params)
        holder = handler._state_holder
        if has_store:
            holder.sync()
            holder.state.round = lost_handler._state_holder.state.round + 1
            holder.mark_dirty()
            holder.sync()
        dynamic_nodes.put_in_order(handler, has_store=has_store)
        return handler

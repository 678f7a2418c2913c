"""The meeting of nodes with fixed numbers (--node-rank), at the store of node 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from adaptor.launchers.rendezvous import c10d_store
from adaptor.launchers.rendezvous.rendezvous_errors import plain_node
from adaptor.protocol.messages import Endpoint

# Seconds between two checks of node 0: the store's own wait writes two warnings at each time-out.
_LOOK_S = 0.1
# The most nodes that are named in a line.
_NAMED = 4
_ALL = "all are here"


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
            c10d_store.wait_until_it_answers(self._address, self._port, deadline, self._note)
        else:
            c10d_store.wait_until_it_resolves(self._address, deadline, self._note)
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
        self._node, self.is_host = number, number == 0
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

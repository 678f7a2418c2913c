"""The stores at which the ranks of an attempt meet: ours, in the controller's agent, never the job's.

The keys begin with the incident and the attempt, so a late process meets no other process.
"""

from __future__ import annotations

from typing import Any

from adaptor.online.transfer import NEWCOMER, SOURCE, TransferChannel
from adaptor.protocol.messages import Endpoint, Regroup


class Meeting:
    """The connections of a rank to the store, attempt after attempt.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stores: list[Any] = []
        self._lines: dict[tuple[int, int], TransferChannel] = {}  # by attempt and source

    def store(self, order: Regroup, name: str) -> Any:
        """Return a store of this attempt, for one thread; the store is kept until `close`."""
        from torch.distributed import PrefixStore

        from adaptor.worker.dump_store import DumpStore

        place = Endpoint(order.store_host, order.store_port)
        store = DumpStore(place, order.store_secret, order.timeout_s)
        self._stores.append(store)
        return PrefixStore(f"ttp/{order.incident}/{order.attempt}/{name}", store)

    def to_newcomer(self, order: Regroup, newcomer: int) -> TransferChannel:
        """Return this survivor's end of a group with a newcomer."""
        return self._meet(order, newcomer, self._rank, SOURCE)

    def to_source(self, order: Regroup, source: int) -> TransferChannel:
        """Return this newcomer's end of its group with a survivor."""
        line_key = (order.attempt, source)
        if line_key not in self._lines:
            self._lines[line_key] = self._meet(order, self._rank, source, NEWCOMER)
        return self._lines[line_key]

    def _meet(self, order: Regroup, newcomer: int, source: int, place: int) -> TransferChannel:
        from adaptor.worker.dump_store import meet

        store = self.store(order, f"line/{newcomer}/{source}")
        return TransferChannel(meet(store, "two", place, 2, order.timeout_s), 1 - place)

    def abandon(self) -> None:
        """Let whoever waits at a store raise; from any thread."""
        for store in self._stores:
            store.abandon()

    def close(self) -> None:
        """The job goes on."""
        self._lines.clear()
        for store in self._stores:
            store.close()
        self._stores.clear()

    def rest(self, timeout_s: float) -> None:
        """The job goes on, and process groups may come back to a store, as NCCL's do: keep this meeting, and
        `abandon` the meeting when the next begins.

        Args:
            timeout_s: seconds for each wait at the store.
        """
        self._lines.clear()
        for store in self._stores:
            store.rest(timeout_s)

"""torch's rendezvous as the agent uses it."""

from __future__ import annotations

import argparse
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from adaptor.checkpoint.lease import Lease, go_on_without
from adaptor.checkpoint.lease_content import Owner
from adaptor.launchers.cli import flags
from adaptor.launchers.rendezvous import dynamic_nodes, rendezvous_store, waiting
from adaptor.launchers.rendezvous.rendezvous_handler import Registry, Rendezvous
from adaptor.launchers.rendezvous.rendezvous_store import MovedJob
from adaptor.launchers.rendezvous.waiting import MovedError, SilentStoreError
from adaptor.protocol.messages import Endpoint
from tests.ports import free_port
from tests.unit.threads import LONG_S


class RendezvousHandler:
    settings: object = "as they are"

    def __init__(self, answer: int | Exception) -> None:
        self._answer = answer

    def get_backend(self) -> str:
        return "c10d"

    def num_nodes_waiting(self) -> int:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_a_rendezvous_that_is_gone_with_its_node() -> None:
    """The agent keeps monitoring its workers."""
    assert Rendezvous(RendezvousHandler(RendezvousConnectionError())).nodes_that_wait == 0


def test_nodes_that_wait_are_counted() -> None:
    assert Rendezvous(RendezvousHandler(2)).nodes_that_wait == 2


def test_other_attributes_are_torch_s() -> None:
    assert Rendezvous(RendezvousHandler(0)).settings == "as they are"
    assert not hasattr(Rendezvous(RendezvousHandler(0)), "nothing")
    with pytest.raises(RendezvousClosedError):
        _ = Rendezvous(RendezvousHandler(RendezvousClosedError())).nodes_that_wait


class Late(RendezvousHandler):
    """A rendezvous that the node joins at the second attempt; `trains`: the job trains meanwhile."""

    _this_node = "this one"
    settings = SimpleNamespace(min_nodes=1, max_nodes=2)

    def __init__(self, trains: bool) -> None:
        super().__init__(0)
        state = SimpleNamespace(complete=trains, closed=False, participants={"another": 0}, round=1)
        self._state_holder = SimpleNamespace(state=state)
        self._tries = 0

    def next_rendezvous(self) -> str:
        self._tries += 1
        if self._tries == 1:
            raise RendezvousTimeoutError
        return "met"


def test_a_node_waits_as_long_as_the_job_trains_without_it() -> None:
    """torch's limit of 10 minutes applies only to nodes that start together."""
    meeting = Rendezvous(Late(trains=True), "node0:1", 2)
    assert meeting.missing == "the job at node0:1, which trains, to take this node in"
    assert meeting.next_rendezvous() == "met"
    assert meeting.has_met_before
    assert "which trains" not in meeting.missing, "it was in the job, and another node may be lost"
    with pytest.raises(RendezvousTimeoutError):
        Rendezvous(Late(trains=False)).next_rendezvous()


def _node(port: int, address: str) -> Any:
    """A node of a job of one node, with the adaptor's order of nodes."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    backend = C10dRendezvousBackend(store, "job")
    handler = DynamicRendezvousHandler.from_backend("job", store, backend, 1, 1, address)
    dynamic_nodes.put_in_order(handler, has_store=False)
    return handler


def test_a_later_node_gets_a_number_after_the_present_nodes() -> None:
    """Regardless of its address; torch sorts by address and would make the later node node 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = _node(store.port, "127.0.0.3"), _node(store.port, "127.0.0.4")
    assert first.next_rendezvous().rank == 0
    late = _node(store.port, "127.0.0.2")
    in_order = sorted(node._this_node for node in (late, second, first))
    assert [node.addr for node in in_order] == ["127.0.0.3", "127.0.0.4", "127.0.0.2"]
    first.shutdown()


def test_nodes_that_start_together_are_ordered_by_address_nodes_with_the_store_first() -> None:
    apart = [dynamic_nodes.OrderedNode(f"127.0.0.{number}", 1, 0) for number in (2, 1)]
    ordered_node = dynamic_nodes.OrderedNode("127.0.0.3", 7, 0, is_apart=False)
    decoded = pickle.loads(
        pickle.dumps(dict.fromkeys((*apart, ordered_node), ""))
    )  # as torch's state travels
    assert [node.addr for node in sorted(decoded)] == ["127.0.0.3", "127.0.0.1", "127.0.0.2"]
    assert set(decoded) == {*apart, ordered_node}


def test_of_agents_on_the_machine_of_the_store_the_one_that_has_it_comes_first() -> None:
    """All of them try to own the store; the loss of the owner ends the job, so the owner must be node 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agent(port: int, address: str) -> Any:
        rendezvous_parameters = RendezvousParameters("c10d", f"localhost:{port}", "job", 1, 2, address)
        return Registry(registry).get_rendezvous_handler(rendezvous_parameters)

    neighbour, store_agent = agent(store.port, "127.0.0.1"), agent(free_port(), "127.0.0.2")
    assert sorted([neighbour._this_node, store_agent._this_node]) == [
        store_agent._this_node,
        neighbour._this_node,
    ]


def test_a_node_comes_to_no_store_for_which_it_waits_no_longer() -> None:
    """The store answers late, and the main thread is at another store meanwhile."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{stores[0].port}", "job", 1, 2, is_host=False)
    rendezvous = Registry(registry).get_rendezvous_handler(parameters)
    handler_before, endpoint = rendezvous._handler, Endpoint("127.0.0.1", stores[1].port)
    raised: list[Exception] = []

    def come() -> None:
        try:
            rendezvous.come_to(endpoint, 1)
        except SilentStoreError as error:
            raised.append(error)

    late = threading.Thread(target=come, name=waiting.ABANDONED)
    late.start()
    late.join(LONG_S)
    assert raised
    assert rendezvous._handler is handler_before
    rendezvous.move(endpoint, 1)
    assert rendezvous._handler is not handler_before


def test_a_node_does_not_wait_for_a_job_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only before its first rendezvous: at a restart the node moves with the others."""
    monkeypatch.setattr("adaptor.launchers.rendezvous.rendezvous_handler.FIRST_S", 0.01)
    over = threading.Event()

    def look() -> None:
        raise MovedError("elsewhere")

    def waits(event: threading.Event, limit_s: float | None = None) -> None:
        event.wait(limit_s)

    handler = RendezvousHandler(0)
    handler.settings = None
    meeting = Rendezvous(handler, most_nodes=2, look=look)
    assert not waiting.is_abandoned()
    with pytest.raises(MovedError):
        meeting.meet(lambda: waits(over))
    assert waiting.is_abandoned()
    over.set()
    meeting._has_met = True
    meeting.meet(lambda: waits(threading.Event(), 0.1))


def test_a_node_meets_the_others_though_the_disk_of_the_lease_hangs() -> None:
    looks, is_met = threading.Event(), threading.Event()
    has_waited = []

    def look() -> None:
        looks.set()
        has_waited.append(is_met.wait(LONG_S))

    assert waiting.wait_for(looks.wait, lambda: "", first_s=0.01, look=look)
    assert not has_waited
    is_met.set()


@pytest.mark.parametrize(
    ("nodes", "store"), [("2", "127.0.0.1:29500"), ("1:2", "node0:29400"), ("1", "node0:29400")]
)
def test_a_node_goes_to_the_store_of_a_moved_job_where_it_may_be_a_spare_node(
    nodes: str, store: str, tmp_path: Path
) -> None:
    owner = Owner.of(os.getpid())
    Lease(tmp_path, owner, "g").take()
    go_on_without(tmp_path, owner, "g", ["node 1"], ["node 0"], has_lease=True, store="127.0.0.1:29500")
    parsed = argparse.Namespace(
        nnodes=nodes,
        standalone=False,
        rdzv_backend="static",
        rdzv_endpoint="",
        master_addr="node0",
        master_port=29400,
        ttp_spare=False,
        training_script_args=["--save", str(tmp_path)],
    )
    MovedJob(parsed).find()
    assert flags.rendezvous_of(parsed) == store
    assert parsed.ttp_spare is (nodes == "2")


def test_a_node_that_waits_to_be_taken_in_follows_a_job_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is lost before the others continue. If nobody continues, the node ends."""
    monkeypatch.setattr(rendezvous_store, "TRY_S", 0.01)
    monkeypatch.setattr(rendezvous_store, "MOVES_S", 0.1)
    owner = Owner.of(os.getpid())
    Lease(tmp_path, owner, "g").take()
    parsed = argparse.Namespace(
        nnodes="1:2",
        standalone=False,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:29400",
        rdzv_conf="",
        ttp_spare=False,
        training_script_args=["--save", str(tmp_path)],
    )
    job = MovedJob(parsed)
    job.find()
    assert not job.moves()
    monkeypatch.setattr(rendezvous_store, "MOVES_S", 60.0)
    go_on_without(tmp_path, owner, "g", ["node 1"], ["node 0"], has_lease=True, store="127.0.0.1:29500")
    assert job.moves()
    job.find()
    assert flags.rendezvous_of(parsed) == "127.0.0.1:29500"

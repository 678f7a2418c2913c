"""Detection of lost nodes of a c10d rendezvous, over torch's own store and state."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
)

from adaptor.launchers.rendezvous.dynamic_nodes import SignsOfLife
from adaptor.launchers.rendezvous.rendezvous_handler import Registry, Rendezvous
from adaptor.launchers.rendezvous.waiting import FullJobError, MovedError, NotTakenInError
from adaptor.launchers.spares.places import Places, find_gate
from adaptor.protocol.spare_messages import Gate
from tests import waiting
from tests.unit.threads import Thread

ME, OTHER, THIRD = (_NodeDesc(f"127.0.0.{number}", number, 0) for number in (1, 2, 3))
# torch's own: a node is lost after three of them.
INTERVAL_S = 5


class Around:
    """A store, the state of the rendezvous in it, and a clock."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port
        self.now = 100.0

    def _backend(self) -> C10dRendezvousBackend:
        return C10dRendezvousBackend(TCPStore("127.0.0.1", self.port, is_master=False), "job")

    @property
    def state(self) -> Any:
        """The state as the store has it."""
        state = self._backend().get_state()
        assert state is not None
        return pickle.loads(state[0])

    def change(self, act: Callable[[Any], None]) -> None:
        """Let another node change the state in the store."""
        backend = self._backend()
        state, token = backend.get_state() or (None, None)
        changed = pickle.loads(state) if state is not None else self.holder().state
        act(changed)
        written = backend.set_state(pickle.dumps(changed), token)
        assert written is not None
        assert written[2]

    def holder(self) -> Any:
        """Return a new state holder, as an agent uses it to read and write the state."""
        pause = timedelta(seconds=INTERVAL_S)
        settings = RendezvousSettings("job", 1, 3, RendezvousTimeout(), pause, 3)
        return _BackendRendezvousStateHolder(self._backend(), settings, cache_duration=0)

    def signs(self) -> tuple[SignsOfLife, Any]:
        """Return the signs of life of the node ME, and the holder of its state."""
        holder = self.holder()
        handler = SimpleNamespace(_this_node=ME, _state_holder=holder, settings=holder._settings)
        return SignsOfLife(handler, lambda: self.now), holder

    def lost_after(self, holder: Any, seconds: float) -> bool:
        """Return whether OTHER is lost for who looks so much later."""
        self.now += seconds
        holder.sync()
        return OTHER not in holder.state.participants


@pytest.fixture
def around() -> Around:
    """Return two nodes in the round 0, by clocks that are an hour late."""
    around = Around()

    def begin(state: Any) -> None:
        state.complete = True
        state.participants = {ME: 0, OTHER: 1}
        state.last_heartbeats = dict.fromkeys((ME, OTHER), _ago(3600))

    around.change(begin)
    return around


def _ago(seconds: float) -> datetime:
    return datetime.now(timezone.utc) - timedelta(seconds=seconds)


def _signs(node: _NodeDesc, seconds: float) -> Callable[[Any], None]:
    """Set the last sign of life of `node` to so many seconds ago, by the node's clock."""
    return lambda state: state.last_heartbeats.update({node: _ago(seconds)})


def _agent(port: int, address: str, max_nodes: int) -> Rendezvous:
    rendezvous_parameters = RendezvousParameters(
        "c10d", f"localhost:{port}", "job", 1, max_nodes, address, is_host=False
    )
    return Registry(registry).get_rendezvous_handler(rendezvous_parameters)


def test_a_node_is_lost_when_its_sign_has_not_changed(around: Around) -> None:
    _, holder = around.signs()
    assert [around.lost_after(holder, seconds) for seconds in (0, INTERVAL_S, INTERVAL_S)] == [False] * 3
    assert around.lost_after(holder, INTERVAL_S)
    assert holder.state.participants == {ME: 0}, "this one sends no signs either, and is not lost"


def test_a_sign_is_one_whatever_the_time_is_in_it(around: Around) -> None:
    _, holder = around.signs()
    for seconds in range(2 * 3):
        around.change(_signs(OTHER, 7200 + seconds))
        assert not around.lost_after(holder, 2 * INTERVAL_S)
    assert [around.lost_after(holder, INTERVAL_S) for _ in range(3)] == [False, False, True]


def test_an_agent_that_was_paused_hears_of_the_others_first(around: Around) -> None:
    _, holder = around.signs()
    assert not around.lost_after(holder, 0)
    assert not around.lost_after(holder, 3600)
    around.change(_signs(OTHER, 0))
    assert not around.lost_after(holder, 3600)


def test_a_node_that_another_one_has_removed_comes_back(around: Around) -> None:
    signs, holder = around.signs()
    holder.sync()
    signs.enter(rank=0)

    def remove(state: Any) -> None:
        del state.participants[ME], state.last_heartbeats[ME]

    around.change(remove)
    holder.sync()
    holder.sync()
    assert around.state.participants == {ME: 0, OTHER: 1}
    assert around.state.last_heartbeats[ME] > _ago(60)
    signs.leave()
    around.change(remove)
    holder.sync()
    holder.sync()
    assert around.state.participants == {OTHER: 1}


def test_a_node_takes_the_number_of_a_lost_node_for_good(around: Around) -> None:
    signs, holder = around.signs()
    signs.take(rank=1)
    assert around.state.participants == {ME: 1}, "it was node 0 before"
    around.change(lambda state: state.participants.update({THIRD: 1}) or state.participants.pop(ME))
    for _ in range(2):
        holder.sync()
    assert around.state.participants == {THIRD: 1}


def test_no_place_is_taken_while_the_nodes_meet_again(around: Around) -> None:
    """All workers start again before the spare node has come."""
    signs, _ = around.signs()

    def begin_the_next_round(state: Any) -> None:
        state.round, state.complete, state.participants = 1, False, {OTHER: 0}

    around.change(begin_the_next_round)
    with pytest.raises(MovedError, match="this node meets the others"):
        signs.take(rank=1)
    assert around.state.participants == {OTHER: 0}


def test_two_nodes_take_places_at_the_same_time(around: Around) -> None:
    """The second node writes between the read and the write of the first node."""
    signs, holder = around.signs()
    sync = holder.sync

    def sync_late() -> Any:
        if holder._dirty and THIRD not in around.state.participants:
            around.change(lambda state: state.participants.update({THIRD: 2}))
        return sync()

    holder.sync = sync_late
    signs.take(rank=1)
    assert around.state.participants == {ME: 1, THIRD: 2}


def test_a_spare_node_finds_the_gate_and_joins_the_round() -> None:
    """The node that comes later is told of the gate, takes the place of the lost node, and nobody meets."""
    around = Around()
    nodes = [_agent(around.port, f"127.0.0.{number}", 2) for number in (1, 2)]
    with Thread(nodes[1].next_rendezvous):
        first = nodes[0].next_rendezvous()
    gate = Gate("node0", "an invitation")
    later_node = _agent(around.port, "127.0.0.3", 2)
    later_node.look_for_gate(find_gate)
    with pytest.raises(FullJobError) as raised, Thread(later_node.next_rendezvous):
        Places(first.store, 0, None).announce(gate, 0)
    assert raised.value.gate == gate
    later_node.shutdown()
    assert not nodes[0].is_closed(), "the others train on"

    spare = _agent(around.port, "127.0.0.3", 2)
    spare.take_place(1)
    joined = spare.next_rendezvous()
    assert (joined.rank, joined.world_size) == (1, 2)
    first.store.set("key", "of the round")
    assert joined.store.get("key") == b"of the round"
    assert sorted(around.state.participants.values()) == [0, 1]
    assert spare._this_node in around.state.participants
    waiting.until(lambda: _is_out(nodes[1]), "the replaced node sees that", pause_s=0.1)
    nodes[1].shutdown()
    assert not nodes[0].is_closed(), "the others train on"
    for node in (*nodes, spare):
        node._stop_heartbeats()


def test_no_heartbeats_go_to_a_store_that_is_lost_with_node_0() -> None:
    """Each would print the stack of torch's C++ functions."""
    around, before = Around(), _heartbeats()
    node = _agent(around.port, "127.0.0.1", 1)
    node.next_rendezvous()
    (own,) = _heartbeats() - before
    node.lose_store()
    assert own.is_alive(), "the store is on another machine, and lives on"
    node.ends_with_node_0 = True
    node.lose_store()
    own.join(waiting.LONG_S)
    assert not own.is_alive()
    node.shutdown()
    assert not node.is_closed(), "nobody asks a lost store"


def _heartbeats() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("RendezvousKeepAlive")}


def test_a_gate_that_is_closed_is_not_found(around: Around) -> None:
    store = TCPStore("127.0.0.1", around.port, is_master=False)
    places = Places(store, 0, None)
    assert find_gate(store) is None
    places.announce(Gate("node0", "an invitation"), 0)
    assert find_gate(store) is not None
    places.close_gate()
    assert find_gate(store) is None


def test_nodes_that_meet_without_this_one_are_counted(around: Around) -> None:
    signs, holder = around.signs()
    holder.sync()
    signs.enter(rank=0)
    assert signs.nodes_that_meet == 0

    def begin_the_next_round(state: Any) -> None:
        state.round, state.complete = 1, False
        state.participants = {OTHER: 0, THIRD: 0}

    around.change(begin_the_next_round)
    holder.sync()
    assert signs.nodes_that_meet == 2


def test_a_node_that_comes_after_a_pause_waits_for_the_job() -> None:
    """All signs of life are old then, and their nodes live."""
    around = Around()
    first = _agent(around.port, "127.0.0.1", max_nodes=1)
    assert first.next_rendezvous().rank == 0
    first._stop_heartbeats()  # what is paused sends none
    around.change(lambda state: state.last_heartbeats.update(dict.fromkeys(state.participants, _ago(60))))
    late = _agent(around.port, "127.0.0.2", max_nodes=2)
    with pytest.raises(NotTakenInError), Thread(late.next_rendezvous):
        _seen_by(first, late, around.port)


def _is_out(node: Rendezvous) -> bool:
    node._state_holder.sync()  # served from a cache for a second
    return node._this_node not in node._state_holder.state.participants


def _seen_by(first: Rendezvous, late: Rendezvous, port: int) -> None:
    """Wait until the job of `first` sees the node `late`, and end that job."""
    waiting.until(lambda: first.nodes_that_wait == 1, "the job sees the node", pause_s=0.1)
    assert late.missing == f"the job at localhost:{port}, which trains, to take this node in"
    first.set_closed()

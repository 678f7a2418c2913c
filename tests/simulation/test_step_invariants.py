"""Each mechanism of a step is needed: without it an invariant of `step_invariants.py` breaks."""

from __future__ import annotations

from typing import Any

import pytest

from adaptor.protocol.messages import Phase
from tests.simulation.worker import Trainee, Worker
from tests.simulation.world import live, undisturbed

# Each breach is found within the first few seeds.
SEEDS = 300


@pytest.mark.parametrize(
    ("mechanism", "broken"),
    [
        ("barrier", r"begins the update of step \d+ before ranks .* are READY"),
        ("exchange", "its shards are of"),
        ("update_replicas", "its shards are of"),
        ("copy_state", "says that it has a copy of step"),
    ],
)
def test_an_invariant_needs_it(mechanism: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainee, mechanism, lambda trainee: None)
    _breaks(broken)


def test_a_mirror_is_updated_with_the_gradients_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Trainee.exchange

    def late(trainee: Trainee) -> None:
        gradients = trainee.gradients
        exchange(trainee)
        trainee.gradients = gradients

    monkeypatch.setattr(Trainee, "exchange", late)
    _breaks("its shards are of")


def test_survivors_have_a_step_in_common_by_what_all_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Worker.meet

    def meets(worker: Worker, name: Any, peers: frozenset[int]) -> None:
        if name[0] not in ("reduce", "gather", "exchange", "barrier"):
            meet(worker, name, peers)

    monkeypatch.setattr(Worker, "meet", meets)
    _breaks(r"is READY for step \d+ before ranks")


def test_a_rank_that_is_cut_off_may_be_ready_when_another_was_replaced() -> None:
    """The door of the cut-off rank is open, as it does not know of the incident."""
    world = undisturbed(lambda world: len(world.workers) > 1)
    check, replaced = world.step_invariants.board, []

    def replaces_another_first(worker: Worker) -> None:
        if worker.session.board.phase is Phase.READY and not replaced:
            lost = next(candidate for candidate in world.workers.values() if candidate is not worker)
            world.end(lost, -9)
            replaced.append(world.replace(lost.agent, lost.rank, pid=1))
            replaced[0].start()
        check(worker)

    world.step_invariants.board = replaces_another_first  # type: ignore[method-assign]
    with world.by_its_clock():
        while not replaced:
            assert world.clock.step()
    world.step_invariants.always()
    world.close()


def _breaks(broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        _live_until_one_breaks()


def _live_until_one_breaks() -> None:
    for seed in range(SEEDS):
        live(seed)

"""The controller's decisions when holders of the state differ."""

from __future__ import annotations

import pytest

from adaptor.controller.controller import Controller
from adaptor.controller.incident_state import Orders
from adaptor.protocol import naming
from adaptor.protocol.messages import (
    Addressed,
    BoardRecord,
    Corruption,
    Died,
    Frozen,
    Hello,
    Phase,
    Prepare,
    Prepared,
    Regroup,
    Replace,
    Verdict,
)
from tests.unit.test_regrouping import RANKS, _job, _kill, _save

STEP = 5


def _corrupt(
    named: tuple[int, ...] = (),
    suspects: tuple[int, ...] = (),
    agreed: int = STEP,
    oldest: int = STEP,
    *,
    stops: bool = False,
) -> tuple[Controller, Orders]:
    """Return the controller, and its orders after the report with all ranks frozen."""
    job = _job()
    message = Corruption(0, STEP, "g/1", "exp_avg of shard g/1 differs", named, suspects, agreed, stops)
    orders = job.handle(message, 1.0)
    assert len(orders) == len(RANKS)
    assert job.handle(message, 1.0) == []  # of another rank
    for rank in RANKS:
        board = BoardRecord(rank, 1, Phase.RUNNING, oldest, STEP, STEP)
        orders = job.handle(Frozen(rank, 1, board), 1.0)
    return job, orders


def _regroups(orders: Orders) -> dict[int, Regroup]:
    addressed = [order for _, order in orders if isinstance(order, Addressed)]
    return {order.rank: order.message for order in addressed if isinstance(order.message, Regroup)}


@pytest.mark.parametrize("rank", RANKS)
def test_a_named_rank_is_replaced_and_gives_nothing(rank: int) -> None:
    job, orders = _corrupt(named=(rank,))
    assert [type(order) for _, order in orders] == [Replace, Prepare]
    assert job.incident is not None
    (order,) = job.incident.state.writing.pending.values()
    assert rank not in (order.writer, *order.holders)
    _save(job)
    job.handle(Died(rank, -9, 0.0, BoardRecord(rank)), 1.0)
    regroups = _regroups(job.handle(Hello(rank, 100), 1.0))
    assert {regroup.step for regroup in regroups.values()} == {STEP}
    (replacement,) = regroups[0].replaced
    assert replacement.rank == rank
    assert rank not in (replacement.twin, *(source.source for source in replacement.sources))


def test_with_suspects_the_job_goes_back_to_the_last_agreed_step() -> None:
    job, orders = _corrupt(suspects=(1, 3))
    assert [type(order) for _, order in orders] == [Prepare]
    regroups = _regroups(_save(job))
    assert {(regroup.step, regroup.replaced) for regroup in regroups.values()} == {(STEP, ())}
    assert regroups.keys() == set(RANKS)


def test_with_local_copies_that_may_be_the_step_before() -> None:
    job, orders = _corrupt(suspects=(1, 3), agreed=STEP - 1, oldest=STEP - 1)
    assert [type(order) for _, order in orders] == [Prepare]
    assert {regroup.step for regroup in _regroups(_save(job)).values()} == {STEP - 1}


def test_a_disputed_state_is_not_saved() -> None:
    _, orders = _corrupt(suspects=(1, 3), agreed=STEP - 1)
    verdict = orders[0][1]
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.fault.kind, verdict.fault.ranks, verdict.stop) == (
        "lost",
        "corruption",
        (1, 3),
        "",
    )
    assert verdict.line == (
        "one of the ranks 1 and 3 (suspects) is corrupt: exp_avg of shard g/1 differs; the state cannot be"
        " saved: the holders of the state differ; they agreed on step 4, which nobody has any more; an older"
        " checkpoint is loaded"
    )


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_save_of_a_disputed_step_is_given_up(is_writing: bool) -> None:
    """A rank dies during the comparison: the step is planned before the dispute is known."""
    job = _job()
    assert [type(order) for _, order in _kill(job, 3, STEP)] == [Replace, Prepare]
    assert job.incident is not None
    number = job.incident.state.target.number
    folder = f"/save/{naming.temporary_name(STEP, job.term, number, '0f3a')}"
    prepared = Prepared(0, job.incident.number, folder, "", number)
    corruption = Corruption(0, STEP, "", "the holders differ", (), tuple(RANKS), STEP - 1)
    orders: Orders = []
    for message in (prepared, corruption) if is_writing else (corruption, prepared):
        orders = job.handle(message, 1.0)
    verdicts = [order for _, order in orders if isinstance(order, Verdict)]
    assert [(verdict.outcome, verdict.fault.kind) for verdict in verdicts] == [("lost", "corruption")]


def test_where_all_holders_of_a_shard_are_corrupt_nothing_of_it_is_saved() -> None:
    _, orders = _corrupt(named=(1, 3))
    verdict = orders[0][1]
    assert isinstance(verdict, Verdict)
    assert verdict.outcome == "lost"
    assert "shard 1 of 2 of group g has no live holder" in verdict.line


def test_stop_saves_and_ends_the_job() -> None:
    job, orders = _corrupt(named=(1,), stops=True)
    assert [type(order) for _, order in orders] == [Prepare]
    verdict = _save(job)[0][1]
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.step, verdict.stop) == ("saved", STEP, "TTP_CORRUPTION is stop")


def test_a_message_about_ranks_that_are_not_there_is_ignored() -> None:
    job = _job()
    assert job.handle(Corruption(0, 5, "g/1", "differs", (), (), 5), 1.0) == []
    assert job.handle(Corruption(0, 5, "g/1", "differs", (9,), (), 5), 1.0) == []
    assert job.incident is None

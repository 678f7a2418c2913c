"""The controller's decisions in online recovery; the golden traces `online_*` hold its orders."""

from __future__ import annotations

from typing import Any

import pytest

from adaptor.controller.controller import Controller
from adaptor.controller.failures import Failures
from adaptor.controller.feasibility import MOST_FROM_A_STEP, OUT_OF_MEMORY_STEPS
from adaptor.controller.incident import Incident
from adaptor.controller.incident_state import TRANSITIONS, Orders, Stage
from adaptor.controller.membership import Membership
from adaptor.controller.newcomers import ROUND_S, ROUNDS
from adaptor.controller.regrouping import ECHO_S, MOST_LIMITS
from adaptor.protocol import naming
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    BoardRecord,
    Died,
    Dump,
    Freeze,
    Frozen,
    Hello,
    Joined,
    Layout,
    Origin,
    Phase,
    Prepare,
    Prepared,
    PresenceProbe,
    Present,
    Proceed,
    Publish,
    Published,
    Raised,
    Recovered,
    Refused,
    Regroup,
    RegroupFailed,
    Replace,
    Share,
    Starting,
    Written,
)
from adaptor.protocol.naming import FileEntry

RANKS = range(4)
MOST_RECOVERIES = 10


def _job(online: str = "", term: int = 0, most_recoveries: int = MOST_RECOVERIES) -> Controller:
    job = Controller(len(RANKS), 120.0, ("store", 1, b""), term=term, online_s=60.0)
    job.handle(AgentHello(0, tuple(RANKS)), 0.0)
    for rank in RANKS:
        job.handle(Hello(rank, rank), 0.0)
        why_not = online if rank == 2 else ""
        share = Share("g", rank % 2, 2)
        layout = Layout(rank, (share,), "/save", 0, "same", False, why_not, most_recoveries=most_recoveries)
        job.handle(layout, 0.0)
    return job


def _kill(job: Controller, rank: int, step: int, status: int = -9, reason: str = "") -> Orders:
    """Kill a rank after `step`; return the orders after all other ranks answered."""
    number = job.handle(Died(rank, status, 0.0, BoardRecord(rank), reason), 1.0)[0][1]
    assert isinstance(number, Addressed)
    assert isinstance(number.message, Freeze)
    orders: Orders = []
    for rank_alive in RANKS:
        if rank_alive != rank:
            board = BoardRecord(rank_alive, 1, Phase.RUNNING, step, step, step)
            orders = job.handle(Frozen(rank_alive, number.message.incident, board), 1.0)
    return orders


def _save(job: Controller) -> Orders:
    """Answer every order of the save; return the orders once the step is on disk."""
    incident = job.incident
    assert incident is not None
    target, step = incident.state.target, incident.step
    folder = f"/save/{naming.temporary_name(step, job.term, target.number, '0f3a')}"
    (_, dump), *_ = job.handle(Prepared(0, incident.number, folder, "", target.number), 1.0)
    assert isinstance(dump, Addressed)
    assert isinstance(dump.message, Dump)
    (group,) = dump.message.groups
    files = (FileEntry("g.pt", 1, "00", incident.state.writing.attempt),)
    written = Written(group.writer, incident.number, incident.state.writing.attempt, "g", files)
    ((_, publish),) = job.handle(written, 1.0)
    assert isinstance(publish, Publish)
    return job.handle(Published(0, incident.number, step, "/save", target.number), 1.0)


def _join(job: Controller, pid: int, step: int) -> Orders:
    assert job.incident is not None
    (rank,) = job.incident.regrouping.newcomers.by_rank
    _save(job)
    job.handle(Hello(rank, pid), 1.0)
    number, attempt = job.incident.number, job.incident.state.writing.attempt
    orders: Orders = []
    for joining in RANKS:
        orders = job.handle(Joined(joining, number, attempt, step, "a"), 2.0)
    return orders


def test_the_limit_of_recoveries_ends_in_a_restart() -> None:
    """A restart frees what each exchange of groups leaves behind in the processes."""
    job = _job()
    for number in range(MOST_RECOVERIES):
        _kill(job, number % 4, step=5 + number)
        orders = _join(job, 100 + number, step=5 + number)
        assert [type(order) for _, order in orders] == [Recovered, *[Addressed] * 4]
        assert all(isinstance(order.message, Proceed) for _, order in orders if isinstance(order, Addressed))
        assert job.incident is None
        assert job.verdict is None
    ((_, order),) = _kill(job, 1, step=40)
    assert isinstance(order, Prepare)
    assert job.incident is not None
    assert job.incident.regrouping.why_not == "process groups were connected 10 times since the start"


def test_where_torch_reconnects_groups_recoveries_have_no_limit() -> None:
    job = _job(most_recoveries=0)
    for number in range(3 * MOST_RECOVERIES):
        _kill(job, number % 4, step=5 + number)
        _join(job, 100 + number, step=5 + number)
        assert job.incident is None
        assert job.verdict is None


def test_a_later_controller_reuses_no_number() -> None:
    job, next_one = _job(), _job(term=1)
    numbers = set()
    for number in range(MOST_RECOVERIES):
        _kill(job, number % 4, step=5 + number)
        assert job.incident is not None
        numbers.add(job.incident.number)
        _join(job, 100 + number, step=5 + number)
    _kill(next_one, 1, step=5)
    assert next_one.incident is not None
    assert next_one.incident.number > max(numbers)


def test_a_rank_that_cannot_take_part_says_why() -> None:
    job = _job(online="CUDA graphs are on")
    ((_, order),) = _kill(job, 1, step=5)
    assert isinstance(order, Prepare)
    assert job.incident is not None
    assert job.incident.regrouping.why_not == "rank 2: CUDA graphs are on"


@pytest.mark.parametrize("stage", Stage)
def test_only_the_listed_transitions_are_allowed(stage: Stage) -> None:
    for next_stage in Stage:
        state = Incident(
            1, Membership(4), Failures(), opened_at=0.0, timeout_s=120.0, store=("", 1, b"")
        ).state
        state.stage = stage
        if next_stage in TRANSITIONS[stage]:
            state.move(next_stage)
            assert state.stage is next_stage
        else:
            with pytest.raises(AssertionError, match=f"{stage.name} is not followed by {next_stage.name}"):
                state.move(next_stage)


def test_a_rank_that_has_raised_while_others_made_the_update_is_replaced() -> None:
    """The rank is past the barrier, and its main thread will not make the update."""
    job = _job()
    number = job.handle(Raised(1, "ValueError: behind the barrier", 1), 1.0)[0][1]
    assert isinstance(number, Addressed)
    assert isinstance(number.message, Freeze)
    orders: Orders = []
    for rank in RANKS:
        finished = 5 if rank == 1 else 6
        board = BoardRecord(rank, 1, Phase.RUNNING, finished, finished, finished)
        orders = job.handle(Frozen(rank, number.message.incident, board), 1.0)
    assert [type(order) for _, order in orders] == [Prepare], "it still gives step 5"
    ((_, started),) = _save(job)
    assert isinstance(started, Replace)
    assert started.rank == 1
    job.handle(Died(1, -9, 0.0, BoardRecord(1)), 1.0)
    orders = job.handle(Hello(1, 100), 1.0)
    addressed = [order for _, order in orders if isinstance(order, Addressed)]
    assert {
        order.rank: order.message.step for order in addressed if isinstance(order.message, Regroup)
    } == dict.fromkeys(RANKS, 6)


def _probed_ranks(orders: Orders) -> set[int]:
    return {
        order.rank
        for _, order in orders
        if isinstance(order, Addressed) and isinstance(order.message, PresenceProbe)
    }


def _live_on(job: Controller, silent: int, seconds: float) -> Orders:
    """Let time pass while all but `silent` answer; return the orders besides the probes."""
    assert job.incident is not None
    number, ordered = job.incident.number, list[Any]()
    for seconds_now in range(2, 2 + int(seconds)):
        orders = job.tick(float(seconds_now))
        for rank in _probed_ranks(orders) - {silent}:
            job.handle(Present(rank, number), seconds_now + 0.1)
        if not _probed_ranks(orders):
            ordered += orders
    return ordered


def test_a_survivor_that_is_stopped_in_a_recovery_is_replaced_as_well() -> None:
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    assert job.incident is not None
    job.handle(Hello(1, 100), 1.5)
    assert _live_on(job, 2, ROUND_S * ROUNDS) == []
    orders = _live_on(job, 2, ROUND_S * (ROUNDS + 1))
    assert _replaced(orders) == {1, 2}
    for rank, pid in ((2, 200), (1, 101)):
        job.handle(Died(rank, -9, 0.0, BoardRecord(rank)), 20.0)
        orders = job.handle(Hello(rank, pid), 20.0)
    assert _all_join(orders)


def test_where_nobody_else_has_its_shard_all_start_again_when_it_does_not_answer() -> None:
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    assert job.incident is not None
    _live_on(job, 3, ROUND_S * (ROUNDS + 1) + 1)
    assert job.verdict is not None
    assert (job.verdict.outcome, job.verdict.step) == ("saved", 5)
    assert job.incident.regrouping.why_not.startswith("rank 3 does not answer any more; ")


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_new_process_that_is_stopped_is_replaced_in_half_the_time(says_hello: bool) -> None:
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    if says_hello:
        job.handle(Hello(1, 100), 1.5)
    assert _live_on(job, 1, 29.0) == []
    orders = _live_on(job, 1, 40.0)
    (order,) = [order for _, order in orders if isinstance(order, Replace)]
    assert (order.rank, order.cold) == (1, True)


def test_a_controller_that_was_put_off_itself_misses_nobody() -> None:
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    probed = _probed_ranks(job.tick(7.0))
    assert probed == {0, 2, 3}
    assert job.incident is not None
    for time in (20.0, 20.1, 20.2):  # the answers are not read yet
        assert not [order for _, order in job.tick(time) if not isinstance(order, Addressed)]
    assert job.incident.state.writing.attempt == 2


def _replaced(orders: Orders) -> set[int]:
    return {order.rank for _, order in orders if isinstance(order, Replace)}


def _all_join(orders: Orders) -> bool:
    addressed = [order for _, order in orders if isinstance(order, Addressed)]
    return {order.rank for order in addressed if isinstance(order.message, Regroup)} == set(RANKS)


def test_a_new_process_that_uses_cpu_time_may_take_longer_than_the_limit() -> None:
    """The process is replaced half of the limit after its CPU time stops growing."""
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    job.handle(Hello(1, 100), 1.5)
    assert job.incident is not None
    number, replaced_at = job.incident.number, 0
    for time in range(2, 400):
        if time < 200:
            job.handle(Starting(1, time), float(time))
        orders = job.tick(float(time))
        for rank in _probed_ranks(orders):
            job.handle(Present(rank, number), time + 0.1)
        if _replaced(orders):
            replaced_at = time
            break
    assert 229 <= replaced_at <= 199 + 30 + ROUND_S


def test_a_new_process_that_uses_cpu_time_for_ever_ends_the_recovery() -> None:
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    for time in range(2, 60 * MOST_LIMITS + 1):
        job.handle(Starting(1, time), float(time))
        for rank in _probed_ranks(job.tick(float(time))):
            job.handle(Present(rank, 1), time + 0.1)
        assert job.verdict is None
    job.tick(60.0 * MOST_LIMITS + 1.0)
    assert job.incident is not None
    assert job.incident.regrouping.why_not == "not done after 600 s"


def test_a_new_process_that_answers_and_makes_no_progress_is_replaced() -> None:
    """The main thread waits forever while the thread that answers runs."""
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    job.handle(Hello(1, 100), 1.5)
    assert _replaced(_live_on(job, -1, 29.0)) == set()
    assert _replaced(_live_on(job, -1, 40.0)) == {1}


def test_two_failures_of_new_processes_of_a_rank_give_both_reasons() -> None:
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    assert _replaced(job.handle(Refused(1, "the data set has changed"), 1.0)) == {1}
    job.handle(Died(1, 1, 0.0, BoardRecord(1)), 1.1)
    job.handle(Died(1, -9, 0.0, BoardRecord(1)), 2.0)
    assert job.verdict is not None
    reasons = "refused: the data set has changed; then the new process of rank 1 was ended by SIGKILL"
    assert job.verdict.line.endswith(f"not recovered online: the new process of rank 1 {reasons}")


def test_each_further_death_begins_another_attempt() -> None:
    job = _job()
    _kill(job, 1, step=5)
    assert _replaced(job.handle(Died(2, -9, 0.0, BoardRecord(2)), 1.0)) == {2}, "while the step is saved"
    _save(job)
    job.handle(Hello(1, 100), 1.0)
    assert _all_join(job.handle(Hello(2, 101), 1.0))
    orders = job.handle(Died(1, -9, 0.0, BoardRecord(1)), 2.0)
    orders += job.handle(Died(2, -9, 0.0, BoardRecord(2)), 2.0)
    assert _replaced(orders) == {1, 2}, "both new processes"
    job.handle(Hello(1, 102), 3.0)
    assert _all_join(job.handle(Hello(2, 103), 3.0))
    assert job.verdict is None


def test_a_new_process_that_fails_by_the_death_of_its_twin_has_not_failed_itself() -> None:
    """The rank has one failure left."""
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    assert job.incident is not None
    regrouping, state = job.incident.regrouping, job.incident.state
    job.handle(Hello(1, 100), 1.0)
    echo = RegroupFailed(1, state.number, state.writing.attempt, "connection reset", may_be_echo=True)
    assert job.handle(echo, 1.0) == []
    assert _replaced(job.handle(Died(0, -9, 0.0, BoardRecord(0)), 1.5)) == {0, 1}
    job.handle(Died(1, -9, 0.0, BoardRecord(1)), 1.6)
    assert _replaced(job.handle(Died(1, 1, 0.0, BoardRecord(1)), 2.0)) == {1}
    assert regrouping.is_pending


def test_a_survivor_that_raises_keeps_its_process_once() -> None:
    """The survivor may be the only holder of its shard; a second exception counts as its own failure."""
    job = _job()
    _kill(job, 1, step=5)
    _save(job)
    job.handle(Hello(1, 100), 1.0)
    assert job.incident is not None
    state = job.incident.state
    for pid, time, replaced in ((101, 5.0, {1}), (102, 10.0, {1, 2})):
        failure = RegroupFailed(2, state.number, state.writing.attempt, "KeyError: 1", may_be_echo=True)
        assert _replaced(job.handle(failure, time)) == set()
        assert _replaced(job.tick(time + ECHO_S)) == replaced
        job.handle(Died(1, -9, 0.0, BoardRecord(1)), time + ECHO_S)
        job.handle(Hello(1, pid), time + ECHO_S)


def test_two_faults_in_turn_at_one_step_end_in_a_restart() -> None:
    """No recovery finished a step, so the next fault restarts the job."""
    job = _job(most_recoveries=0)
    for number in range(MOST_FROM_A_STEP):
        _kill(job, number % 2, step=5, status=(-9, 7)[number % 2])
        _join(job, 100 + number, step=5)
        assert job.verdict is None
    _kill(job, MOST_FROM_A_STEP % 2, step=5, status=(-9, 7)[MOST_FROM_A_STEP % 2])
    assert job.incident is not None
    assert job.incident.regrouping.why_not == "3 recoveries from step 5 have finished no step"
    _save(job)
    assert job.verdict is not None
    assert (job.verdict.outcome, job.verdict.step) == ("saved", 5)


def test_the_same_exception_at_the_same_step_starts_all_again() -> None:
    job = _job()
    for attempt in range(2):
        orders = job.handle(Raised(1, "ValueError: 7", 1, origin=Origin("ValueError", "train.py:8")), 1.0)
        number = orders[0][1]
        assert isinstance(number, Addressed)
        assert isinstance(number.message, Freeze)
        for rank in RANKS:
            board = BoardRecord(rank, 1, Phase.RUNNING, 5, 5, 5)
            job.handle(Frozen(rank, number.message.incident, board), 1.0)
        _save(job)
        if not attempt:
            assert job.incident is not None
            for rank in RANKS:
                job.handle(Joined(rank, job.incident.number, job.incident.state.writing.attempt, 5, "a"), 2.0)
            assert job.incident is None
    assert job.incident is not None
    assert job.incident.regrouping.why_not == "ValueError at train.py:8 came again at the same step"


def test_a_finished_step_begins_the_count_anew() -> None:
    job = _job(most_recoveries=0)
    for number in range(3 * MOST_FROM_A_STEP):
        step = 5 + number // MOST_FROM_A_STEP
        _kill(job, 1, step=step)
        _join(job, 100 + number, step=step)
        assert job.incident is None


@pytest.mark.parametrize(("steps", "is_recovered"), [(1, False), (OUT_OF_MEMORY_STEPS + 1, True)])
def test_a_rank_without_memory_is_not_replaced_again_and_again(steps: int, is_recovered: bool) -> None:
    reason = "killed by the kernel: out of memory"
    job = _job()
    _kill(job, 1, step=5, reason=reason)
    _join(job, 100, step=5)
    _kill(job, 1, step=5 + steps, reason=reason)
    assert job.incident is not None
    assert job.incident.regrouping.is_pending is is_recovered
    if not is_recovered:
        why_not = "the kernel has ended rank 1 for want of memory again, 1 step later"
        assert job.incident.regrouping.why_not == why_not

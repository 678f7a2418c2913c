"""The campaign of benchmarks/: the drawn faults, and the choice of survivable faults."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import pytest

from tests.faults import harness
from tests.faults.fault import NEWCOMERS, ONCE, Fault

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _schedule

    return _schedule


def _killed(*ranks: int, kind: str = "sigkill") -> list[Fault]:
    return [Fault(rank, "backward", kind) for rank in ranks]


@pytest.mark.parametrize(
    ("cut", "struck", "survives"),
    [
        ("dp2", _killed(0), True),
        ("dp2", _killed(0, 1), False),
        ("dp4", _killed(0, 1), True),
        ("dp4", _killed(1, 3), False),
        ("dp4", [Fault(1, "data", "sigkill", also=3)], False),
        ("dp4", [*_killed(1), Fault(3, "update", "exception")], None),
        ("dp4", [*_killed(1), Fault(2, "update", "exception")], True),
        ("dp4", _killed(0, 1, 2, 3, kind="sigterm"), True),
        ("dp4", [*_killed(1), Fault(3, "dump", "sigstop")], False),
        ("dp4-nodes2", _killed(2, kind="agent-sigkill"), True),
        ("dp4-nodes2", _killed(1, kind="agent-sigkill"), True),
        ("dp4-nodes2", [*_killed(0, kind="agent-sigkill"), Fault(3, "dump", "sigkill")], False),
        ("dp2-nodes2", _killed(0, kind="agent-sigkill"), True),
        ("pp2-dp2-nodes2", _killed(2, kind="agent-sigkill"), False),
        ("dp3-mirror", _killed(2), True),
        ("dp3-mirror", _killed(0, 2), False),
        ("tp2-dp2", _killed(0, 1), True),
        ("tp2-dp2", _killed(0, 2), False),
        ("pp2-dp2", _killed(0, 1), False),
        ("pp2-dp2", _killed(1, 2), True),
        ("dp2-whole", _killed(1), True),
    ],
)
def test_faults_after_which_each_shard_has_a_holder(
    cut: str, struck: list[Fault], survives: bool | None, schedules: ModuleType
) -> None:
    assert schedules.CUTS[cut].survives(struck) is survives


@pytest.mark.parametrize(
    ("cut", "further_faults", "sides"),
    [
        ("dp4-nodes2", [], [True, True]),
        ("dp4-nodes2", _killed(3), [True, False]),
        ("dp2-nodes2", [Fault(0, "dump", "sigstop")], [False, True]),
        ("pp2-dp2-nodes2", [], [False, False]),
    ],
)
def test_the_side_of_a_cut_that_holds_every_shard(
    cut: str, further_faults: list[Fault], sides: list[bool], schedules: ModuleType
) -> None:
    struck = [Fault(0, "data", "cut", heals=3000), *further_faults]
    assert [schedules.CUTS[cut].survives(struck, side) for side in (0, 1)] == sides


def test_a_seed_is_a_schedule(schedules: ModuleType) -> None:
    kinds, cuts = list(schedules.KINDS), list(schedules.CUTS)
    drawn = list(schedules.schedule(1, 500, kinds, cuts, 0.4))
    assert drawn == list(schedules.schedule(1, 500, kinds, cuts, 0.4))
    assert drawn != list(schedules.schedule(2, 500, kinds, cuts, 0.4))
    assert {planned.cut for planned in drawn} == set(cuts)
    assert {planned.kind for planned in drawn} == set(kinds)
    gathered = {planned.cut for planned in drawn if planned.fault.phase == "gather"}
    assert gathered
    assert all(schedules.CUTS[name].layout.distributed_optimizer for name in gathered)
    assert {planned.second.phase for planned in drawn if planned.second} == set(schedules.IN_AN_INCIDENT)
    for planned in drawn:
        struck = planned.at(40, restart=3)
        assert struck.fault.step > 41  # a step is finished in between
        assert [Fault.parse(str(fault)) for fault in struck.faults] == struck.faults
        assert planned.second is None or planned.second.rank != planned.fault.rank


def test_kills_alone_are_those_of_the_first_campaign(schedules: ModuleType) -> None:
    """The section `Random kills` of benchmarks/results/campaigns.md stays reproducible."""
    base, steps = 1, []
    for planned in schedules.schedule(20261121, 200, ["sigkill"], ["dp4"], 0.0):
        assert (planned.second, planned.fault.also) == (None, None)
        base = planned.at(base, 0).fault.step
        steps.append(base)
    assert steps[-1] == 770


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _online

    return _online


def test_a_seed_draws_the_faults_of_online_jobs(online: ModuleType) -> None:
    cuts, kinds = list(online.LAYOUTS), list(online.KINDS)
    drawn = list(itertools.islice(online.draw(1, cuts, 0.4, kinds), 200))
    assert drawn == list(itertools.islice(online.draw(1, cuts, 0.4, kinds), 200))
    assert {job.cut for job in drawn} == set(cuts)
    planned = [incident for job in drawn for incident in job.planned]
    assert {incident.fault.kind for incident in planned} == set(kinds)
    seconds = {(incident.second.restart, incident.second.phase) for incident in planned if incident.second}
    assert seconds == {
        *((ONCE, phase) for phase in online.OF_SURVIVORS),
        *((NEWCOMERS, phase) for phase in online.OF_NEWCOMERS),
    }
    for job in drawn:
        steps = [incident.fault.step for incident in job.planned]
        assert all(later_step - earlier >= 3 for earlier, later_step in itertools.pairwise(steps))
        assert steps[-1] < online.STEPS
        assert [Fault.parse(str(fault)) for fault in job.faults] == job.faults


def test_a_second_fault_leaves_a_holder_of_each_shard(online: ModuleType) -> None:
    import _second_faults

    jobs = list(itertools.islice(_second_faults.draw(1, _second_faults.CUTS), 300))
    assert jobs == list(itertools.islice(_second_faults.draw(1, _second_faults.CUTS), 300))
    struck = set()
    for job in jobs:
        for incident in job.planned:
            second = incident.second
            struck.add((_second_faults.who_is_struck(second), second.phase))
            assert Fault.parse(str(second)) == second
            gone = {incident.fault.rank} if incident.fault.kind != "exception" else set()
            if second.phase in ("regroup", "exchange", "joined") and not second.kind.startswith("agent"):
                gone |= {second.rank}
            assert all(holders - gone for holders in online.ALL[job.cut].holders())
    assert struck == {(holder, phase) for holder, phase, _ in _second_faults.SECONDS}


@pytest.mark.parametrize(
    ("verdict", "reason", "outcome"),
    [
        ("recovered", "", "online"),
        ("saved", "rank 1 has died; not recovered online: it was late; step 5 saved", "restart"),
        ("saved", "rank 1 has died", "failed"),
        ("lost", "shard 1 has no live holder", "failed"),
    ],
)
def test_the_outcome_of_an_online_recovery(
    verdict: str, reason: str, outcome: str, online: ModuleType
) -> None:
    report = {"verdict": verdict, "reason": reason}
    (job,) = itertools.islice(online.draw(1, ["dp2"], 0.0, ["sigkill"]), 1)
    assert online.outcome_of(job, report, [Fault(1, "backward", "sigkill")])[0] == outcome
    faults = [Fault(1, "backward", "sigkill"), Fault(0, "freeze", "sigkill")]
    assert online.outcome_of(job, {"verdict": "lost", "reason": ""}, faults)[0] == "explained"


def test_no_bit_flips_in_a_step_without_an_update(schedules: ModuleType) -> None:
    import corruption

    flips = corruption.draw(harness.DP2_FP16, ["main"], 4, 1, {5, 13})
    assert [flip.step for flip in flips] == [7, 9, 11, 15]

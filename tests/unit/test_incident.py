"""Incidents in random orders of deaths, failures and replies: see `simulation.py` for what is asserted."""

from __future__ import annotations

from collections import Counter

import pytest

from adaptor.control.messages import Verdict
from tests.unit.simulation import Simulation

RUNS = 400


def run(job: Simulation, seed: str, further_faults: int, in_time: bool) -> Verdict:
    try:
        return job.run(further_faults, in_time)
    except Exception as error:
        pytest.fail(f"seed {seed}: {error!r}\n" + "\n".join(job.log))


def test_no_order_of_events_breaks_an_invariant() -> None:
    ends: Counter[str] = Counter()
    for number in range(RUNS):
        job = Simulation(seed := f"many-{number}", trouble=0.03)
        job.fault(may_raise=True)
        verdict = run(job, seed, further_faults=number % 4, in_time=number % 3 > 0)
        ends[verdict.outcome] += 1
        if verdict.outcome == "saved":
            assert job.disk.published[-1] == verdict.step > job.origin, seed
        else:
            # What was published without a word of it was published too late.
            assert not job.disk.published or job.now > 120.0, seed
    assert all(ends[outcome] > RUNS // 20 for outcome in ("saved", "lost", "nothing")), ends


def test_a_single_fault_costs_no_step_that_is_there() -> None:
    for number in range(RUNS):
        job = Simulation(seed := f"one-{number}", trouble=0.0)
        job.fault(may_raise=True)
        best = job.best_step()
        verdict = run(job, seed, further_faults=0, in_time=True)
        if best is None:
            assert verdict.outcome == "lost", seed
        elif best <= job.origin:
            assert verdict.outcome == "nothing", seed
        else:
            assert (verdict.outcome, verdict.step) == ("saved", best), seed
            assert job.disk.published == [best], seed

"""The framework's own log after an online recovery: a line for each step, as in a run without faults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness
from tests.faults.harness import DP2_FP16, DP2_RAMPUP, DP4, FP16_SKIPS, ITERATIONS, PP2_DP2, Ended
from tests.faults.scenario import Baseline, BaselineOf
from tests.integration.test_online import online, trains_on

# Another rank may write before it or behind it, before the end of the line.
LINE = re.compile(r"\[[^]]*\] (iteration +(\d+)/.* number of nan iterations: +\d+ \|)")
# No two runs take the same time.
TIME = re.compile(r" elapsed time per iteration \(ms\): [\d.]+ \|")
# Three lines; the first of them is of steps 1 to 3.
DP4_EVERY_3RD = replace(DP4, name="dp4-log-3", extra=("--log-interval", "3"))


def lines(log: str) -> dict[int, list[str]]:
    """The framework's lines, by step, without times."""
    found: dict[int, list[str]] = {}
    for line in log.splitlines():
        if match := LINE.search(line):
            found.setdefault(int(match[2]), []).append(TIME.sub("", match[1]))
    return found


def logs_the_same(ended: Ended, baseline: Baseline, interval: int = 1) -> None:
    """Each line is there once, and says what that of the unmodified framework says."""
    expected = lines((baseline.checkpoints.parent / "agent0.log").read_text())
    assert list(expected) == list(range(interval, ITERATIONS + 1, interval))
    assert lines(ended.log) == expected


@pytest.mark.parametrize("rank", [1, 3], ids=["another", "the-one-that-writes"])
@pytest.mark.parametrize("phase", ["backward", "update", "gather", "between"])
def test_the_line_of_every_step(phase: str, rank: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """In the last phases all have made the update of step 6, and not all have begun the next."""
    ended = trains_on(
        online(tmp_path, DP4, [f"rank={rank},step=6,phase={phase},kind=sigkill"]), baseline_of(DP4)
    )
    logs_the_same(ended, baseline_of(DP4))


def test_a_line_that_was_written_is_not_written_again(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Rank 1, which has written it, is killed in the evaluation behind the step."""
    job = online(tmp_path, DP2_RAMPUP, ["rank=1,step=5,phase=evaluation-forward,kind=sigkill"])
    ended = harness.run(job)
    assert "1 incident (1 without a restart), 0 steps lost" in ended.log
    logs_the_same(ended, baseline_of(DP2_RAMPUP))


@pytest.mark.parametrize("phase", ["backward", "gather"])
@pytest.mark.parametrize("step", [5, 6])
def test_averages_over_an_interval(step: int, phase: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Those that the lost rank had added up, in the middle of an interval and where a line is due."""
    layout = DP4_EVERY_3RD
    job = online(tmp_path, layout, [f"rank=3,step={step},phase={phase},kind=sigkill"])
    logs_the_same(trains_on(job, baseline_of(layout)), baseline_of(layout), interval=3)


def test_the_losses_of_the_last_stage(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = online(tmp_path, PP2_DP2, ["rank=2,step=6,phase=gather,kind=sigkill"])
    logs_the_same(trains_on(job, baseline_of(PP2_DP2)), baseline_of(PP2_DP2))


def test_a_step_that_was_left_out(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = online(tmp_path, DP2_FP16, [f"rank=1,step={FP16_SKIPS},phase=between,kind=sigkill"])
    logs_the_same(trains_on(job, baseline_of(DP2_FP16)), baseline_of(DP2_FP16))


def test_two_faults_in_one_interval(tmp_path: Path, baseline_of: BaselineOf) -> None:
    layout = DP4_EVERY_3RD
    faults = ["rank=3,step=4,phase=gather,kind=sigkill", "rank=3,step=5,phase=update,kind=sigkill,restart=-1"]
    ended = trains_on(online(tmp_path, layout, faults), baseline_of(layout), incidents=2)
    logs_the_same(ended, baseline_of(layout), interval=3)

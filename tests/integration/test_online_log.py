"""The framework's own log after an online recovery: a line for each step, as in a run without faults.

`test_online.py` kills the rank that writes the log.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import framework_log, harness
from tests.faults.harness import DP2_FP16, DP2_RAMPUP, DP4, FP16_SKIPS
from tests.faults.scenario import BaselineOf
from tests.integration.test_online import online, trains_on

# Three lines; the first of them is of steps 1 to 3.
DP4_EVERY_3RD = replace(DP4, name="dp4-log-3", extra=("--log-interval", "3"))


def test_a_line_that_was_written_is_not_written_again(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Rank 1, the writer of the line, is killed in the evaluation after the step."""
    job = online(tmp_path, DP2_RAMPUP, ["rank=1,step=5,phase=evaluation-forward,kind=sigkill"])
    result = harness.run(job)
    assert "1 incident (1 without a restart), 0 steps lost" in result.log
    framework_log.assert_same(result, baseline_of(DP2_RAMPUP))


def test_a_line_before_an_abandoned_step_is_not_written_again(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Rank 3 has written the line, and waits for the timers of rank 1."""
    trains_on(online(tmp_path, DP4, ["rank=1,step=6,phase=line,kind=sigkill"]), baseline_of(DP4))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("step=4,phase=gather,kind=sigkill", "step=5,phase=update,kind=sigkill"),
        ("step=5,phase=backward,kind=sigkill", "step=6,phase=gather,kind=sigkill"),
        ("step=4,phase=between,kind=sigkill-behind-all", "step=6,phase=backward,kind=sigkill"),
    ],
)
def test_averages_over_an_interval(first: str, second: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The sums of the lost ranks, within an interval and at a line.

    Between lines the others may have begun the next step before the lost rank adds up its losses.
    """
    layout = DP4_EVERY_3RD
    job = online(tmp_path, layout, [f"rank=3,{first}", f"rank=3,{second},restart=-1"])
    trains_on(job, baseline_of(layout), incidents=2, log_interval=3)


def test_a_step_that_was_left_out(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = online(tmp_path, DP2_FP16, [f"rank=1,step={FP16_SKIPS},phase=between,kind=sigkill"])
    trains_on(job, baseline_of(DP2_FP16))

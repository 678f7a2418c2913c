"""Compares the log lines of Megatron-LM and ModelLink for each step with those of an undisturbed run."""

from __future__ import annotations

import re
from collections.abc import Collection

from tests.faults.harness import ITERATIONS, Ended
from tests.faults.scenario import Baseline

# Another rank may write in front of the line or behind it, before the end of the line.
LINE = re.compile(r"(iteration +(\d+)/.* number of nan iterations: +\d+ \|)")
# The times of two runs differ.
TIME = re.compile(r" elapsed time per iteration \(ms\): [\d.]+ \|")
# The auxiliary losses: a line that is written in a recovery lacks them.
AUXILIARY = re.compile(r" (?:\w*load_balancing_loss|z_loss|mtp_\d+ loss): [\d.E+-]+ \|")


def lines(log: str) -> dict[int, list[str]]:
    """Return the framework's lines by step, without times."""
    by_step: dict[int, list[str]] = {}
    for line in log.splitlines():
        if match := LINE.search(line):
            by_step.setdefault(int(match[2]), []).append(TIME.sub("", match[1]))
    return by_step


def assert_same(
    result: Ended, baseline: Baseline, interval: int = 1, resumed_step: int = 0, written: Collection[int] = ()
) -> None:
    """Assert that each line is logged once, and equals that of the unmodified framework.

    Args:
        result: a job of `ITERATIONS` steps.
        baseline: the undisturbed run.
        interval: value of `--log-interval`, in steps.
        resumed_step: the step that both runs resumed from.
        written: steps whose lines were written in a recovery, in jobs that log auxiliary losses.
    """
    expected = lines((baseline.checkpoints.parent / "agent0.log").read_text())
    assert list(expected) == list(range(resumed_step + interval, ITERATIONS + 1, interval))
    for step in written:
        (line,) = expected[step]
        assert AUXILIARY.search(line)
        expected[step] = [AUXILIARY.sub("", line)]
    assert lines(result.log) == expected

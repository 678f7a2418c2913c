"""The lines that Megatron-LM and ModelLink print for their steps, and those of a run with no fault."""

from __future__ import annotations

import re
from collections.abc import Collection

from tests.faults.harness import ITERATIONS, Ended
from tests.faults.scenario import Baseline

# Another rank may write before it or behind it, before the end of the line.
LINE = re.compile(r"(iteration +(\d+)/.* number of nan iterations: +\d+ \|)")
# No two runs take the same time.
TIME = re.compile(r" elapsed time per iteration \(ms\): [\d.]+ \|")
# What a line lacks that is written in a recovery.
AUXILIARY = re.compile(r" (?:\w*load_balancing_loss|z_loss|mtp_\d+ loss): [\d.E+-]+ \|")


def lines(log: str) -> dict[int, list[str]]:
    """The framework's lines, by step, without times."""
    found: dict[int, list[str]] = {}
    for line in log.splitlines():
        if match := LINE.search(line):
            found.setdefault(int(match[2]), []).append(TIME.sub("", match[1]))
    return found


def assert_same(
    ended: Ended, baseline: Baseline, interval: int = 1, after: int = 0, written: Collection[int] = ()
) -> None:
    """Each line is there once, and says what that of the unmodified framework says.

    Args:
        ended: a job of `ITERATIONS` steps.
        baseline: the same job without faults.
        interval: `--log-interval`, in steps.
        after: the step behind which both have begun.
        written: the steps whose lines were written in a recovery, in jobs that log auxiliary losses.
    """
    expected = lines((baseline.checkpoints.parent / "agent0.log").read_text())
    assert list(expected) == list(range(after + interval, ITERATIONS + 1, interval))
    for step in written:
        (line,) = expected[step]
        assert AUXILIARY.search(line)
        expected[step] = [AUXILIARY.sub("", line)]
    assert lines(ended.log) == expected

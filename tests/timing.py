"""Measures each test: seconds, and CPU seconds of its process and of its ended children.

CPU seconds of processes that another process has started for a test are added by `charge`: the kernel counts
them only when that process ends, in whichever test that happens.

The slowest tests are printed at the end of a run, all are written to .cache/durations.tsv. A run fails if a
collected test has no report.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).resolve().parents[1] / ".cache" / "durations.tsv"
SHOWN = 15
_BEGAN = pytest.StashKey[tuple[float, float]]()
_charged = 0.0


def charge(seconds: float) -> None:
    """Add CPU seconds of a process that is no child of this one; negative: the kernel counts them now."""
    global _charged
    _charged += seconds


def _spent() -> tuple[float, float]:
    """Return seconds and CPU seconds until now."""
    own_usage, children = (
        resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return time.monotonic(), sum(
        (own_usage.ru_utime, own_usage.ru_stime, children.ru_utime, children.ru_stime, _charged)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN] = _spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        seconds, cpu = (end - begin for end, begin in zip(_spent(), item.stash[_BEGAN], strict=True))
        report.user_properties.append(("spent", (seconds, cpu)))
    return report


class Timing:
    """Collects reports in the printing process; workers of pytest-xdist send theirs."""

    def __init__(self) -> None:
        self.collected: set[str] = set()
        self.spent: dict[str, tuple[float, float]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.spent[report.nodeid] = dict(report.user_properties)["spent"]  # type: ignore[assignment]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly and self.silent:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    @property
    def silent(self) -> list[str]:
        """Return the tests that were collected without a report."""
        return sorted(self.collected - self.spent.keys())

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if config.option.collectonly or not self.spent:
            return
        slowest = sorted(self.spent.items(), key=lambda entry: -entry[1][0])
        terminalreporter.section("slowest tests: seconds, CPU seconds")
        for name, (seconds, cpu) in slowest[:SHOWN]:
            terminalreporter.write_line(f"{seconds:7.1f} {cpu:7.1f}  {name}")
        total = [sum(seconds[number] for seconds in self.spent.values()) for number in (0, 1)]
        counted = f"all {len(self.spent)} that ran, of {len(self.collected)} collected"
        terminalreporter.write_line(f"{total[0]:7.1f} {total[1]:7.1f}  {counted}")
        for name in self.silent:
            terminalreporter.write_line(f"no report: {name}", red=True)
        DURATIONS.parent.mkdir(exist_ok=True)
        DURATIONS.write_text(
            "".join(f"{seconds:.2f}\t{cpu:.2f}\t{name}\n" for name, (seconds, cpu) in slowest)
        )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timing(), "timing")

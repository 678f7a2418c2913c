"""The table of attacks and odd machines; `--write benchmarks/results/robustness.md` writes it to that page.

Runs every test that is marked `@pytest.mark.robustness(area, case, expected)` and makes a row for each case.
The tests of a case, parametrized tests included, share a row; the case has passed when all of them have
passed. `-k` runs a part; the other rows keep the results of earlier runs from out/robustness.json. With
`--junit FILE` no test is run: the outcomes are read from the file of `make test TESTS=--junitxml=FILE`. The
exit code is that of pytest.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests import machine
from tests.pages import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "out" / "robustness.json"
MARKER = "robustness"

Case = tuple[str, str, str]  # area, what happens, what must hold

_WHAT = """\
# Attacks and odd machines

This table has what new users, attackers and unusual machines do to a job, and what must hold then. Each row
is one or more tests with the marker `robustness`. *Hold* means that all tests of the row have passed.

- A, the use of the adaptor. A1: the calls of a training loop; A2: hangs and watchdogs; A3: faults that come
  again; A4: signals, and nodes that do not come; A5: reports before a job; A6: who is blamed; A7, A9: modules
  with the same names
- B, the machine, its files and networks. B1: errors in the adaptor itself; B2: the rendezvous store;
  B3: damaged checkpoints; B4: certificates; B5: logs that cannot be written; B6: how `ttprun` is started;
  B7: processes, descriptors and temporary files; B8: what is left over on the disk; B9: the start of
  training; B10: two jobs in one folder
- C, other users and forged messages. C1: saves and agents; C2: the lock of the save folder; C3: connections;
  C4: secrets

Faults of processes and networks: campaigns.md and layouts.md in the same folder.
`python -m pytest -m robustness` runs the tests alone. This command runs them and writes this page:"""


@dataclass
class Result:
    """The outcome of the tests of one case.

    Attributes:
        outcomes: by test, `passed`, `failed` or `skipped`.
        reason: the reason of a skipped test.
        seconds: of all the tests.
        day: the day of the run.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    day: str = ""

    @property
    def words(self) -> str:
        """Return the worst outcome; a row holds when every test of it does."""
        for worst in ("failed", "skipped", "passed"):
            if worst in self.outcomes.values():
                return f"not run here: {self.reason}" if worst == "skipped" else worst
        return "not run"


class Collector:
    """A pytest plugin that finds the cases and keeps the outcome of each."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.results: dict[Case, Result] = {}
        self._cases_of: dict[str, list[Case]] = {}

    @pytest.hookimpl(tryfirst=True)  # before -k leaves tests out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers(MARKER):
                case = _case(item.nodeid, mark)
                self._cases_of.setdefault(item.nodeid, []).append(case)
                if case not in self.cases:
                    self.cases.append(case)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        skip_reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self._add(report.nodeid, report.outcome, report.duration, skip_reason if report.skipped else "")

    def read(self, junit: Path) -> None:
        """Take the outcomes of the tests that were collected from a file in JUnit's format."""
        test_cases = {
            (case.get("classname"), case.get("name")): case for case in xml.parse(junit).iter("testcase")
        }
        for test in self._cases_of:
            path, _, name = test.partition("::")
            case = test_cases.get((path.removesuffix(".py").replace("/", "."), name))
            if case is None:
                continue
            skipped = case.find("skipped")
            failed = case.find("failure") is not None or case.find("error") is not None
            outcome = "failed" if failed else "passed" if skipped is None else "skipped"
            reason = "" if skipped is None else skipped.get("message", "")
            self._add(test, outcome, float(case.get("time", "0")), reason)

    def _add(self, test: str, outcome: str, seconds: float, reason: str) -> None:
        for case in self._cases_of.get(test, ()):
            result = self.results.setdefault(case, Result(day=time.strftime("%Y-%m-%d")))
            result.seconds += seconds
            outcome_before = result.outcomes.get(test, "passed")
            result.outcomes[test] = outcome if outcome_before == "passed" else outcome_before
            if reason:
                result.reason = reason.removeprefix("Skipped: ")


def _case(test: str, mark: pytest.Mark) -> Case:
    if len(mark.args) != 3 or mark.kwargs or not re.fullmatch(r"[A-Z]\d+", str(mark.args[0])):
        raise pytest.UsageError(
            f"{test}: {MARKER}{mark.args} must be an area like B3, a case, what must hold"
        )
    return mark.args[0], mark.args[1], mark.args[2]


def page(cases: Iterable[Case], results: Mapping[Case, Result], command: str, machine: str) -> str:
    """Return the page: a row for each case, in the order of their areas."""
    ordered = sorted(cases, key=lambda case: (case[0][0], int(case[0][1:])))
    results_in_order = [results.get(case, Result()) for case in ordered]
    rows = [
        [*map(_cell, (*case, result.words)), f"{result.seconds:.1f}" if result.outcomes else ""]
        for case, result in zip(ordered, results_in_order, strict=True)
    ]
    passed = sum(result.words == "passed" for result in results_in_order)
    days = sorted({result.day for result in results_in_order if result.day}) or [time.strftime("%Y-%m-%d")]
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    parts = [
        _WHAT,
        f"    {command}",
        f"On {machine}, {period}: {passed} of {len(results_in_order)} hold.",
        table(["area", "what happens", "what must hold", "result", "seconds"], rows),
    ]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def load(path: Path) -> dict[Case, Result]:
    """Return the results of an earlier run from `path`; empty without an earlier run."""
    if not path.exists():
        return {}
    return {tuple(line["case"]): Result(**line["result"]) for line in json.loads(path.read_text())}


def keep(path: Path, results: Mapping[Case, Result]) -> None:
    """Write `results` to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"case": case, "result": asdict(result)} for case, result in results.items()]
    path.write_text(json.dumps(lines, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="write the table there (benchmarks/results/robustness.md)",
    )
    parser.add_argument("-k", metavar="EXPR", default="", help="run only these tests, as pytest's -k")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept between runs")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="run nothing; outcomes of an earlier run")
    parser.add_argument("tests", nargs="*", help="files or folders of tests (default: all)")
    parsed = parser.parse_args(arguments)
    collector = Collector()
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-m", MARKER]
    options += ["-k", parsed.k] if parsed.k else []
    options += ["--collect-only", "-q"] if parsed.junit else []
    code = pytest.main([*options, *(parsed.tests or [str(ROOT / "tests")])], plugins=[collector])
    if parsed.junit:
        collector.read(parsed.junit)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    results = {**load(parsed.results), **collector.results}
    keep(parsed.results, results)
    text = page(collector.cases, results, _command(parsed), machine.line(machine.describe()))
    print(text)
    if parsed.write is not None:
        parsed.write.write_text(text)
    return int(code)


def _command(options: argparse.Namespace) -> str:
    return "python -m tests.robustness" + (f" --write {options.write}" if options.write else "")


if __name__ == "__main__":
    sys.exit(main())

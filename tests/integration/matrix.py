"""The whole cross product: `python -m tests.integration.matrix --write benchmarks/results/layouts.md`.

Layouts × replicas × local copies or the barrier, for some × precisions and checkpoint formats. In each cell
Megatron-LM trains under ttprun and loses a rank, once early in a step and once late (rank, phase and step are
drawn by `--seed`). The survivors must save, bit for bit, the unmodified framework's own checkpoint of that
step, and under plain torchrun the unmodified framework must resume from their checkpoint with the losses and
gradient norms of a run without a fault. Combinations that the framework cannot run on a CPU must fail with
the listed reason.

An interrupted run can be started again: trials with a result in OUT/results.jsonl are skipped, unless the
trial failed. Remove OUT after a change of the tested code. The exit code is 1 if a cell has failed, 3 if
`--limit` ended the run early.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.faults import harness, library, outcome, scenario
from tests.faults.cells import FORMATS, Cell, cells
from tests.faults.fault import Fault
from tests.faults.harness import ITERATIONS, ROOT, Ended, Job
from tests.faults.layouts import CONTEXT, IMPOSSIBLE, Impossible
from tests.faults.scenario import BaselineOf
from tests.integration.matrix_page import write

SEED = 20261121
# By replica: the phase of step 6, and the step that is saved then.
CONTEXT_FAULTS = {"split": ("update", 6), "mirror": ("backward", 5)}
# Written after a cell: what it was, and what has become of it.
Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One entry of the matrix. `run` gets an empty folder and returns the columns of the result."""

    name: str
    run: Callable[[Path], Result]


def strike(cell: Cell, seed: int, baseline_of: BaselineOf, out: Path) -> Result:
    """Run a cell: the fault, the last words, and a resume by the unmodified framework.

    Raises AssertionError.
    """
    baseline = baseline_of(cell.layout)
    skipped = {line["iteration"] for line in baseline.records[0] if line["skipped"]}
    fault, saved = cell.fault(seed, skipped)
    print(f"  {fault}", flush=True)
    job = Job(
        out / "job",
        cell.layout,
        save=out / "save",
        save_interval=FORMATS[cell.format].interval,
        options=["--ttp-local-copy", str(cell.copies)],
        faults=[str(fault)],
    )
    code = 1 if fault.kind == "exception" else 137
    result, step = scenario.ends(job, baseline, code=code, saved=saved)
    _assert_told(result, cell)
    assert result.last_line.startswith("[ttp] "), result.last_line
    assert f"step {step} is saved, " in result.last_line, result.last_line
    scenario.goes_on(job, baseline, step)
    return _entry(cell, fault, step)


def _assert_told(result: Ended, cell: Cell) -> None:
    """The job had the replicas and the copies that the cell is about."""
    copies_by_replica = {
        "split": "second copies of optimizer shards by split, 2 instances",
        "mirror": "second copies of optimizer shards by mirror",
        "none": "the data-parallel size is 1"
        if cell.layout.data_parallel_size == 1
        else "every data-parallel rank has the whole optimizer state",
    }
    assert copies_by_replica[cell.replica] in result.log, f"no replicas by {cell.replica}: {result.said}"
    assert ("[ttp] a local copy of the optimizer state" in result.log) == cell.copies, result.said


def _entry(cell: Cell, fault: Fault, step: int) -> Result:
    kind = "SIGKILL" if fault.kind == "sigkill" else fault.kind
    return {
        "layout": cell.family,
        "precision": cell.layout.precision,
        "replica": cell.replica,
        "copies": cell.copies,
        "format": cell.format,
        "fault": f"{kind} of rank {fault.rank}, {fault.phase} of step {fault.step}",
        "saved": step,
    }


def share_sequences(replica: str, out: Path) -> Result:
    """Context parallelism, by a script of the tests that saves nothing comparable by itself."""
    phase, step = CONTEXT_FAULTS[replica]
    cell = Cell(CONTEXT.name, CONTEXT, replica, False, "torch", "")
    fault = Fault(rank=1, step=6, phase=phase, kind="sigkill")
    train = partial(library.train, layout=CONTEXT, instances=2 if replica == "split" else 1)
    arguments = ("--context", "2")
    undisturbed = train(out / "undisturbed", *arguments, launcher="torchrun", code=0)
    print(f"  {fault}", flush=True)
    arguments += ("--save", str(out / "save"))
    result = train(out / "job", *arguments, options=["--ttp-replica", replica], faults=[str(fault)], code=137)
    _assert_told(result, cell)
    outcome.assert_saved(out / "save", step)
    outcome.assert_same_training(result, undisturbed.records, steps=range(1, step))
    resumed = train(out / "resumed", *arguments, launcher="torchrun", code=0)
    outcome.assert_same_training(resumed, undisturbed.records, steps=range(step + 1, ITERATIONS + 1))
    return _entry(cell, fault, step)


def fails_by_itself(impossible: Impossible, out: Path) -> Result:
    """Assert that the unmodified framework fails with the listed reason."""
    job = Job(
        out / "job",
        impossible.layout,
        launcher="torchrun",
        save=out / "save",
        save_interval=4,
        arguments=impossible.arguments,
    )
    result = harness.run(job)
    assert result.code != 0, "it runs: take it off the list"
    assert impossible.says in result.log, result.log[-3000:]
    precision = () if impossible.layout.precision == "bf16" else (f"--{impossible.layout.precision}",)
    arguments = " ".join((*impossible.layout.arguments, *precision, *impossible.arguments))
    return {
        "impossible": impossible.layout.name.partition(",")[0],
        "arguments": arguments,
        "because": impossible.because,
    }


class Results:
    """The file of what is known, a line for each run of a trial."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[Result] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, line: Result) -> None:
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @property
    def latest(self) -> dict[str, Result]:
        """By the name of the trial."""
        return {line["trial"]: line for line in self.lines}

    def passed(self, name: str) -> bool:
        return name in self.latest and not self.latest[name]["problem"]


def trials(faults: int, seed: int, baseline_of: BaselineOf) -> list[Trial]:
    """Return all trials in the order of the run."""
    planned = [Trial(cell.name, partial(strike, cell, seed, baseline_of)) for cell in cells(faults)]
    planned += [
        Trial(f"{CONTEXT.name} / {replica}", partial(share_sequences, replica)) for replica in CONTEXT_FAULTS
    ]
    return planned + [
        Trial(f"not: {impossible.layout.name}", partial(fails_by_itself, impossible))
        for impossible in IMPOSSIBLE
    ]


def attempt(trial: Trial, out: Path, seed: int) -> Result:
    """Run a trial; an error becomes part of the result."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.time()
    problem, columns = "", {}
    try:
        columns = trial.run(out)
    except (AssertionError, ValueError, pytest.fail.Exception) as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"[:2000] or "failed"
    else:
        shutil.rmtree(out)
    seconds = round(time.time() - began, 1)
    return {
        "trial": trial.name,
        "problem": problem,
        "seed": seed,
        "began": began,
        "seconds": seconds,
        **columns,
    }


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out/matrix", help="where jobs run and results lie"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--faults", type=int, choices=(1, 2), default=2, help="in each combination")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="trials whose name has it"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no trial after so long")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables of the page")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    options = parser.parse_args()
    # A job must not outlive the one who looks after it.
    signal.signal(signal.SIGTERM, _leave)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    kept = os.environ.get("TTP_TEST_BASELINES")
    baseline_of = scenario.baselines(Path(kept) if kept else out / "baselines")
    every = trials(options.faults, options.seed, baseline_of)
    chosen = [
        trial for trial in every if not options.only or any(text in trial.name for text in options.only)
    ]
    if not chosen:
        parser.error(f"--only is {', '.join(options.only)}: no trial has that in its name; see --list")
    if options.list:
        print("\n".join(trial.name for trial in chosen))
        return 0
    results = Results(out / "results.jsonl")
    began = time.monotonic()
    for number, trial in enumerate(chosen, 1):
        if results.passed(trial.name):
            continue
        if options.limit is not None and time.monotonic() - began > options.limit:
            break
        print(f"{number} of {len(chosen)}: {trial.name}", flush=True)
        results.add(attempt(trial, out / "trial", options.seed))
        line = results.lines[-1]
        print(f"  {line['problem'] or 'passed'}, {line['seconds']:.0f} s", flush=True)
        if line["problem"]:
            (out / "trial").rename(out / f"failed-{len(results.lines)}")
    names = {trial.name for trial in chosen}
    lines = [line for name, line in results.latest.items() if name in names]
    failed = [line["trial"] for line in lines if line["problem"]]
    open_trials = len(names) - len(lines)
    print(
        f"{len(lines) - len(failed)} passed, {len(failed)} failed, {open_trials} not run yet",
        *failed,
        sep="\n  ",
    )
    if options.write:
        write(options.write, results.lines, [trial.name for trial in every], options.seed, options.faults)
    return 1 if failed else 3 if open_trials else 0


if __name__ == "__main__":
    sys.exit(main())

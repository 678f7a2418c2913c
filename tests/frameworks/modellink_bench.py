"""Runs checks on a framework of ModelLink's kind, and judges the outcomes.

The framework's own resume loses the low bits of the main params. Therefore a run resumed from last words is
compared with a run resumed from the framework's own checkpoint of that step. With `split` the gradients are
summed in another order than without; the reference is then an undisturbed job with the adaptor.
"""

from __future__ import annotations

import datetime
import platform
import re
import shutil
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import framework_log, harness, namespaces, outcome
from tests.faults.harness import ITERATIONS, Ended, Job, Layout, Program
from tests.faults.same import differences
from tests.faults.scenario import Baseline
from tests.frameworks import record
from tests.frameworks.checks import NOT_ONLINE, RECOVERED, REFUSED, SAID

# How the reference of a layout with `split` is named.
SPLIT = "-split"

_Records = dict[int, list[dict[str, Any]]]


@dataclass(frozen=True)
class Check:
    """A fault in a layout, and its expected outcome.

    Attributes:
        spec: faults for the harness, separated by blanks.
        step: the step that must be saved; None: there is no fault, or nothing is saved.
        load: the step of a checkpoint of plain torchrun from which the job begins.
        last: the last line of a job that saves nothing.
        online: whether TTP_ONLINE is on. Without `step` the job must recover without a restart; with
            `step` it must report at its start that online recovery is impossible.
        spares: with `online`: the number of spare processes.
        saves: with `online`: value of `--save-interval`.
    """

    layout: Layout
    fault: str = "none"
    spec: str = ""
    step: int | None = None
    restarts: int = 0
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    nodes: int = 1
    load: int | None = None
    last: str = ""
    online: bool = False
    spares: int = 1
    saves: int = 1000


class Bench:
    """Runs the checks on one framework, whose jobs run below `out`."""

    def __init__(self, program: Program, out: Path, name: str = "") -> None:
        self._program, self._out, self._name = program, out, name

    def check(self, check: Check, name: str) -> bool:
        """Run a check and print its row; errors go to stderr."""
        layout = check.layout
        replica = layout.replica
        try:
            replica, result = self.run(check, name)
        except (AssertionError, pytest.fail.Exception):
            traceback.print_exc()
            result = "**failed**"
        versions = f"{platform.python_version()}, {torch.__version__}"
        today = datetime.date.today().isoformat()
        cut = layout.name if layout.precision in layout.name else f"{layout.name}, {layout.precision}"
        cut += f", {check.nodes} nodes" if check.nodes > 1 else ""
        start = "" if check.load is None else f"begun from plain torchrun's step {check.load}; "
        way = f"{replica}, {' '.join(check.options)}" if check.options else replica
        print(
            f"| {self._name} | {versions} | {cut} | {way} | {start}{check.fault} | {result} | {today} |",
            flush=True,
        )
        return result != "**failed**"

    def run(self, check: Check, name: str) -> tuple[str, str]:
        """Return the replicas of the job, and its outcome. Raises AssertionError for another outcome."""
        layout = check.layout
        out = self._out / name
        shutil.rmtree(out, ignore_errors=True)
        job = Job(
            out,
            layout,
            save=out / "save",
            restarts=check.restarts,
            faults=check.spec.split(),
            arguments=check.options,
            environment=dict(check.environment),
            options=_online(check) if check.online else (),
            save_interval=check.saves,
            nodes=check.nodes,
            program=self._program,
        )
        if check.load is not None:
            job.load = self._begin(layout, check.load)
        with namespaces.two() if check.nodes > 1 else nullcontext() as network:
            result = harness.run(replace(job, network=network))
        match = re.search(r"second copies of optimizer shards by (\w+)", result.log)
        replica = f"{match[1]} ({layout.replica})" if match else "none needed"
        if check.online and check.step is None:
            return replica, self._goes_on(
                check, result, self._reference(layout, "split" in replica, check.load)
            )
        if check.online:
            assert len(NOT_ONLINE.findall(result.log)) == 1, result.log[:3000]
        if check.last:
            return replica if check.spec else layout.replica, _ends_without(check, result)
        judged = self._judge(check, result, self._reference(layout, "split" in replica, check.load))
        return replica, f"{SAID if check.online else ''}{judged}"

    def _goes_on(self, check: Check, result: Ended, reference: Path) -> str:
        """Assert that the job trained on without a restart: records, log and checkpoints equal the
        reference's.
        """
        save = result.job.save
        assert save is not None
        assert set(result.codes) == {0}, result.log[-3000:]
        count, begin = len(result.job.faults), check.load or 0
        several = "" if count == 1 else "s"
        summary = f"{count} incident{several} ({count} without a restart), 0 steps lost"
        assert result.log.count(summary) >= 1, result.log[-3000:]
        for stamp in result.stamps:
            if stamp["spare"]:
                assert f"replaced by pid {stamp['spare']}, " in result.log
        expected = Baseline(record.read(reference / "record"), reference / "save")
        saved = {int(step) for step in re.findall(r"training goes on after step (\d+)", result.log)}
        # A rank that was killed when all had finished the step has not recorded it.
        steps = set(range(begin + 1, ITERATIONS + 1)) - saved
        outcome.assert_same_training(result, expected.records, steps=steps)
        extra = check.layout.extra
        interval = int(extra[extra.index("--log-interval") + 1]) if "--log-interval" in extra else 1
        framework_log.assert_same(result, expected, interval, resumed_step=begin)
        for step in (*saved, ITERATIONS):
            name = f"iter_{step:07d}"
            unequal = differences(save / name, expected.checkpoints / name)
            assert unequal == [], unequal
        return RECOVERED

    def _reference(self, layout: Layout, split: bool, load: int | None = None) -> Path:
        """Return the folder of an undisturbed job that saves every step, without the adaptor if comparable.

        Args:
            load: the step of plain torchrun's checkpoint from which it resumes.
        """
        begin = "" if load is None else f"-from-{load}"
        out = self._out / "references" / f"{layout.name}{begin}{SPLIT if split else ''}"
        if not (out / "done").exists():
            shutil.rmtree(out, ignore_errors=True)
            launcher = "ttprun" if split else "torchrun"
            job = Job(out, layout, launcher, save=out / "save", save_interval=1, program=self._program)
            if load is not None:
                job.load = self._begin(layout, load)
            result = harness.run(job)
            assert result.code == 0, result.log[-3000:]
            (out / "done").touch()
        return out

    def _begin(self, layout: Layout, step: int) -> Path:
        """Return the folder of plain torchrun's checkpoint of `step`; its path becomes an argument of the
        jobs.
        """
        plain = self._reference(layout, split=False)
        return self._checkpoint(plain, step, plain.with_name(f"{layout.name}-load-{step}"))

    def _checkpoint(self, reference: Path, step: int, folder: Path) -> Path:
        """A folder with what the reference has saved at `step`."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(reference / "save" / f"iter_{step:07d}", folder / f"iter_{step:07d}")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        return folder

    def _judge(self, check: Check, result: Ended, reference: Path) -> str:
        expected = record.read(reference / "record")
        if check.step is None:
            assert result.code == 0, result.log[-3000:]
            outcome.assert_same_training(result, expected)
            return "bitwise plain torchrun"
        if check.layout.precision == "fp16":
            skipped = [line["iteration"] for line in expected[0] if line["skipped"]]
            assert skipped == [harness.FP16_SKIPS], skipped
        step, save = check.step, result.job.save
        assert save is not None
        assert set(result.codes) == {0 if check.restarts else 137}, result.log[-3000:]
        first = {
            rank: [line for line in lines if not line["restart"]] for rank, lines in result.records.items()
        }
        _same(first, expected, range((check.load or 0) + 1, step))
        if check.load is not None:
            plain = self._reference(result.job.layout, split=False)
            first_resumed = self._resumed(result.job.layout, plain, check.load, "torchrun")
            _close(first, first_resumed, range(check.load + 1, step))
        folder = save / f"iter_{step:07d}"
        assert outcome.steps_in(save) == ([step] if not check.restarts else [step, ITERATIONS])
        outcome.assert_saved(save, ITERATIONS if check.restarts else step)
        unequal = differences(folder, reference / "save" / folder.name)
        assert unequal == [], unequal
        native = self._resumed(result.job.layout, reference, step, "torchrun")
        if check.restarts:
            trained_after = {
                rank: [line for line in lines if line["restart"]] for rank, lines in result.records.items()
            }
            steps_after = range(step + 1, ITERATIONS + 1)
            if reference.name.endswith(SPLIT):
                # The norms of plain torchrun have other last bits.
                _close(trained_after, native, steps_after)
                native = self._resumed(result.job.layout, reference, step, "ttprun")
            _same(trained_after, native, steps_after)
            return f"started again from step {step} by itself, to the end as from the framework's checkpoint"
        # Without the adaptor, from the last words.
        resumed = harness.run(
            Job(result.job.out / "resumed", result.job.layout, "torchrun", load=save, program=self._program)
        )
        assert resumed.code == 0, resumed.log[-3000:]
        _same(resumed.records, native, range(step + 1, ITERATIONS + 1))
        return f"step {step} saved as the framework saves it; plain torchrun goes on from it as from that"

    def _resumed(self, layout: Layout, reference: Path, step: int, launcher: str) -> _Records:
        """Return the records of a run from the framework's own checkpoint of `step`, with the adaptor or
        without.
        """
        out = reference / f"{launcher}-from-{step}"
        if not (out / "done").exists():
            shutil.rmtree(out, ignore_errors=True)
            load = self._checkpoint(reference, step, out / "load")
            save = out / "save" if launcher == "ttprun" else None
            job = Job(out / "job", layout, launcher, save=save, load=load, program=self._program)
            result = harness.run(job)
            assert result.code == 0, result.log[-3000:]
            (out / "done").touch()
        return record.read(out / "job" / "record")


def _online(check: Check) -> tuple[str, ...]:
    # A rank that hangs is noticed by its standing still.
    hang = ("--ttp-hang", "10") if "kind=deadlock" in check.spec else ()
    return ("--ttp-online", "60", "--ttp-spares", str(check.spares), *hang)


def _ends_without(check: Check, result: Ended) -> str:
    save = result.job.save
    assert save is not None
    assert check.last in result.last_line, result.log[-3000:]
    assert not save.exists() or outcome.steps_in(save) == []
    if check.spec:
        assert result.code == 137
        return "nothing is saved, and the last line says why"
    assert result.code == 2
    assert "Traceback" not in result.log
    assert not any(result.records.values())
    return REFUSED


def _figures(records: _Records, steps: range) -> dict[tuple[int, int], tuple[Any, ...]]:
    return {
        (rank, line["iteration"]): (line["losses"], line["grad_norm"], line["zeros"], line["skipped"])
        for rank, lines in records.items()
        for line in lines
        if line["iteration"] in steps
    }


def _same(actual: _Records, expected: _Records, steps: range) -> None:
    """Assert equal losses and norms in the records of these steps, bit for bit."""
    assert len(_figures(expected, steps)) == len(expected) * len(steps)
    assert _figures(actual, steps) == _figures(expected, steps)


def _close(actual: _Records, expected: _Records, steps: range) -> None:
    """Assert equal records of these steps: the first losses bit for bit, other figures within 0.1 %."""
    for (rank, step), (losses, norm, zeros, _) in _figures(expected, steps).items():
        own_losses, own_norm, own_zeros, _ = _figures(actual, steps)[rank, step]
        assert step > steps[0] or own_losses == losses
        assert own_zeros == (None if zeros is None else pytest.approx(zeros, rel=1e-3))
        for left, right in [(own_norm, norm), *((own_losses[name], losses[name]) for name in losses)]:
            assert float.fromhex(left) == pytest.approx(float.fromhex(right), rel=1e-3)

"""Checks a checkout of ModelLink: `python -m tests.frameworks.by_hand_modellink TREE --out OUT`.

Trains a tiny Llama with its own `pretrain_llama.py` on the CPU, with the stand-ins of tests/standins, with
faults and without, and prints a row of docs/compatibility.md for each check. The framework's own resume loses
the low bits of the main params, so what goes on from last words is compared with what goes on from the
framework's own checkpoint of that step. With `split` the gradients are summed in another order than without;
there the reference is a job with the adaptor that nothing disturbs. The exit code is 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import shutil
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import harness, outcome
from tests.faults.harness import ITERATIONS, Ended, Job, Layout, Program
from tests.faults.same import differences
from tests.frameworks import modellink, record
from tests.frameworks.by_hand import HEADER

DP4 = Layout("dp4", 4)
DP3 = Layout("dp3", 3)
DP2 = Layout("dp2", 2)
# How the reference of a layout with `split` is named.
SPLIT = "-split"

_Records = dict[int, list[dict[str, Any]]]


class Llama:
    """A `Program` of the harness."""

    def __init__(self, tree: Path, data: tuple[Path, Path]) -> None:
        self.environment = modellink.environment(tree)
        self._tree, self._data = tree, data

    def __call__(self, job: Job) -> list[str]:
        layout = job.layout
        given = modellink.tiny_llama(
            self._data,
            processes=layout.processes,
            train_iters=ITERATIONS,
            save=job.save,
            load=job.load,
            save_interval=job.save_interval,
            precision=layout.precision,
            tp=layout.tp,
            pp=layout.pp,
            distributed_optimizer=layout.distributed_optimizer,
            extra=(*layout.extra, *job.arguments),
        )
        return [str(self._tree / "pretrain_llama.py"), *given]


@dataclass(frozen=True)
class Check:
    """What is done to a layout; `step` is the one that has to be saved, None where nothing breaks."""

    layout: Layout
    fault: str = "none"
    spec: str = ""
    step: int | None = None
    restarts: int = 0
    options: tuple[str, ...] = ()
    code: int = 137


def killed(rank: int, step: int, phase: str) -> tuple[str, str]:
    """The fault in words, and for the harness."""
    words = {"backward": "backward of", "update": "update of", "door-after": "at the door of"}
    return (
        f"SIGKILL of rank {rank}, {words[phase]} step {step}",
        f"rank={rank},step={step},phase={phase},kind=sigkill",
    )


# Half an update is undone from the local copy: the other holder is gone.
BREAKS_OFF = (
    "exception of rank 0 in the update of step 6, SIGKILL of rank 1",
    "rank=0,step=6,phase=update,kind=exception,also=1",
)
LOCAL_COPY = ("--local-copy-os",)
CHECKS = {
    "undisturbed": Check(DP3),
    "split": Check(DP4, *killed(1, 6, "backward"), 5),
    "split-update": Check(DP4, *killed(3, 6, "update"), 6),
    "split-restart": Check(DP4, *killed(2, 4, "backward"), 3, restarts=1),
    "mirror": Check(DP3, *killed(1, 6, "backward"), 5),
    "mirror-update": Check(DP3, *killed(2, 6, "update"), 6),
    "split-fp16": Check(replace(DP2, name="dp2-fp16", precision="fp16"), *killed(1, 6, "door-after"), 6),
    "tensor": Check(Layout("tp2-dp2", 4, tp=2), *killed(3, 6, "door-after"), 6),
    "pipeline": Check(Layout("pp2-dp2", 4, pp=2), *killed(2, 6, "backward"), 5),
    "local-copy": Check(DP2, *BREAKS_OFF, 5, options=LOCAL_COPY, code=1),
    "local-copy-mirror": Check(DP3, *BREAKS_OFF, 5, options=LOCAL_COPY, code=1),
    "whole": Check(
        replace(DP2, name="dp2-whole-optimizer", distributed_optimizer=False), *killed(1, 6, "update"), 6
    ),
    "restart": Check(DP3, *killed(0, 4, "backward"), 3, restarts=1),
}


class Bench:
    """The checks on one framework of ModelLink's shape, whose jobs run below `out`."""

    def __init__(self, program: Program, out: Path, name: str = "") -> None:
        self._program, self._out, self._name = program, out, name

    def check(self, name: str) -> bool:
        """Run one check and print its row; what went wrong goes to stderr."""
        check = CHECKS[name]
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
        how = f"{replica}, {' '.join(check.options)}" if check.options else replica
        print(
            f"| {self._name} | {versions} | {cut} | {how} | {check.fault} | {result} | {today} |", flush=True
        )
        return result != "**failed**"

    def run(self, check: Check, name: str) -> tuple[str, str]:
        """Which replicas the job had, and its outcome. Raises AssertionError where it is another one."""
        layout = check.layout
        out = self._out / name
        shutil.rmtree(out, ignore_errors=True)
        job = Job(
            out,
            layout,
            save=out / "save",
            restarts=check.restarts,
            faults=[check.spec] if check.spec else [],
            arguments=check.options,
            program=self._program,
        )
        ended = harness.run(job)
        told = re.search(r"second copies of optimizer shards by (\w+)", ended.log)
        replica = f"{told[1]} ({layout.replica})" if told else "none needed"
        return replica, self._judge(check, ended, self._reference(layout, split="split" in replica))

    def _reference(self, layout: Layout, split: bool) -> Path:
        """A job that nothing disturbs, without the adaptor where it can be compared; it saves every step."""
        out = self._out / "references" / f"{layout.name}{SPLIT if split else ''}"
        if not (out / "done").exists():
            shutil.rmtree(out, ignore_errors=True)
            launcher = "ttprun" if split else "torchrun"
            job = Job(out, layout, launcher, save=out / "save", save_interval=1, program=self._program)
            ended = harness.run(job)
            assert ended.code == 0, ended.log[-3000:]
            (out / "done").touch()
        return out

    def _judge(self, check: Check, ended: Ended, reference: Path) -> str:
        expected = record.read(reference / "record")
        if check.step is None:
            assert ended.code == 0, ended.log[-3000:]
            outcome.assert_same_training(ended, expected)
            return "bitwise plain torchrun"
        step, save = check.step, ended.job.save
        assert save is not None
        assert ended.code == (0 if check.restarts else check.code), ended.log[-3000:]
        first = {
            rank: [line for line in lines if not line["restart"]] for rank, lines in ended.records.items()
        }
        _same(first, expected, range(1, step))
        folder = save / f"iter_{step:07d}"
        found = differences(folder, reference / "save" / folder.name)
        assert found == [], found
        native = self._resumed(ended.job.layout, reference, step, "torchrun")
        if check.restarts:
            again = {
                rank: [line for line in lines if line["restart"]] for rank, lines in ended.records.items()
            }
            rest = range(step + 1, ITERATIONS + 1)
            if reference.name.endswith(SPLIT):
                # The norms of plain torchrun have other last bits.
                _close(again, native, rest)
                native = self._resumed(ended.job.layout, reference, step, "ttprun")
            _same(again, native, rest)
            return f"started again from step {step} by itself, to the end as from the framework's checkpoint"
        # Without the adaptor, from the last words.
        resumed = harness.run(
            Job(ended.job.out / "resumed", ended.job.layout, "torchrun", load=save, program=self._program)
        )
        assert resumed.code == 0, resumed.log[-3000:]
        _same(resumed.records, native, range(step + 1, ITERATIONS + 1))
        return f"step {step} saved as the framework saves it; plain torchrun goes on from it as from that"

    def _resumed(self, layout: Layout, reference: Path, step: int, launcher: str) -> _Records:
        """What is trained from the framework's own checkpoint of `step`, with the adaptor or without."""
        out = reference / f"{launcher}-from-{step}"
        if not (out / "done").exists():
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(reference / "save" / f"iter_{step:07d}", out / "load" / f"iter_{step:07d}")
            (out / "load" / "latest_checkpointed_iteration.txt").write_text(str(step))
            save = out / "save" if launcher == "ttprun" else None
            job = Job(out / "job", layout, launcher, save=save, load=out / "load", program=self._program)
            ended = harness.run(job)
            assert ended.code == 0, ended.log[-3000:]
            (out / "done").touch()
        return record.read(out / "job" / "record")


def _figures(records: _Records, steps: range) -> dict[tuple[int, int], tuple[Any, ...]]:
    return {
        (rank, line["iteration"]): (line["losses"], line["grad_norm"], line["skipped"])
        for rank, lines in records.items()
        for line in lines
        if line["iteration"] in steps
    }


def _same(ours: _Records, theirs: _Records, steps: range) -> None:
    """Both have recorded these steps, with the same losses and norms, bit for bit."""
    assert len(_figures(theirs, steps)) == len(theirs) * len(steps)
    assert _figures(ours, steps) == _figures(theirs, steps)


def _close(ours: _Records, theirs: _Records, steps: range) -> None:
    """Both have recorded these steps, and the losses of the first are the same, bit for bit."""
    for (rank, step), (losses, norm, _) in _figures(theirs, steps).items():
        own_losses, own_norm, _ = _figures(ours, steps)[rank, step]
        assert step > steps[0] or own_losses == losses
        for own, other in [(own_norm, norm), *((own_losses[name], losses[name]) for name in losses)]:
            assert float.fromhex(own) == pytest.approx(float.fromhex(other), rel=1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, help="a checkout of ModelLink")
    parser.add_argument("--out", type=Path, required=True, help="where the jobs run; about 200 MB")
    parser.add_argument("--name", default="ModelLink", help="the commit, for the rows")
    parser.add_argument("--only", action="append", choices=list(CHECKS), help="one check; repeat for more")
    parsed = parser.parse_args()
    tree = parsed.tree.resolve()
    if not (tree / "ascendspeed" / "training.py").is_file():
        parser.error(f"TREE is {parsed.tree}: it has no ascendspeed/training.py, as ModelLink af1347 has")
    data = parsed.out.resolve() / "data"
    if not data.exists():
        modellink.corpus(data)
    llama = Llama(tree, (data / "corpus_text_document", data / "tokenizer"))
    bench = Bench(llama, parsed.out.resolve(), parsed.name)
    print(HEADER)
    return 0 if all(list(map(bench.check, parsed.only or CHECKS))) else 1


if __name__ == "__main__":
    sys.exit(main())

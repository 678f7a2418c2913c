"""Checks MindSpeed-LLM's high availability: `python -m tests.frameworks.by_hand_availability TREE --out OUT`.

TREE is a checkout as for `by_hand`, of version 2.3 or later. The jobs use MindSpeed-LLM's replica optimizer
and handlers, with the adaptor's `mindio_ttp` (TTP_PROVIDE_MINDIO). The script prints a row of docs/mindio.md
for each check. The reference is the same job without faults, with a save of every step by the framework's own
`save_checkpoint`. There is no dropout: the handlers save the random states of the main thread at the fault,
and with dropout a resumed run would differ. The exit code is 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import harness, outcome
from tests.faults.harness import DP2, DP4, EXPERTS, ITERATIONS, PP2_DP2, ROOT, TP2_DP2, Job, Layout
from tests.faults.same import differences
from tests.frameworks import prepare, record

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(str(ROOT / "tests/standins" / part) for part in ("", "hugging_face")),
    "PYTORCH_JIT": "0",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}
HEADER = "| version | Python, torch | layout | fault | outcome | date |\n|---|---|---|---|---|---|"
# Differences that are allowed: arguments of the writing rank and of its start, and state that the handlers
# take from the main thread, which may be a step before or after. Everything else must equal the framework's
# own save, bit for bit.
LIVE = {
    "random states": r"/rng_state/",
    "the count of operations": r"num_floating_point_operations_so_far",
    "": r"/args\./(curr_iteration|iteration|rank|local_rank|load)",
}


@dataclass(frozen=True)
class Check:
    """A fault and its expected outcome.

    Attributes:
        step: the step that must be saved; None: there is no fault.
    """

    layout: Layout
    fault: str = "none"
    spec: str = ""
    step: int | None = None
    restarts: int = 0
    code: int = 137
    arguments: tuple[str, ...] = ()


def _breaks(
    layout: Layout, rank: int, step: int, phase: str, kind: str = "sigkill", **job_options: Any
) -> Check:
    """Return a check that saves the step before the fault's, unless every rank has reached the update."""
    places = {
        "norm": "before the gradient norm of",
        "update": "in the update of",
        "gather": "after the update of",
    }
    action = "SIGKILL of" if kind == "sigkill" else "exception in"
    return Check(
        layout,
        f"{action} rank {rank}, {places[phase]} step {step}",
        f"rank={rank},step={step},phase={phase},kind={kind}",
        step - (phase == "norm"),
        **job_options,
    )


WHOLE = replace(DP2, name="dp2-whole-optimizer", distributed_optimizer=False)
# With tied embeddings, Megatron-core 0.12 divides buckets by sizes that do not fit these.
STAGES = replace(PP2_DP2, name="pp2-dp2-untied", extra=("--untie-embeddings-and-output-weights",))
MOE = Layout("moe-dp4-ep2", 4, extra=(*EXPERTS, "--expert-model-parallel-size", "2"))
CHECKS = {
    "undisturbed": Check(DP2),
    "backward": _breaks(DP2, 1, 6, "norm"),
    "writer": _breaks(DP2, 0, 6, "norm"),
    "update": _breaks(DP2, 1, 6, "update"),
    "first": _breaks(DP2, 1, 2, "norm"),
    "exception": _breaks(DP2, 1, 6, "norm", "exception", code=1),
    "restart": _breaks(DP2, 0, 4, "update", restarts=1),
    "split": _breaks(DP4, 1, 6, "norm"),
    "split-update": _breaks(DP4, 2, 6, "update"),
    "whole": _breaks(WHOLE, 1, 6, "update"),
    "tensor": _breaks(TP2_DP2, 3, 6, "update"),
    "pipeline": _breaks(STAGES, 2, 6, "norm"),
    "experts": _breaks(MOE, 1, 6, "norm"),
    "experts-update": _breaks(MOE, 2, 6, "update"),
}


class Bench:
    """Runs the checks on one tree."""

    def __init__(self, tree: Path, out: Path, name: str) -> None:
        self._tree, self._out, self._name = tree, out, name

    def check(self, name: str) -> bool:
        """Run a check and print its row; errors go to stderr."""
        check = CHECKS[name]
        try:
            result = self._run(check, name)
        except (AssertionError, pytest.fail.Exception):
            traceback.print_exc()
            result = "**failed**"
        versions = f"{platform.python_version()}, {torch.__version__}"
        today = datetime.date.today().isoformat()
        layout = f"{check.layout.name}, {check.layout.precision}"
        print(f"| {self._name} | {versions} | {layout} | {check.fault} | {result} | {today} |", flush=True)
        return result != "**failed**"

    def _job(self, out: Path, layout: Layout, **job_options: Any) -> Job:
        shutil.rmtree(out, ignore_errors=True)
        plain = ("--hidden-dropout", "0", "--attention-dropout", "0")
        return Job(
            out,
            replace(layout, instances=False),
            framework=self._tree,
            options=("--ttp-provide-mindio", "1"),
            arguments=("--enable-high-availability", *plain),
            environment=ENVIRONMENT,
            **job_options,
        )

    def _reference(self, layout: Layout) -> Path:
        """Return the folder of an undisturbed job that saves every step."""
        out = self._out / "references" / layout.name
        if not (out / "done").exists():
            result = harness.run(self._job(out, layout, save=out / "save", save_interval=1))
            assert result.code == 0, result.log[-3000:]
            (out / "done").touch()
        return out

    def _run(self, check: Check, name: str) -> str:
        reference = self._reference(check.layout)
        expected = record.read(reference / "record")
        if check.step is None:
            return "trains to its end"
        save = self._out / name / "save"
        load = save if check.restarts else None
        job_options = {"faults": [check.spec], "restarts": check.restarts, "save": save, "load": load}
        killed = harness.run(self._job(self._out / name, check.layout, **job_options))
        assert killed.code == (0 if check.restarts else check.code), killed.log[-3000:]
        assert f"step {check.step} is saved, no finished step is lost" in killed.log, killed.log[-3000:]
        outcome.assert_tidy(save)
        saved = [check.step, ITERATIONS] if check.restarts else [check.step]
        assert outcome.steps_in(save) == saved
        assert outcome.tracked(save) == str(saved[-1])
        folder = save / f"iter_{check.step:07d}"
        stale = _stale(differences(folder, reference / "save" / folder.name))
        result = f"step {check.step} saved by its handlers, bitwise its own save"
        result += f" but for {' and '.join(stale)}" if stale else ""
        outcome.assert_same_training(killed, expected, steps=range(1, check.step))
        if check.restarts:
            return f"{result}; started again from it by itself, to the end, bitwise"
        resumed = harness.run(self._job(self._out / f"{name}-resumed", check.layout, load=save))
        assert resumed.code == 0, resumed.log[-3000:]
        outcome.assert_same_training(resumed, expected, steps=range(check.step + 1, ITERATIONS + 1))
        return f"{result}; goes on from it, bitwise"


def _stale(differing: Iterable[str]) -> list[str]:
    """Return the kinds of state whose difference comes from the main thread.

    Raises:
        AssertionError: other state differs.
    """
    kinds = {line: [kind for kind, place in LIVE.items() if re.search(place, line)] for line in differing}
    unknown = [line for line, matches in kinds.items() if not matches]
    assert not unknown, unknown
    return sorted({kind for matches in kinds.values() for kind in matches if kind})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, help="a checkout of MindSpeed-LLM")
    parser.add_argument("--out", type=Path, required=True, help="where the jobs run; about 200 MB")
    parser.add_argument("--name", default="MindSpeed-LLM", help="the tags and the commits, for the rows")
    parser.add_argument("--only", action="append", choices=list(CHECKS), help="one check; repeat for more")
    parsed = parser.parse_args()
    tree = parsed.tree.resolve()
    if not (tree / "mindspeed_llm/core/high_availability").is_dir():
        parser.error(f"TREE is {parsed.tree}: it has no mindspeed_llm/core/high_availability, as from 2.3 on")
    prepare.build_helpers(tree)
    bench = Bench(tree, parsed.out.resolve(), parsed.name)
    print(HEADER)
    return 0 if all(list(map(bench.check, parsed.only or CHECKS))) else 1


if __name__ == "__main__":
    sys.exit(main())

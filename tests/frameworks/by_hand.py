"""Checks a checkout of Megatron-LM of another version: `python -m tests.frameworks.by_hand TREE --out OUT`.

Or one of MindSpeed-LLM or ModelLink 1.2, in which, as their guides say, `megatron` of Megatron-LM is, and
`mindspeed` besides; for what only an Ascend machine has there are the stand-ins of tests/standins.

Trains the tiny GPT of the tests on the CPU with it, with faults and without, and prints a row for each check,
which benchmarks/results/by_hand.md sums up. The reference is the checkout without the adaptor, under
plain torchrun. The environment has what the version imports (`pip install triton pydantic` for newer ones).
What is kept in OUT/baselines is not run again. The exit code is 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from adaptor.frameworks.megatron_online_support import TESTED
from tests.faults import namespaces, scenario
from tests.faults.harness import ROOT, Job
from tests.frameworks import modellink, prepare
from tests.frameworks.checks import CHECKS, ONLINE, SPLIT_REFUSED
from tests.frameworks.checks_mindspeed import EXPERTS, LLM, LLM_ONLINE, MINDSPEED, MODELLINK, NOT_ONLINE

HEADER = (
    "| version | Python, torch | layout | replica | fault | outcome | date |\n|---|---|---|---|---|---|---|"
)
# Before, Megatron-core had no optimizer instances, or computed the gradient norm too large with them.
RIGHT_INSTANCES = Version("0.13.0rc0")
# These versions load their own checkpoints only where torch.load may build any object, as it might up to 2.5.
LOADS_WEIGHTS_ONLY = Version("0.13.0rc0")
# Before, MindSpeed-LLM had no mock data.
MINDSPEED_MOCKS = Version("0.12")
# Before, the updates of several optimizers needed other ranks, and experts are refused.
ONE_GATHERING = Version("0.9")
_NAMES = {**CHECKS, **ONLINE, **MINDSPEED, **LLM, **LLM_ONLINE, **NOT_ONLINE, **EXPERTS, **MODELLINK}


class Bench:
    """The checks on one tree."""

    def __init__(self, tree: Path, out: Path, name: str) -> None:
        self._tree, self._out = tree, out
        version = Version(runpy.run_path(str(tree / "megatron/core/package_info.py"))["__version__"])
        self._name = f"{version} ({name})" if name else str(version)
        self._instances = version >= RIGHT_INSTANCES
        self._data: tuple[str, ...] = ()
        mindspeed = (tree / "mindspeed").is_dir()
        self.checks = dict(MINDSPEED if mindspeed else CHECKS)
        is_online = TESTED.contains(version)
        if is_online and not mindspeed:
            self.checks.update(ONLINE)
        elif mindspeed and not (is_online and (tree / "mindspeed_llm").is_dir()):
            self.checks.update(NOT_ONLINE)
        if mindspeed:
            os.environ["PYTHONPATH"] = os.pathsep.join(
                str(ROOT / "tests/standins" / part) for part in ("", "hugging_face")
            )
            # MindSpeed looks below it for the headers of the operators that it builds.
            os.environ["ASCEND_HOME_PATH"] = str(ROOT / "tests/standins")
            # MindSpeed-LLM 2.0 compiles by torch.jit, which cannot read what the device cpu stands in for.
            os.environ["PYTORCH_JIT"] = "0"
        if mindspeed and version < MINDSPEED_MOCKS:
            self._data = ("--data-path", str(_corpus(out / "data")))
        if (tree / "mindspeed_llm").is_dir():
            self.checks.update({**LLM, **(LLM_ONLINE if is_online else {})})
            self.checks.update(EXPERTS if version >= ONE_GATHERING else {})
        if (tree / "modellink").is_dir():
            self.checks.update(MODELLINK)
            # Where apex is found, Megatron-LM of the others would take it.
            os.environ["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests/standins/with_apex'}"
            # What pads a bucket it takes as it finds it; it finds zeros then.
            os.environ["MALLOC_PERTURB_"] = "255"
            self._data += ("--tokenizer-type", "PretrainedFromHF")
            self._data += ("--tokenizer-name-or-path", str(out / "data/tokenizer"))
        if not self._instances:
            self.checks["split"] = SPLIT_REFUSED
        if version < LOADS_WEIGHTS_ONLY:
            os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"

    def report(self) -> bool:
        """Whether every patch fits, by `python -m adaptor report`; prints what it says where not."""
        done = subprocess.run(
            [sys.executable, "-m", "adaptor", "report", "--", str(self._tree / "pretrain_gpt.py")],
            env={**os.environ, "TTP_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(done.stdout, done.stderr, sep="", file=sys.stderr)
        self._row("–", "–", "report", _passed(done.returncode == 0, "every patch fits"))
        return done.returncode == 0

    def check(self, name: str) -> bool:
        """Run one check and print its row; what went wrong goes to stderr."""
        check = self.checks[name]
        extra = (*check.layout.extra, *self._data)
        layout = replace(check.layout, instances=self._instances, extra=extra)
        out = self._out / name
        shutil.rmtree(out, ignore_errors=True)
        job = Job(
            out,
            layout,
            save=out / "save",
            restarts=check.restarts,
            framework=self._tree,
            faults=[check.spec] if check.spec else [],
            arguments=check.arguments,
            nodes=check.nodes,
            # On a network of their own nobody else has the default port.
            environment={"TTP_TLS": "plain", "TTP_PORT": "8000"} if check.nodes > 1 else {},
        )
        replica = layout.replica
        try:
            baseline = scenario.baselines(self._out / "baselines", self._tree)
            reference = baseline(replace(layout, replica="auto"))
            with namespaces.two() if check.nodes > 1 else nullcontext() as network:
                ended = check.run(replace(job, network=network), reference)
            told = re.search(r"second copies of optimizer shards by (\w+)", ended.log)
            if told:
                replica = f"{told[1]} ({layout.replica})"
            if "--local-copy-os" in check.arguments:
                replica += ", --local-copy-os"
            passed = True
        except (AssertionError, pytest.fail.Exception):
            traceback.print_exc()
            passed = False
        cut = layout.name if layout.precision in layout.name else f"{layout.name}, {layout.precision}"
        cut += f", {check.nodes} nodes" if check.nodes > 1 else ""
        self._row(cut, replica, check.fault, _passed(passed, check.outcome))
        return passed

    def _row(self, cut: str, replica: str, fault: str, result: str) -> None:
        versions = f"{platform.python_version()}, {torch.__version__}"
        today = datetime.date.today().isoformat()
        print(f"| {self._name} | {versions} | {cut} | {replica} | {fault} | {result} | {today} |", flush=True)


def _corpus(folder: Path) -> Path:
    prefix = folder / "corpus_text_document"
    if not prefix.with_suffix(".idx").exists():
        modellink.corpus(folder)
    return prefix


def _passed(passed: bool, what: str) -> str:
    return what if passed else f"**failed**: not “{what}”"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--out", type=Path, required=True, help="where the jobs run; about 200 MB")
    parser.add_argument("--name", default="", help="the tag and the commit, for the rows")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*_NAMES, "split"],
        help="one check; repeat for more",
    )
    parsed = parser.parse_args()
    tree = parsed.tree.resolve()
    if not (tree / "pretrain_gpt.py").is_file():
        parser.error(f"TREE is {parsed.tree}: it has no pretrain_gpt.py, as a checkout of Megatron-LM has")
    prepare.build_helpers(tree)
    bench = Bench(tree, parsed.out.resolve(), parsed.name)
    chosen = [name for name in bench.checks if not parsed.only or name in parsed.only]
    print(HEADER)
    fits = parsed.only is not None or bench.report()
    return 0 if all([fits, *(bench.check(name) for name in chosen)]) else 1


if __name__ == "__main__":
    sys.exit(main())

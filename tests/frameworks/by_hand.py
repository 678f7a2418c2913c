"""Checks a checkout of another version of Megatron-LM: `python -m tests.frameworks.by_hand TREE --out OUT`.

TREE may also be a checkout of MindSpeed-LLM or ModelLink 1.2 that contains, as their guides say, `megatron`
of Megatron-LM and `mindspeed`; the stand-ins of tests/standins replace the parts of an Ascend machine.

The script trains the tiny GPT of the tests on the CPU, with faults and without, and prints a row for each
check; benchmarks/results/by_hand.md sums the rows up. The reference is the checkout without the adaptor,
under plain torchrun. The environment must have the version's dependencies (`pip install triton pydantic` for
newer ones). Runs in OUT/baselines are kept. The exit code is 1 if a check has failed.
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
# Earlier versions of Megatron-core had no optimizer instances, or computed the gradient norm too large.
RIGHT_INSTANCES = Version("0.13.0rc0")
# Earlier versions load their own checkpoints only if torch.load may build any object, as up to torch 2.5.
LOADS_WEIGHTS_ONLY = Version("0.13.0rc0")
# Earlier versions of MindSpeed-LLM had no mock data.
MINDSPEED_MOCKS = Version("0.12")
# In earlier versions the updates of several optimizers needed other ranks, and experts are refused.
ONE_GATHERING = Version("0.9")
_NAMES = {**CHECKS, **ONLINE, **MINDSPEED, **LLM, **LLM_ONLINE, **NOT_ONLINE, **EXPERTS, **MODELLINK}


class Bench:
    """Runs the checks on one tree."""

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
            # MindSpeed looks here for the headers of the operators that it builds.
            os.environ["ASCEND_HOME_PATH"] = str(ROOT / "tests/standins")
            # MindSpeed-LLM 2.0 compiles by torch.jit, which cannot read the stand-ins of the device cpu.
            os.environ["PYTORCH_JIT"] = "0"
        if mindspeed and version < MINDSPEED_MOCKS:
            self._data = ("--data-path", str(_corpus(out / "data")))
        if (tree / "mindspeed_llm").is_dir():
            self.checks.update({**LLM, **(LLM_ONLINE if is_online else {})})
            self.checks.update(EXPERTS if version >= ONE_GATHERING else {})
        if (tree / "modellink").is_dir():
            self.checks.update(MODELLINK)
            # Megatron-LM of the other frameworks would use apex if it found it.
            os.environ["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests/standins/with_apex'}"
            # The padding of a bucket is uninitialised memory: make it zeros.
            os.environ["MALLOC_PERTURB_"] = "255"
            self._data += ("--tokenizer-type", "PretrainedFromHF")
            self._data += ("--tokenizer-name-or-path", str(out / "data/tokenizer"))
        if not self._instances:
            self.checks["split"] = SPLIT_REFUSED
        if version < LOADS_WEIGHTS_ONLY:
            os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"

    def report(self) -> bool:
        """Return whether every patch fits, by `python -m adaptor report`; if not, print the report."""
        report = subprocess.run(
            [sys.executable, "-m", "adaptor", "report", "--", str(self._tree / "pretrain_gpt.py")],
            env={**os.environ, "TTP_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if report.returncode:
            print(report.stdout, report.stderr, sep="", file=sys.stderr)
        self._row("–", "–", "report", _passed(report.returncode == 0, "every patch fits"))
        return report.returncode == 0

    def check(self, name: str) -> bool:
        """Run a check and print its row; errors go to stderr."""
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
            # In namespaces of their own, the default port is free.
            environment={"TTP_TLS": "plain", "TTP_PORT": "8000"} if check.nodes > 1 else {},
        )
        replica = layout.replica
        try:
            baseline = scenario.baselines(self._out / "baselines", self._tree)
            reference = baseline(replace(layout, replica="auto"))
            with namespaces.two() if check.nodes > 1 else nullcontext() as network:
                result = check.run(replace(job, network=network), reference)
            replicas = re.search(r"second copies of optimizer shards by (\w+)", result.log)
            if replicas:
                replica = f"{replicas[1]} ({layout.replica})"
            if "--local-copy-os" in check.arguments:
                replica += ", --local-copy-os"
            passed = True
        except (AssertionError, pytest.fail.Exception):
            traceback.print_exc()
            passed = False
        description = layout.name if layout.precision in layout.name else f"{layout.name}, {layout.precision}"
        description += f", {check.nodes} nodes" if check.nodes > 1 else ""
        self._row(description, replica, check.fault, _passed(passed, check.outcome))
        return passed

    def _row(self, layout: str, replica: str, fault: str, result: str) -> None:
        versions = f"{platform.python_version()}, {torch.__version__}"
        today = datetime.date.today().isoformat()
        print(
            f"| {self._name} | {versions} | {layout} | {replica} | {fault} | {result} | {today} |", flush=True
        )


def _corpus(folder: Path) -> Path:
    prefix = folder / "corpus_text_document"
    if not prefix.with_suffix(".idx").exists():
        modellink.corpus(folder)
    return prefix


def _passed(passed: bool, outcome: str) -> str:
    return outcome if passed else f"**failed**: not “{outcome}”"


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
    names = [name for name in bench.checks if not parsed.only or name in parsed.only]
    print(HEADER)
    fits = parsed.only is not None or bench.report()
    return 0 if all([fits, *(bench.check(name) for name in names)]) else 1


if __name__ == "__main__":
    sys.exit(main())

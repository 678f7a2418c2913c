"""Checks fine-tuning: `python -m tests.frameworks.by_hand_tuning TREE --packages DIR --out OUT`.

TREE is a checkout of MindSpeed-LLM or ModelLink as for `by_hand`, or of Megatron-LM. DIR has transformers,
peft and their dependencies (`pip install --target`), and for QLoRA bitsandbytes; the suite needs none of
these. The checkout first trains a base model for all jobs, by `posttrain_gpt.py`, or by `pretrain_gpt.py` of
ModelLink, or of Megatron-LM with `--sft`. The script prints a row for each check;
benchmarks/results/by_hand.md sums the rows up. The reference is a job under plain torchrun that has saved
every step. The exit code is 1 if a check has failed.
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

import pytest
import torch

from tests.faults import harness, outcome
from tests.faults.harness import (
    DP2,
    DP2_WHOLE,
    EXPERTS,
    ITERATIONS,
    PP2_DP2,
    TP2_DP2,
    Ended,
    Job,
    Layout,
    Program,
)
from tests.faults.same import differences
from tests.frameworks import prepare, record
from tests.frameworks.by_hand import HEADER
from tests.frameworks.checks import REFUSED, SAVED
from tests.frameworks.tuning import BASE, SFT, MegatronSft, Tuning, quantize, script

MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LORA = (*SFT, "--lora-r", "4", "--lora-alpha", "8", "--lora-target-modules", *MODULES)
FILTERED = (*LORA, "--lora-ckpt-filter")
QLORA = (*LORA, "--qlora")
RESTARTED = "started again from step {} by itself, trained to the end, bitwise"


@dataclass(frozen=True)
class Check:
    """A fault in a tuning job, and its expected outcome.

    Attributes:
        way: the way of tuning, as text.
        options: options of the script for it.
        step: the step that must be saved; None: there is no fault.
        refused: the line of a refused job.
        prepared: options of the framework's preprocessing.
        but: the only place in which last words may differ, with an explanation.
        resumes: whether plain torchrun can resume from last words.
        online: whether the job is recovered online, without a restart.
        quantized: whether the base has 4-bit weights.
    """

    way: str
    layout: Layout
    options: tuple[str, ...] = SFT
    fault: str = "none"
    spec: str = ""
    step: int | None = None
    restarts: int = 0
    refused: str = ""
    prepared: tuple[str, ...] = ()
    but: tuple[str, str] | None = None
    resumes: bool = True
    online: bool = False
    quantized: bool = False


def dies(way: str, layout: Layout, options: tuple[str, ...], rank: int, step: int, phase: str) -> Check:
    """Return a check with a killed rank that saves the step before, unless all have reached the update."""
    places = {
        "norm": "before the gradient norm of",
        "backward": "backward of",
        "update": "in the update of",
    }
    return Check(
        way,
        layout,
        options,
        f"SIGKILL of rank {rank}, {places[phase]} step {step}",
        f"rank={rank},step={step},phase={phase},kind=sigkill",
        step - (phase != "update"),
    )


def refuses(way: str, options: tuple[str, ...], line: str) -> Check:
    return Check(way, DP2, options, refused=line)


def alone(check: Check) -> Check:
    return replace(check, resumes=False)


def again(check: Check) -> Check:
    return replace(check, restarts=1)


def online(check: Check) -> Check:
    return replace(check, fault=f"{check.fault}; TTP_ONLINE=60", online=True)


def _recovers(check: Check, job: Job, checkpoints: Path, expected: dict[int, list[record.Line]]) -> str:
    """Assert that the job trains on without a restart, with the reference's records and checkpoints."""
    assert job.save is not None
    result = harness.run(replace(job, restarts=1, environment={"TTP_ONLINE": "60"}))
    assert result.code == 0, result.log[-3000:]
    assert "1 incident (1 without a restart), 0 steps lost" in result.log, result.log[-3000:]
    assert outcome.steps_in(job.save) == [check.step, ITERATIONS]
    # A rank that was killed after the step has not recorded it.
    outcome.assert_same_training(result, expected, steps=set(range(1, ITERATIONS + 1)) - {check.step})
    names = [f"iter_{step:07d}" for step in (check.step, ITERATIONS)]
    lines = [line for name in names for line in differences(job.save / name, checkpoints / name)]
    place, exception = check.but or ("", "")
    assert [line for line in lines if not place or place not in line] == [], "\n".join(lines[:20])
    return f"trained on after step {check.step} without a restart, bitwise" + (
        f", but for {exception}" if exception else ""
    )


def quantized(check: Check) -> Check:
    return replace(check, quantized=True)


# Experts can be tuned only with this dispatcher.
_EXPERTS = (*EXPERTS, "--moe-token-dispatcher-type", "alltoall_seq")
MOE_DP2 = Layout("moe-dp2", 2, extra=_EXPERTS)
MOE_EP2 = Layout("moe-dp4-ep2", 4, extra=(*_EXPERTS, "--expert-model-parallel-size", "2"))
# Samples have different lengths; those of a batch are padded to the longest.
VARIABLE = (*SFT, "--no-pad-to-seq-lengths")
PACKED = (*SFT, "--use-flash-attn", "--reset-attention-mask", "--reset-position-ids")
NEAT = (*PACKED, "--neat-pack")
# Activations of less than 1 MiB are not swapped.
SWAPPED = (*SFT, "--swap-attention", "--micro-batch-size", "64", "--global-batch-size", "128")
# Without dropout: the framework builds the reference model after it has loaded the random states.
STILL = ("--hidden-dropout", "0", "--attention-dropout", "0")
DPO_ALONE = ("--stage", "dpo", "--is-pairwise-dataset", "--dpo-loss-type", "sigmoid", *STILL)
DPO = (*DPO_ALONE, "--ref-model", BASE)
PAIRS = ("--handler-name", "AlpacaStylePairwiseHandler")


def packed(check: Check) -> Check:
    # The framework counts the operations of attention for these lengths.
    counted = ("/num_floating_point_operations_so_far: ", "the count of floating-point operations")
    return replace(check, prepared=("--pack",), but=counted)


def neatly(check: Check) -> Check:
    return replace(check, prepared=("--pack", "--neat-pack"))


def pairs(check: Check) -> Check:
    return replace(check, prepared=PAIRS)


CHECKS = {
    "lora": Check("LoRA", DP2, LORA),
    "lora-norm": dies("LoRA", DP2, LORA, 1, 6, "norm"),
    "lora-update": dies("LoRA", DP2, LORA, 1, 6, "update"),
    "lora-restart": again(dies("LoRA", DP2, LORA, 0, 4, "norm")),
    "lora-tensor": dies("LoRA", TP2_DP2, LORA, 2, 6, "update"),
    "lora-tensor-restart": again(dies("LoRA", TP2_DP2, LORA, 3, 4, "norm")),
    "lora-pipeline": dies("LoRA", PP2_DP2, LORA, 2, 6, "update"),
    "lora-pipeline-restart": again(dies("LoRA", PP2_DP2, LORA, 1, 4, "norm")),
    "lora-experts": dies("LoRA", MOE_DP2, LORA, 1, 6, "norm"),
    "lora-experts-restart": again(dies("LoRA", MOE_DP2, LORA, 0, 4, "norm")),
    "lora-experts-parallel": dies("LoRA", MOE_EP2, LORA, 2, 6, "update"),
    "lora-experts-parallel-restart": again(dies("LoRA", MOE_EP2, LORA, 1, 4, "norm")),
    "lora-filter": refuses(
        "LoRA, filtered, --ckpt-step",
        (*FILTERED, "--ckpt-step", "8"),
        "--ckpt-step is 8 with --lora-ckpt-filter",
    ),
    "lora-filter-norm": alone(dies("LoRA, filtered", DP2, FILTERED, 1, 6, "norm")),
    "lora-filter-update": dies("LoRA, filtered", DP2_WHOLE, FILTERED, 1, 6, "update"),
    "lora-filter-restart": again(dies("LoRA, filtered", DP2, FILTERED, 0, 4, "norm")),
    "lora-filter-tensor-restart": again(dies("LoRA, filtered", TP2_DP2, FILTERED, 3, 4, "norm")),
    "lora-filter-pipeline-restart": again(dies("LoRA, filtered", PP2_DP2, FILTERED, 1, 4, "norm")),
    "lora-filter-experts-restart": again(dies("LoRA, filtered", MOE_EP2, FILTERED, 1, 4, "norm")),
    "lora-online": online(dies("LoRA", DP2, LORA, 0, 4, "norm")),
    "lora-tensor-online": online(dies("LoRA", TP2_DP2, LORA, 3, 5, "update")),
    "lora-pipeline-online": online(dies("LoRA", PP2_DP2, LORA, 2, 6, "norm")),
    "lora-experts-parallel-online": online(dies("LoRA", MOE_EP2, LORA, 1, 4, "norm")),
    "lora-filter-online": online(dies("LoRA, filtered", DP2, FILTERED, 0, 4, "norm")),
    "full-online": online(dies("full", DP2, SFT, 1, 4, "norm")),
    "variable-pipeline-online": online(dies("full, variable lengths", PP2_DP2, VARIABLE, 1, 4, "update")),
    "qlora-norm": quantized(dies("QLoRA", DP2, QLORA, 1, 6, "norm")),
    "qlora-restart": quantized(again(dies("QLoRA", DP2, QLORA, 0, 4, "norm"))),
    "qlora-filter-restart": quantized(
        again(dies("QLoRA, filtered", DP2, (*QLORA, "--lora-ckpt-filter"), 0, 4, "norm"))
    ),
    "qlora-dequantize": refuses(
        "QLoRA, --qlora-save-dequantize",
        (*QLORA, "--qlora-save-dequantize"),
        "--qlora-save-dequantize is True: ",
    ),
    "qlora-tensor-restart": quantized(again(dies("QLoRA", TP2_DP2, QLORA, 3, 4, "norm"))),
    "full-restart": again(dies("full", DP2, SFT, 0, 4, "norm")),
    "swap-online": online(dies("full, --swap-attention", DP2, SWAPPED, 1, 4, "norm")),
    "variable": dies("full, variable lengths", DP2, VARIABLE, 1, 6, "update"),
    "variable-restart": again(dies("full, variable lengths", DP2, VARIABLE, 0, 4, "norm")),
    "variable-pipeline-restart": again(dies("full, variable lengths", PP2_DP2, VARIABLE, 1, 4, "norm")),
    "packed": packed(dies("full, packed", DP2, PACKED, 1, 6, "norm")),
    "packed-online": packed(online(dies("full, packed", DP2, PACKED, 0, 4, "norm"))),
    "packed-restart": packed(again(dies("full, packed", DP2, PACKED, 0, 4, "norm"))),
    "neat-packed-restart": neatly(packed(again(dies("full, packed, --neat-pack", DP2, NEAT, 0, 4, "norm")))),
    "dpo": pairs(dies("DPO", DP2, DPO, 1, 6, "norm")),
    "dpo-restart": pairs(again(dies("DPO", DP2, DPO, 0, 4, "norm"))),
    "dpo-lora-restart": pairs(again(dies("DPO, LoRA", DP2, (*DPO, *LORA[len(SFT) :]), 0, 4, "norm"))),
    "dpo-online": pairs(online(dies("DPO", DP2, DPO, 1, 4, "norm"))),
    "dpo-alone-restart": pairs(again(dies("DPO without --ref-model", DP2, DPO_ALONE, 0, 4, "norm"))),
}
MEGATRON = {
    "sft": dies("--sft", DP2, (), 1, 6, "backward"),
    "sft-restart": again(dies("--sft", DP2, (), 0, 4, "backward")),
    "sft-pipeline-restart": again(dies("--sft", PP2_DP2, (), 1, 4, "backward")),
}


class Bench:
    """Runs the checks on one tree."""

    def __init__(self, tree: Path, packages: Path, out: Path, name: str) -> None:
        self._tree, self._packages, self._out, self._name = tree, packages, out, name
        self._megatron = script(tree) is None

    def check(self, check: Check, name: str) -> bool:
        """Run a check and print its row; errors go to stderr."""
        replica = check.layout.replica
        try:
            replica, result = self._run(check, name)
        except (AssertionError, pytest.fail.Exception):
            traceback.print_exc()
            result = "**failed**"
        versions = f"{platform.python_version()}, {torch.__version__}"
        today = datetime.date.today().isoformat()
        cut = f"{check.way}, {check.layout.name}, {check.layout.precision}"
        print(
            f"| {self._name} | {versions} | {cut} | {replica} | {check.fault} | {result} | {today} |",
            flush=True,
        )
        return result != "**failed**"

    def _run(self, check: Check, name: str) -> tuple[str, str]:
        """Return the replicas of the job, and its outcome."""
        layout = replace(check.layout, instances=self._megatron)
        tuning = self._program(check, self._base(layout, check.quantized))
        out = self._out / name
        shutil.rmtree(out, ignore_errors=True)
        faults = [check.spec] if check.spec else []
        job = Job(out, layout, save=out / "save", restarts=check.restarts, faults=faults, program=tuning)
        if check.online:
            reference = self._reference(check, layout, tuning)
            return layout.replica, _recovers(
                check, job, reference / "save", record.read(reference / "record")
            )
        result = harness.run(job)
        if check.refused:
            assert result.code == 2, result.log[-3000:]
            assert result.last_line.startswith(f"ttprun: error: {check.refused}"), result.log[-3000:]
            assert "Traceback" not in result.log, result.log[-3000:]
            assert not any(result.records.values())
            return layout.replica, REFUSED
        match = re.search(r"second copies of optimizer shards by (\w+)", result.log)
        replica = f"{match[1]} ({layout.replica})" if match else "none needed"
        return replica, self._judge(check, result, self._reference(check, layout, tuning), tuning)

    def _program(self, check: Check | None = None, base: Path | None = None) -> Program:
        """Return the program that tunes `base` for the check; without both, the program that trains a base
        model.
        """
        places = (self._tree, self._packages, self._out / "data", base)
        if self._megatron:
            return MegatronSft(*places)
        return Tuning(*places) if check is None else Tuning(*places, check.options, check.prepared)

    def _judge(self, check: Check, result: Ended, reference: Path, tuning: Program) -> str:
        expected = record.read(reference / "record")
        if check.step is None:
            assert result.code == 0, result.log[-3000:]
            outcome.assert_same_training(result, expected)
            return "bitwise plain torchrun"
        save = result.job.save
        assert save is not None
        assert result.code == (0 if check.restarts else 137), result.log[-3000:]
        assert f"step {check.step} is saved, no finished step is lost" in result.log, result.log[-3000:]
        assert outcome.steps_in(save) == ([check.step, ITERATIONS] if check.restarts else [check.step])
        outcome.assert_saved(save, ITERATIONS if check.restarts else check.step)
        folder = save / f"iter_{check.step:07d}"
        unequal = differences(folder, reference / "save" / folder.name)
        place, exception = check.but or ("", "")
        assert [line for line in unequal if not place or place not in line] == [], "\n".join(unequal[:20])
        but = f", but for {exception}" if exception else ""
        if check.restarts:
            outcome.assert_same_training(result, expected)
            restarted = {
                line["iteration"] for lines in result.records.values() for line in lines if line["restart"]
            }
            assert restarted == set(range(check.step + 1, ITERATIONS + 1))
            return RESTARTED.format(check.step) + but
        outcome.assert_same_training(result, expected, steps=range(1, check.step))
        if not check.resumes:
            return SAVED.format(check.step).partition(";")[0] + but
        resumed = harness.run(
            Job(result.job.out / "resumed", result.job.layout, "torchrun", load=save, program=tuning)
        )
        assert resumed.code == 0, resumed.log[-3000:]
        outcome.assert_same_training(resumed, expected, steps=range(check.step + 1, ITERATIONS + 1))
        return SAVED.format(check.step) + but

    def _reference(self, check: Check, layout: Layout, tuning: Program) -> Path:
        """Return the folder of the same job under plain torchrun, undisturbed; it saves every step."""
        return self._train(f"{check.way}-{layout.name}".replace(" ", "-"), layout, tuning, 1)

    def _base(self, layout: Layout, with_4_bits: bool = False) -> Path:
        """Return the base model of jobs with the layout."""
        base = self._train(f"base-{layout.name}", layout, self._program(), ITERATIONS) / "save"
        return quantize(base, self._tree, self._packages) if with_4_bits else base

    def _train(self, name: str, layout: Layout, program: Program, interval: int) -> Path:
        out = self._out / "references" / name
        if not (out / "done").exists():
            shutil.rmtree(out, ignore_errors=True)
            job = Job(out, layout, "torchrun", save=out / "save", save_interval=interval, program=program)
            result = harness.run(job)
            assert result.code == 0, result.log[-3000:]
            (out / "done").touch()
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, help="a checkout of MindSpeed-LLM")
    parser.add_argument("--packages", type=Path, required=True, help="where peft and transformers are")
    parser.add_argument("--out", type=Path, required=True, help="where the jobs run; about 200 MB")
    parser.add_argument("--name", default="MindSpeed-LLM", help="the tags and the commits, for the rows")
    parser.add_argument(
        "--only", action="append", choices=[*CHECKS, *MEGATRON], help="one check; repeat for more"
    )
    parsed = parser.parse_args()
    tree = parsed.tree.resolve()
    if not (tree / "pretrain_gpt.py").is_file():
        parser.error(f"TREE is {parsed.tree}: it has no pretrain_gpt.py")
    if not (parsed.packages / "transformers").is_dir():
        parser.error(f"--packages is {parsed.packages}: it has no transformers")
    prepare.build_helpers(tree)
    bench = Bench(tree, parsed.packages.resolve(), parsed.out.resolve(), parsed.name)
    print(HEADER)
    checks = MEGATRON if script(tree) is None else CHECKS
    passed = [bench.check(checks[name], name) for name in parsed.only or checks]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

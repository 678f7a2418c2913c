"""`benchmarks/recipes.py`: what becomes of training recipes, judged by the adaptor's own checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.frameworks.args import environment
from tests.patches.conftest import Run

ROOT = Path(__file__).parents[2]
COMMAND = str(ROOT / "benchmarks" / "recipes.py")
PUBLISHED = ROOT.parent / "shared" / "recipes" / "recipes.jsonl"
# The share of published recipes in a class, in per cent: the largest, and the smallest.
SHARES = {
    "refused": (0, 3),
    "of everything, and online recovery": (60, 100),
    "again, and online recovery": (21, 100),
}


def recipe(
    *args: str,
    framework: str = "megatron-lm",
    version: str = "0.20.0",
    world: int = 4,
    entry: str = "pretrain_gpt.py",
) -> str:
    options = ["--use-distributed-optimizer", "--bf16", *args]
    return json.dumps(
        {
            "name": "r",
            "framework": framework,
            "version": version,
            "entry": entry,
            "world": world,
            "per_node": 4,
            "args": options,
        }
    )


EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "4")


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        (recipe(), ["a second copy of everything, and online recovery"]),
        (recipe("--cuda-graph-impl", "none", "--new-option", "1", "2"), ["and online recovery"]),
        (
            recipe("--use-megatron-fsdp", "--fp8-format", "e4m3", "--fp8-param-gather"),
            ["refused", "--fp8-r", "--use-megatron-f"],
        ),
        (recipe("--export-kd-teacher-load", "teacher"), ["restarts all", "--export-kd-teacher-load has all"]),
        (recipe("--freeze-all-layers"), ["refused before the first step", "--freeze-all-layers"]),
        (recipe("--optimizer", "muon"), ["up to 50 steps made again, and online recovery"]),
        (recipe("--compress-optimizer", framework="mindspeed-llm"), ["refused", "--compress-opt"]),
        (recipe("--swap-optimizer", framework="mindspeed-llm"), ["refused", "--swap-optimizer"]),
        (recipe(world=1), ["50 steps made again, a death restarts all", "one rank: all is lost with it"]),
        (recipe(*EXPERTS), ["copies in host memory, up to 50 steps made again, and online recovery"]),
        (recipe(*EXPERTS, world=6), ["a second copy of everything, and online recovery"]),
        (recipe("--tp-comm-overlap"), ["and online recovery"]),
        (recipe("--cuda-graph-impl", "local"), ["every fault restarts all", "CUDA graphs hold the groups"]),
        (recipe("--stage", "sft", framework="mindspeed-llm", version="master"), ["and online recovery"]),
        (recipe(version="0.21.0"), ["every fault restarts all", "Megatron-LM 0.21.0 has not been tested"]),
        (recipe("--lr"), ["arguments that nothing parses", "argument --lr: expected one argument"]),
        (recipe(framework="flagscale", entry="?"), ["no loop, or one that nothing here patches"]),
        (recipe(framework="slime"), ["no loop, or one that nothing here patches"]),
    ],
)
def test_the_class_of_a_recipe(line: str, fragments: list[str], python: Run, tmp_path: Path) -> None:
    """With the reasons; unknown options and values of the installed version are judged as well."""
    (recipes := tmp_path / "recipes.jsonl").write_text(f"{line}\n")
    completed = python(COMMAND, str(recipes), "--list", env=environment(TTP_ONLINE="60"), code=0)
    listed = completed.stdout.partition("\nOf 1 recipes")[0].splitlines()
    assert len(listed) == len(fragments), listed
    assert all(word in listed_line for word, listed_line in zip(fragments, listed, strict=True)), listed


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published recipes are not beside this checkout")
def test_published_recipes(python: Run) -> None:
    """No more of them than before are refused, or lack something."""
    completed = python(COMMAND, str(PUBLISHED), env=environment(TTP_ONLINE="60"), code=0)
    for class_name, (smallest, largest) in SHARES.items():
        (share,) = re.findall(rf"\| [^|]*{class_name}[^|]*\|[^|]*\| (\d+) % ", completed.stdout)
        assert smallest <= int(share) <= largest, completed.stdout
    assert "survive exceptions only" not in completed.stdout


def test_a_list_that_cannot_be_read(python: Run, tmp_path: Path) -> None:
    completed = python(COMMAND, str(tmp_path / "absent"), env=environment(TTP_ONLINE="60"))
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.splitlines()[-1].endswith(
        f"{tmp_path}/absent cannot be read: [Errno 2] No such file or directory: '{tmp_path}/absent'"
    )

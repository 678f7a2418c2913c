"""Trains a published recipe with faults: `python -m tests.frameworks.by_hand_recipes TREE RECIPES NAME ...`.

TREE is a checkout as for `by_hand_tuning` (MindSpeed-LLM) or `by_hand` (Megatron-LM); RECIPES is a list as
for `benchmarks/recipes.py`; NAME is the name of a recipe in the list, or the end of the name. The recipe
keeps its options, but gets small sizes and the data, tokenizer and folders of the tests. `--with` adds
options, with precedence over earlier values, `--without` removes options.

Reference: plain torchrun, which saves every step; tuning begins from a base of the same recipe. Then:

- online: SIGKILL of the last rank before the gradient norm of step 4, an exception of rank 0 in the update of
  step 6; no restart;
- restart: SIGKILL of the last rank before the norm of step 5, without online recovery;
- last words: plain torchrun resumes from step 4, the last words of that job.

All losses and gradient norms, the last words and the last checkpoint are compared with the reference's, bit
for bit. A row for benchmarks/results/by_hand.md is printed; the exit code is 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import ITERATIONS, Ended, Job, Layout
from tests.faults.same import differences
from tests.frameworks import prepare, record
from tests.frameworks.tuning import SEQUENCE, STANDINS, VOCABULARY, Tuning

SIZES = f"""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2
    --kv-channels 16 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --vocab-size {VOCABULARY}
    --padded-vocab-size {VOCABULARY} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32
    --moe-intermediate-size 32 --moe-shared-expert-intermediate-size 32 --q-lora-rank 16 --kv-lora-rank 16
    --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --first-k-dense-replace 1
    --recompute-num-layers 1 --moe-router-num-groups 2 --moe-router-group-topk 1 --micro-batch-size 1
    --lr 1e-3 --min-lr 1e-5 --lr-warmup-iters 1 --lr-decay-iters {ITERATIONS} --eval-iters 0
    --train-iters {ITERATIONS} --distributed-timeout-minutes 2 --initial-loss-scale 4096
    --swap-optimizer-times 2
"""
# Folders and weights of somebody else; the number of steps.
OWN = ("--load", "--save", "--save-interval", "--data-path", "--tokenizer-name-or-path", "--tokenizer-model")
OWN += (
    "--enable-hf2mg-convert",
    "--enable-mg2hf-convert",
    "--model-type-hf",
    "--hf-cfg-dir",
    "--data-cache-path",
)
OWN += ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--exit-interval", "--finetune")
OWN += ("--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-save-rng", "--exit-duration-in-mins")
# Left out where plain torchrun goes on from last words: it would not load all of them.
LOSSY = ("--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-save-rng")
# MindSpeed-LLM counts what attention computes for the lengths of each batch, also of an interrupted step.
COUNT = "/num_floating_point_operations_so_far: "


def options_of(arguments: Sequence[str]) -> list[list[str]]:
    """Return the options of a command, each with its values."""
    options: list[list[str]] = []
    for word in arguments:
        if word.startswith("--") or not options:
            name, assigned, value = word.partition("=")
            options.append([name, value] if assigned else [name])
        else:
            options[-1].append(word)
    return options


class Recipe(Tuning):
    """A `Program` of the harness: a recipe in a small size.

    Args:
        tree, packages, work, base: as of `Tuning`.
        recipe: its line in the list.
        added: options behind those of the recipe.
        without: names of options that are left out.
    """

    def __init__(
        self,
        tree: Path,
        packages: Path,
        work: Path,
        recipe: dict,
        added: Sequence[str],
        without: Sequence[str],
    ) -> None:
        options = options_of(recipe["args"])
        names = {option[0] for option in options}
        self._is_tuned = "--stage" in names
        handler = next((option[1] for option in options if option[0] == "--handler-name"), None)
        prepared = ["--handler-name", handler] if handler else []
        prepared += ["--pack"] if names & {"--pack", "--neat-pack"} else []
        prepared += ["--neat-pack"] if "--neat-pack" in names else []
        super().__init__(tree, packages, work, None, (), tuple(prepared))
        # MindSpeed looks here for the headers of the operators that it builds.
        self.environment = {**self.environment, "ASCEND_HOME_PATH": str(STANDINS)}
        left_out = {*OWN, *without}
        self._lossy = [name for name in LOSSY if name in names and name not in without]
        kept = [option for option in options if option[0] not in left_out]
        kept += [option for option in options_of(shlex.split(SIZES)) if option[0] in names]
        self._script = tree / Path(recipe["entry"]).name
        self._given = [word for option in kept for word in option] + list(added)

    def with_base(self, base: Path) -> Recipe:
        """Return the recipe that begins from a model."""
        self._base = base
        return self

    def __call__(self, job: Job) -> list[str]:
        data = self._data.with_name(f"{self._data.name}_text_document") if not self._is_tuned else self._data
        arguments = [*self._given, "--data-path", str(data), "--num-workers", "0"]
        arguments += ["--train-iters", str(ITERATIONS), "--log-interval", "1"]
        arguments += ["--tokenizer-name-or-path", str(self._work / "tokenizer")]
        if job.save is not None:
            arguments += ["--save", str(job.save), "--save-interval", str(job.save_interval)]
        if job.load is not None:
            arguments += ["--load", str(job.load)]
        elif self._base is not None:
            arguments += ["--load", str(self._base), "--finetune"]
        lossy = self._lossy if job.load is None else ()
        return [str(self._script), *arguments, *lossy, *job.arguments]


class Bench:
    """Trains one recipe."""

    def __init__(self, recipe: Recipe, layout: Layout, out: Path, options: Sequence[str]) -> None:
        self._recipe, self._layout, self._out, self._options = recipe, layout, out, options

    def reference(self, *, tuned: bool) -> Path:
        if tuned:
            self._recipe.with_base(self._train("base", ITERATIONS) / "save")
        return self._train("reference", 1)

    def _train(self, name: str, interval: int) -> Path:
        out = self._out / name
        if not (out / "done").exists():
            shutil.rmtree(out, ignore_errors=True)
            job = Job(
                out, self._layout, "torchrun", save=out / "save", save_interval=interval, program=self._recipe
            )
            result = harness.run(job)
            assert result.code == 0, result.log[-6000:]
            (out / "done").touch()
        return out

    def _job(self, name: str, faults: Sequence[str], online: str) -> Ended:
        out = self._out / name
        shutil.rmtree(out, ignore_errors=True)
        job = Job(
            out,
            self._layout,
            save=out / "save",
            restarts=3,
            faults=faults,
            program=self._recipe,
            options=self._options,
            environment={"TTP_ONLINE": online},
        )
        result = harness.run(job)
        assert result.code == 0, result.log[-6000:]
        print(*(line for line in result.said if "online recovery:" in line or "second cop" in line), sep="\n")
        print(result.last_line)
        return result

    def online(self, reference: Path) -> str:
        """Return the outcome of the job that is recovered online."""
        last = self._layout.processes - 1
        faults = (f"rank={last},step=4,phase=norm,kind=sigkill", "rank=0,step=6,phase=update,kind=exception")
        result = self._job("online", faults, "60")
        assert "2 incidents (2 without a restart)" in result.log, result.log[-6000:]
        lost = re.search(r"(\d+) steps? lost", result.last_line)
        outcome.assert_same_training(
            result, record.read(reference / "record"), steps=set(range(1, ITERATIONS + 1)) - {3, 5, 6}
        )
        but = self._compare(result, reference, ITERATIONS)
        return f"bitwise{but}, {lost[0] if lost else 'no step lost'}"

    def restart(self, reference: Path) -> str:
        """Return the outcome of the job that is restarted."""
        last = self._layout.processes - 1
        result = self._job("restart", (f"rank={last},step=5,phase=norm,kind=sigkill",), "0")
        outcome.assert_same_training(result, record.read(reference / "record"))
        trained_after = {
            line["iteration"] for lines in result.records.values() for line in lines if line["restart"]
        }
        assert trained_after == set(range(5, ITERATIONS + 1)), trained_after
        return f"bitwise{self._compare(result, reference, 4)}"

    def last_words(self, reference: Path) -> str:
        """Return how plain torchrun goes on from the last words of the restarted job."""
        last_words = self._out / "words"
        shutil.rmtree(last_words, ignore_errors=True)
        shutil.copytree(self._out / "restart/save/iter_0000004", last_words / "iter_0000004")
        (last_words / "latest_checkpointed_iteration.txt").write_text("4")
        out = self._out / "resumed"
        shutil.rmtree(out, ignore_errors=True)
        resumed = harness.run(Job(out, self._layout, "torchrun", load=last_words, program=self._recipe))
        assert resumed.code == 0, resumed.log[-6000:]
        steps = range(5, ITERATIONS + 1)
        outcome.assert_same_training(resumed, record.read(reference / "record"), steps=steps)
        return "bitwise"

    @staticmethod
    def _compare(result: Ended, reference: Path, step: int) -> str:
        """Return the only difference of a checkpoint; it may be the count of operations."""
        assert result.job.save is not None
        name = f"iter_{step:07d}"
        unequal = differences(result.job.save / name, reference / "save" / name)
        counts = [line for line in unequal if COUNT in line]
        assert unequal == counts, "\n".join(unequal[:20])
        return ", but for the count of operations" if counts else ""


def _outcome(part: Callable[[Path], str], reference: Path) -> str:
    try:
        return part(reference)
    except (AssertionError, pytest.fail.Exception):
        traceback.print_exc()
        return "**failed**"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("recipes", type=Path)
    parser.add_argument("name", help="of the recipe, or its end")
    parser.add_argument("--packages", type=Path, required=True, help="as of by_hand_tuning")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--with", dest="more", default="", help="options of the script")
    parser.add_argument("--without", default="", help="names of options of the recipe")
    parser.add_argument("--ttprun", default="", help="options of ttprun")
    parser.add_argument("--only", action="append", choices=("reference", "online", "restart", "last_words"))
    parsed = parser.parse_args()
    prepare.build_helpers(parsed.tree)
    lines = (json.loads(line) for line in parsed.recipes.read_text().splitlines())
    (recipe,) = (line for line in lines if line["name"].endswith(parsed.name))
    out = parsed.out.resolve() / Path(recipe["name"]).stem
    program = Recipe(
        parsed.tree.resolve(),
        parsed.packages.resolve(),
        parsed.out.resolve() / "data",
        recipe,
        shlex.split(parsed.more),
        shlex.split(parsed.without),
    )
    bench = Bench(program, Layout("recipe", parsed.ranks), out, shlex.split(parsed.ttprun))
    reference = bench.reference(tuned="--stage" in recipe["args"])
    parts = [part for part in ("online", "restart", "last_words") if part in (parsed.only or [part])]
    unequal = [_outcome(getattr(bench, part), reference) for part in parts]
    print(
        f"| `{recipe['name']}` | {parsed.ranks} ranks |",
        *(f"{outcome_of_part} |" for outcome_of_part in unequal),
    )
    return int("**failed**" in unequal)


if __name__ == "__main__":
    sys.exit(main())

"""The protection of training recipes: `python benchmarks/recipes.py RECIPES.jsonl`.

A recipe is a line of JSON: `framework`, `version`, `world` (ranks, or null) and `args` (of the script). The
parser of the Megatron-LM on PYTHONPATH, or of the tests' Megatron-LM, reads the arguments. Options and values
that this version lacks are read by their form. Then the adaptor's own checks judge the arguments as `ttp
plan` does. No script runs, and nothing is trained. The checks of the save folder and of the framework itself
are left out, because published recipes have paths of other machines.

A recipe without a number of ranks, or with a number that its parallel sizes do not divide, gets twice the
minimum, as with `ttp plan`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import _bench

from adaptor.replica import tolerance
from tests.frameworks import prepare
from tests.pages import write_section

SECTION = "What becomes of published recipes"
# Frameworks whose training loop is patched: they call `megatron.training.pretrain`, or are MindSpeed-LLM, or
# have an adapter.
REACHED = frozenset({"megatron-lm", "mindspeed-llm", "mindspeed-mm", "pai", "flagscale", "ms-swift"})
OTHER_LOOP, UNREADABLE = "no loop, or one that nothing here patches", "arguments that nothing parses"
REFUSED = "refused before the first step"
TRAINS_NOTHING = frozenset({"swift infer", "megatron export"})
# FlagScale's recipes of robots name no script: train_pi0.py and train_robotics.py have loops of their own.
OWN_LOOPS = frozenset({("flagscale", "?")})
# If the host has the memory; else exceptions alone are survived.
COPIES = f"copies in host memory, up to {tolerance.MOST_STEPS} steps made again"
ONLINE_COPIES, RESTART_COPIES = f"{COPIES}, and online recovery", f"{COPIES}, a death restarts all"
RESTART = "a second copy of everything, every fault restarts all"
ONLINE = "a second copy of everything, and online recovery"
CLASSES = (REFUSED, RESTART_COPIES, RESTART, ONLINE_COPIES, ONLINE)


@dataclass(frozen=True)
class Verdict:
    """The class of a recipe, and the reasons against a better class."""

    outcome: str
    reasons: tuple[str, ...] = ()


def verdicts(recipes: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Return what becomes of each recipe. Megatron-LM is importable."""
    from adaptor import context, patches, patching

    context.begin()
    patches.load("ttp")
    patching.arm("ttp", raises=False)
    with tempfile.TemporaryDirectory() as folder:
        return [_verdict(recipe, folder) for recipe in recipes]


def _verdict(recipe: Mapping[str, Any], folder: str) -> Verdict:
    framework, entry = recipe["framework"], recipe.get("entry")
    if framework not in REACHED or entry in TRAINS_NOTHING or (framework, entry) in OWN_LOOPS:
        return Verdict(OTHER_LOOP)
    from adaptor import preflight
    from adaptor.adapters import copied_loops, ms_swift
    from adaptor.frameworks import megatron_training

    is_swift = framework == "ms-swift"
    arguments = recipe["args"]
    if is_swift:
        arguments = _of_megatron(arguments)
        if entry.endswith(".py"):  # of --external_plugins: the options before it are not in the list
            arguments, entry = [*arguments, "--rlhf-type", "grpo"], "megatron rlhf"
    fewest = preflight.least_world_size(arguments)
    ranks = recipe["world"] if recipe["world"] and recipe["world"] % fewest == 0 else 2 * fewest

    def begin() -> None:
        parsed = _parsed(arguments)
        parsed.rank, parsed.world_size, parsed.save = 0, ranks, f"{folder}/save"
        megatron_training.examine(parsed)
        raise preflight.Stop

    with _as_0_12() if recipe["framework"] == "mindspeed-llm" else contextlib.nullcontext():
        findings = preflight.findings_of(begin)
    if findings.error:
        return Verdict(UNREADABLE, (findings.error,))
    refusals = [*findings.refusals, *(ms_swift.refused(_parsed(arguments)) if is_swift else ())]
    if recipe["framework"] == "mindspeed-mm":  # its file --mm-model is not read
        of_file = argparse.Namespace(model=argparse.Namespace())
        refusals += copied_loops.refused(argparse.Namespace(**vars(_parsed(arguments)), mm=of_file))
    if is_swift and entry not in ("megatron pt", "megatron sft", "megatron rlhf"):
        refusals.append(f"{entry} is not protected")
    if refusals:
        return Verdict(REFUSED, tuple(sorted({line.partition(" is ")[0] for line in refusals})))
    assert findings.layout is not None
    reasons = (*_of_the_framework(recipe), *(findings.not_online or ()))
    if is_swift:
        reasons = (*reasons, *filter(None, (ms_swift.why_not_online(_parsed(arguments)),)))
    if 1 not in (findings.layout.data_parallel, findings.layout.experts):
        return Verdict(RESTART if reasons else ONLINE, reasons)
    if ranks == 1:
        reasons = (*reasons, "one rank: all is lost with it")
    return Verdict(RESTART_COPIES if reasons else ONLINE_COPIES, reasons)


@contextlib.contextmanager
def _as_0_12() -> Iterator[None]:
    """Take from the imported Megatron-LM what MindSpeed-LLM, on 0.12, lacks: last words are in `torch`."""
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    with mock.patch.dict(vars(checkpointing)):
        vars(checkpointing).pop("_build_sharded_state_dict_metadata", None)
        yield


def _of_the_framework(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Return why the framework of a recipe, in place of the imported one, is not recovered online."""
    from adaptor.frameworks import megatron_online_support

    if recipe["framework"] in ("mindspeed-llm", "flagscale"):  # on the Megatron-LM that they name
        return
    if recipe["framework"] == "mindspeed-mm":
        yield "it has not been tested with mindspeed_mm"
        return
    version = recipe["version"]
    if re.fullmatch(r"0\.\d+\.\d+\S*", version):  # else a branch, or a date
        yield from filter(None, (megatron_online_support.of_version(version),))


def _of_megatron(arguments: Sequence[str]) -> list[str]:
    """Return arguments of ms-swift in the form of Megatron-LM's; ms-swift always has the last two."""
    normalized: list[str] = []
    for word in arguments:
        if word.lower() == "false" and normalized and normalized[-1].startswith("--"):
            normalized.pop()
        elif word.lower() != "true":
            normalized.append(word.replace("_", "-") if word.startswith("--") else word)
    return [*normalized, "--use-distributed-optimizer", "--bf16"]


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the result of Megatron-LM's parser; unknown options are read by their form."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for action in parser._actions:
        if action.nargs != 0:
            action.choices = None  # later versions have more
    parsed, unknown = parser.parse_known_args(list(arguments))
    names = [place for place, word in enumerate(unknown) if word.startswith("--")]
    for place, end in pairwise([*names, len(unknown)]):
        name, assigned, value = unknown[place].partition("=")
        values = [value] if assigned else unknown[place + 1 : end]
        name = name[2:].replace("-", "_")
        if not hasattr(parsed, name):
            setattr(parsed, name, _value(values))
    return parsed


def _value(values: Sequence[str]) -> Any:
    if len(values) > 1:
        return list(values)
    (word,) = values or ("true",)
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    return int(word) if word.isdecimal() else word


def tables(verdicts_given: Sequence[Verdict]) -> str:
    """Return the tables: how many recipes are of each class, and why."""
    sizes = Counter(verdict.outcome for verdict in verdicts_given)
    judged = [verdict for verdict in verdicts_given if verdict.outcome in CLASSES]
    rows = [(name, sizes[name], f"{100 * sizes[name] / max(1, len(judged)):.0f} %") for name in CLASSES]
    unjudged = ", ".join(f"{sizes[name]} have {name}" for name in (OTHER_LOOP, UNREADABLE))
    parts = [
        f"Of {len(verdicts_given)} recipes {unjudged}. The other {len(judged)}:",
        _bench.table(("", "recipes", "share"), rows),
    ]
    for outcomes, question in (
        ((REFUSED,), "refused by"),
        ((RESTART, RESTART_COPIES), "online recovery prevented by"),
    ):
        those = [verdict for verdict in judged if verdict.outcome in outcomes]
        reasons = Counter(reason for verdict in those for reason in verdict.reasons)
        head = (f"{question} (of {len(those)}; one recipe can have several)", "recipes", "alone")
        alone = Counter(verdict.reasons for verdict in those)
        parts.append(
            _bench.table(
                head, [(verdict, count, alone[verdict,]) for verdict, count in reasons.most_common()]
            )
        )
    return "\n\n".join(parts)


def main() -> None:
    """Judge a list of recipes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", type=Path, metavar="RECIPES.jsonl")
    parser.add_argument(
        "--list", action="store_true", help="print the class and the reasons of each recipe, too"
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the tables into their section of a page"
    )
    options = parser.parse_args()
    try:
        lines = options.recipes.read_text(encoding="utf-8").splitlines()
        recipes = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        parser.error(f"{options.recipes} cannot be read: {error}")
    sys.path.append(str(prepare.megatron_lm()))  # behind PYTHONPATH
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stderr(nothing):
        verdicts_of_list = verdicts(recipes)
    for recipe, verdict in zip(recipes, verdicts_of_list, strict=True) if options.list else ():
        print(f"{recipe['name']}: {verdict.outcome}", *verdict.reasons, sep="\n    ")
    print(text := tables(verdicts_of_list))
    if options.write:
        command = f"    python benchmarks/recipes.py {options.recipes.name} --write {options.write}"
        write_section(options.write, SECTION, f"{command}\n\nOn {time.strftime('%Y-%m-%d')}.\n\n{text}")


if __name__ == "__main__":
    main()

"""Random flips of bits: `python benchmarks/corruption.py --write benchmarks/results/corruption.md`.

In a job that compares the holders in every step (TTP_VERIFY_EVERY=1) a bit of some rank flips every other
step: kind, rank, tensor, word and bit are drawn from a seed before the job runs. A flip is noticed if an
incident of the step names or suspects the rank. A flip is undone if every loss and gradient norm of every
rank equals, bit for bit, the values of a job without flips; the comparison also shows that the check gives no
false alarm. Flips of an update run with TTP_LOCAL_COPY, to undo the update.

With `--at-doors N` each layout gets N changes of one or many bits at the doors of one job: of state at rest,
of the result of an update, of gradients, weights, and of the content of a load or a save. Each change is made
in the memory of the training job; the rank's own checksums are taken again, and the product's decision from
the checksums of all ranks is noted; then the bits are restored. A change in a step without a comparison is
made in a copy of the shards, which makes one to three updates before its checksums are taken. As many changes
are made of activations and gradients while ranks repeat a micro-batch (TTP_REPLAY_EVERY), in layouts with two
replicas of the model. The job must continue bitwise like the job without changes, whose `--steps` steps are
also compared. With `--at-doors 0` nothing is changed: a job of the smallest model compares its holders in
each of `--steps` steps, and must give no alarm, and in its first 2,000 steps the same losses and norms, bit
for bit, as the framework without the adaptor.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from _bench import OUT, Benchmark, argument_parser, table

from tests.faults import harness
from tests.faults.fault import Fault
from tests.faults.flips import INJECTIONS, UNVERIFIED
from tests.faults.harness import (
    DP2,
    DP2_FP16,
    DP2_FP32,
    DP2_MIRROR,
    DP2_OVERLAP,
    DP2_WHOLE,
    DP3,
    DP4,
    MOE_EP2,
    MOE_EP2_DP2,
    PP2_DP2,
    TP2_DP2,
    Ended,
    Job,
    Layout,
)
from tests.faults.layouts import LAYOUTS
from tests.pages import write_section

_WHOLE_3 = next(layout for layout in LAYOUTS if layout.name == "dp3-whole-optimizer")
CUTS = {
    layout.name: layout
    for layout in (
        DP4,
        replace(DP4, name="dp4-fp32", precision="fp32"),
        replace(DP3, replica="mirror"),
        TP2_DP2,
        PP2_DP2,
        MOE_EP2,
        DP2_WHOLE,
        _WHOLE_3,
        *(DP2, DP2_MIRROR, DP2_OVERLAP, DP2_FP32, DP2_FP16, MOE_EP2_DP2),
    )
}
# The phase of each kind of flip. The check cannot notice the last kind: all holders apply the wrong gradient
# alike.
PHASES = {
    "main": "between",
    "moment": "between",
    "variance": "between",
    "main before the gather": "gather",
    "main in the update": "updated",
    "moment in the update": "updated",
    "gradient": "exchanged",
    "transfer": "exchanged",
    "weight": "forward",
    "local-gradient": "reduction",
}
_FIRST = 4  # after the self-test of a job of the tests
# How often each change, pattern and word size, and the steps until the comparison had a verdict.
Answers: TypeAlias = Counter[tuple[str, str, str, int, str]]
_VERDICTS = ("named", "suspected", "named wrongly", "no trace", "missed")
_FOUND = ("found at once", "1 step later", "2 steps later", "3 steps later")


@dataclass(frozen=True)
class Flip:
    kind: str
    rank: int
    step: int
    seed: int

    def __str__(self) -> str:
        kind = f"flip-{self.kind.split()[0]}"
        return str(Fault(self.rank, PHASES[self.kind], kind, step=self.step, code=self.seed, restart=-2))


def draw(layout: Layout, kinds: list[str], count: int, seed: int, skipped: Collection[int]) -> list[Flip]:
    """Return `count` flips, in every other step; kinds take turns.

    Args:
        skipped: steps without an update (fp16): no flip strikes there, just before, or just after.
    """
    drawn = random.Random(f"{seed}-{layout.name}-{kinds}")
    flips: list[Flip] = []
    step = _FIRST
    while len(flips) < count:
        if {step - 1, step, step + 1}.intersection(skipped):
            step += 1
            continue
        kind = kinds[len(flips) % len(kinds)]
        flips.append(Flip(kind, drawn.randrange(layout.processes), step, drawn.randrange(1 << 20)))
        step += 2
    return flips


def train(
    out: Path,
    layout: Layout,
    steps: int,
    flips: list[Flip],
    *options: str,
    arguments: tuple[str, ...] = (),
    environment: Mapping[str, str] = {},
) -> Ended:
    """Run a job of so many steps."""
    job = Job(
        out,
        layout,
        save=out / "save",
        faults=[str(flip) for flip in flips],
        restarts=len(flips),
        options=("--ttp-online", "60", "--ttp-spares", "1", "--ttp-verify-every", "1", *options),
        # Megatron's own answer to an infinite number ends the job before the comparison of the holders.
        arguments=("--train-iters", str(steps), "--no-check-for-nan-in-loss-and-grad", *arguments),
        environment=dict(environment),
        timeout_s=900,
    )
    result = harness.run(job)
    assert result.code == 0, result.log[-3000:]
    return result


def figures(result: Ended) -> dict[tuple[int, int], tuple[object, ...]]:
    """Return the records of each rank and step; the last record of a repeated step."""
    return {
        (rank, line["iteration"]): (line["losses"], line["grad_norm"], line["skipped"])
        for rank, lines in result.records.items()
        for line in lines
    }


def judge(result: Ended, flips: list[Flip]) -> dict[Flip, str]:
    """Return for each flip: named, suspected, named wrongly, or missed."""
    incidents = {}
    for path in result.job.out.glob("logs/*/incidents/*.json"):
        incident = json.loads(path.read_text())
        text = incident["reason"].partition(";")[0]
        (step,) = map(int, re.findall(r" step (\d+)", text)[-1:] or [-1])
        incidents[step] = incident["cause"]["kind"] == "corruption", "suspects" in text, incident["failed"]
    verdicts = {}
    for flip in flips:
        # In fp32 a weight may be a main param, too, which has changed since the step before.
        steps = [flip.step, flip.step - 1] if flip.kind == "weight" else [flip.step]
        judged = [incidents[step] for step in steps if step in incidents]
        is_corruption, is_suspected, ranks = judged[0] if judged else (False, False, [])
        if not is_corruption:
            verdicts[flip] = "missed"
        elif is_suspected:
            verdicts[flip] = "suspected" if flip.rank in ranks else "named wrongly"
        else:
            verdicts[flip] = "named" if ranks == [flip.rank] else "named wrongly"
    return verdicts


_DOORS = 10
_SMALLEST = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    " --log-interval 1000000 --save-interval 1000000"
)
_COMPARED = 2000  # first steps of a job without changes that the framework makes alone, too


def at_doors(layout: Layout, count: int, steps: int, seed: int) -> tuple[Answers, int]:
    """Make `count` changes at the doors of a job; return the answers, and the steps without a change."""
    with tempfile.TemporaryDirectory(prefix="ttp-corruption-") as folder:
        work = Path(folder)
        file = work / "answers.jsonl"
        of_a_rank = -(-count // _DOORS // layout.processes)
        quiet = train(work / "quiet", layout, steps, [])
        changed = train(
            work / "changed",
            layout,
            steps,
            [],
            *(() if layout is MOE_EP2_DP2 else ("--ttp-replay-every", "1")),  # one replica of the model
            arguments=("--exit-interval", str(_DOORS + 1)),
            environment={INJECTIONS: f"{of_a_rank}:{seed}-{layout.name}:{file}"},
        )
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    for result in (quiet, changed):
        assert not re.search("is corrupt|no step is verified", result.log), result.said
    assert lines or not count, changed.said
    expected = {key: value for key, value in figures(quiet).items() if key[1] <= _DOORS + 1}
    assert figures(changed) == expected, f"{layout.name}: not bitwise"
    answers: Answers = Counter()
    for _, kind, pattern, dtype, steps_later, verdict, number in lines:
        answers[kind, pattern, dtype, steps_later, verdict] += number
    return answers, steps - 1


def undisturbed(layout: Layout, steps: int, seed: int) -> int:
    """Compare the holders in each of `steps` steps without a change; return the number of compared steps."""
    batch = layout.data_parallel_size * layout.pp
    sizes = f"{_SMALLEST} --num-layers {layout.pp} --global-batch-size {batch} --seed {seed}".split()
    with tempfile.TemporaryDirectory(prefix="ttp-corruption-") as folder:
        checked = train(Path(folder) / "checked", layout, steps, [], arguments=tuple(sizes))
        plain = harness.run(
            replace(
                checked.job,
                out=Path(folder) / "plain",
                launcher="torchrun",
                save=None,
                options=(),
                restarts=0,
                arguments=(*checked.job.arguments, "--exit-interval", str(_COMPARED)),
            )
        )
    assert plain.code == 0, plain.log[-3000:]
    assert not re.search("is corrupt|no step is verified", checked.log), checked.said
    expected, actual = figures(plain), figures(checked)
    assert len(actual) == steps * layout.processes
    assert len(expected) == min(steps, _COMPARED) * layout.processes
    assert actual == actual | expected, f"{layout.name}: not bitwise"
    return steps - 1


def write_doors(parsed: argparse.Namespace, benchmark: Benchmark) -> None:
    """Make the changes at the doors of each layout, and write the tables of all answers in the file."""
    parsed.answers.parent.mkdir(parents=True, exist_ok=True)
    for name in parsed.layouts:
        answers, quiet = (
            at_doors(CUTS[name], parsed.at_doors, parsed.steps, parsed.seed)
            if parsed.at_doors
            else (Counter(), undisturbed(CUTS[name], parsed.steps, parsed.seed))
        )
        with parsed.answers.open("a") as file:
            file.write(json.dumps([name, quiet, [[*key, number] for key, number in answers.items()]]) + "\n")
        print(f"{name}: {answers.total()} changes, {quiet} steps", flush=True)
    runs = [json.loads(line) for line in parsed.answers.read_text().splitlines()]
    of_kinds: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    of_patterns: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    quiet_steps: Counter[str] = Counter()
    for name, quiet, lines in runs:
        quiet_steps[name] += quiet
        for kind, pattern, elements, steps_later, verdict, number in lines:
            for counted in (of_kinds[kind.removesuffix(UNVERIFIED), name], of_patterns[pattern, elements]):
                counted[verdict] += number
                counted[_FOUND[steps_later]] += number if verdict in _VERDICTS[:3] else 0

    def rows(counts: Mapping[tuple[str, str], Counter[str]]) -> list[list[str]]:
        return [
            [*key, str(_total(counted)), *(str(counted[column]) for column in _FOUND + _VERDICTS)]
            for key, counted in sorted(counts.items())
        ]

    total = sum(map(_total, of_kinds.values()))
    quiet_words = ", ".join(f"{name} {steps}" for name, steps in quiet_steps.items())
    text = (
        f"{total} changes, each undone; all jobs went on bitwise. {quiet_steps.total()} steps without a"
        f" change were compared, none with a false alarm ({quiet_words}).\n\nA change in a save counts as"
        " named if the save is refused. With two holders of a shard an update or a gradient has two suspects."
        " Experts of `moe-dp2-ep2` have no second holder: their updates, gradients and gathers are not"
        " compared, nor their state between two comparisons. A change in a step without a comparison is"
        " found at the next one, 1 to 3 steps later,"
        " with suspects; `no trace`: later updates, or the pass, give the same bits with the change as"
        " without.\n\n"
    )
    columns = ["changes", *_FOUND, *_VERDICTS]
    text += table(["change", "layout", *columns], rows(of_kinds)) + "\n\n"
    text += table(["pattern", "words", *columns], rows(of_patterns))
    benchmark.finish(text, {"runs": runs})
    if parsed.write is not None:
        write_section(parsed.write, "Changes at doors", f"{text}\n\nOn {benchmark.where}.")


def _total(counted: Counter[str]) -> int:
    return sum(counted[verdict] for verdict in _VERDICTS)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--layouts", nargs="+", default=list(CUTS)[:8], choices=list(CUTS))
    parser.add_argument("--flips", type=int, default=24, help="of each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-doors", type=int, help="changes at the doors of each layout")
    parser.add_argument("--steps", type=int, default=30, help="of a job without changes, with --at-doors")
    parser.add_argument("--answers", type=Path, default=OUT / "changes.jsonl", help="of all runs")
    parser.add_argument("--write", type=Path)
    parsed = parser.parse_args()
    benchmark = Benchmark("corruption", vars(parsed))
    if parsed.at_doors is not None:
        write_doors(parsed, benchmark)
        return
    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    findings, comparisons = [], 0
    for name in parsed.layouts:
        layout = CUTS[name]
        at_rest = ["main", "moment", "variance", "main before the gather", "weight"]
        if not layout.distributed_optimizer:
            at_rest.remove("main before the gather")  # the optimizer gathers nothing
        way = "transfer" if layout.replica == "mirror" else "gradient"
        updates = ["main in the update", "moment in the update"]
        # in fp16 about every seventh step is skipped
        steps = _FIRST + (4 if layout.precision == "fp16" else 2) * parsed.flips + 2
        work = Path(tempfile.mkdtemp(prefix="ttp-corruption-"))
        reference = train(work / "reference", layout, steps, [])
        comparisons += steps - 1
        skipped = {step for (_, step), (*_, is_skipped) in figures(reference).items() if is_skipped}
        assert not re.search("is corrupt|no step is verified", reference.log), reference.said
        jobs: list[tuple[list[str], tuple[str, ...]]] = [
            ([*at_rest, way], ()),
            (updates, ("--ttp-local-copy", "True")),
        ]
        if name == parsed.layouts[0]:
            jobs.append((["local-gradient"], ()))
        for kinds, options in jobs:
            flips = draw(layout, kinds, parsed.flips, parsed.seed, skipped)
            result = train(work / kinds[0].replace(" ", "-"), layout, steps, flips, *options)
            is_bitwise = figures(result) == figures(reference)
            for flip, verdict in judge(result, flips).items():
                counts[flip.kind, name][verdict] += 1
                counts[flip.kind, name]["undone"] += is_bitwise
                findings.append({**vars(flip), "layout": name, "verdict": verdict, "undone": is_bitwise})
            print(f"{name}: {', '.join(kinds)}: {'' if is_bitwise else 'NOT '}bitwise", flush=True)
        shutil.rmtree(work)
    columns = ("named", "suspected", "named wrongly", "missed", "undone")
    rows = [
        [
            kind,
            name,
            str(sum(counted[column] for column in columns[:-1])),
            *(str(counted[c]) for c in columns),
        ]
        for (kind, name), counted in counts.items()
    ]
    text = table(["flip", "layout", "flips", *columns], rows)
    text += f"\n\n{comparisons} steps without a flip were compared, none with a false alarm."
    benchmark.finish(text, {"flips": findings})
    if parsed.write is not None:
        write_section(parsed.write, "Flips of one bit", f"{text}\n\nOn {benchmark.where}.")


if __name__ == "__main__":
    main()

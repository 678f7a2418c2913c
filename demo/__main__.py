"""The command `python -m demo`, which `make demo` runs.

Exit code 0: no finished step and no bit of a loss was lost.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from demo import corpus, report
from demo.findings import Survival, examine
from demo.losses import losses
from demo.progress import DemoError, Progress
from demo.records import read_incident
from demo.runs import RANKS, Plan, Run, run_tool
from demo.training import ITERATIONS, plan_runs, tokenizer_arguments, tools_environment
from tests.frameworks import prepare

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "demo"  # emptied first


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo", description="Kill a process of a training, and lose nothing."
    )
    last = ITERATIONS - 2
    parser.add_argument(
        "--kill-rank", type=int, default=1, choices=range(RANKS), help="whom to kill (default %(default)s)"
    )
    parser.add_argument(
        "--kill-after",
        type=int,
        default=ITERATIONS // 2 + 7,
        metavar="STEP",
        help=f"kill in the middle of the step after this one, 1 to {last} (default %(default)s)",
    )
    options = parser.parse_args()
    if not 1 <= options.kill_after <= last:
        parser.error(f"--kill-after {options.kill_after}: say 1 to {last}")
    return options


def prepare_text(megatron: Path, progress: Progress) -> Path:
    """Write the corpus, the tokenizer and Megatron's binary data set; return their folder."""
    data = OUT / "data"
    data.mkdir(parents=True)
    progress.begin("text: the sources of this machine's Python")
    try:
        files, size = corpus.write_corpus(data / "corpus.jsonl")
    except ValueError as error:
        raise DemoError(str(error)) from None
    progress.done(f"{files} files, {size / 1e6:.1f} MB")

    progress.begin("tokenizer: a byte-level BPE like GPT-2's")
    tokens = corpus.train_tokenizer(data / "corpus.jsonl", data / "gpt2-vocab.json", data / "gpt2-merges.txt")
    progress.done(f"{tokens:,} tokens to choose from")

    progress.begin("data set: Megatron's tools/preprocess_data.py")
    tool = str(megatron / "tools" / "preprocess_data.py")
    source = ["--input", str(data / "corpus.jsonl"), "--output-prefix", str(data / "text")]
    arguments = [*source, "--append-eod", "--workers", "2", *tokenizer_arguments(data)]
    run_tool(
        [sys.executable, str(ROOT / "demo" / "preprocess.py"), tool, *arguments],
        OUT / "preprocess.log",
        "tools/preprocess_data.py",
        tools_environment(megatron),
    )
    progress.done(f"{(data / 'text_text_document.bin').stat().st_size // 2:,} tokens")
    return data


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of equally many cells as a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "─" * (sum(widths) + 2 * (len(widths) - 1))
    print(line)
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(line)


def survival(run: Run) -> Survival:
    """Return a killed run with the report of its incident. Raises DemoError without a report."""
    if run.kill is None:
        raise DemoError(f"the training ended before anything was killed: see {run.log}")
    try:
        return Survival(run, read_incident(run.folder / "ttp"))
    except ValueError as error:
        raise DemoError(f"{error} in {run.folder / 'ttp'}: see {run.log}") from None


def demo(options: argparse.Namespace) -> bool:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    progress = Progress(stages=8)
    megatron = prepare.megatron_lm()
    data = prepare_text(megatron, progress)
    kill = Plan(rank=options.kill_rank, after_step=options.kill_after)
    runs = plan_runs(megatron, data, OUT, kill)
    for run in runs:
        progress.begin(run.title)
        run.execute(progress)
        progress.done(f"{ITERATIONS} iterations, loss {losses(run.steps)[1][-1]:.3f}")
    progress.begin("report")
    reference, calm, *killed = runs
    online, restart = (survival(run) for run in killed)
    findings = examine(reference, calm, online, restart)
    page = OUT / "report.html"
    report.write_page(page, findings, runs, [online, restart])
    progress.done(str(page))
    print()
    print_table([("", "online recovery", "save and restart"), *findings.incidents])
    print_table(findings.rows)
    for sentence in findings.sentences:
        print(sentence)
    print(f"report: {page}")
    return findings.kept


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, it ends every started process
    try:
        kept = demo(options)
    except (DemoError, prepare.NotPreparedError, OSError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; every process that it started has ended", file=sys.stderr)
        return 130
    if not kept:
        print(f"demo: something was lost, the table says what; logs are in {OUT}", file=sys.stderr)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python mmlu.py check DATA --template FILE [--dev]` and `python mmlu.py score LOG DATA`.

The framework's evaluation takes any file for one of six columns, leaves out a subject that it has no examples
for, and ends with exit code 0 whatever happens. So the files are checked before, and its count after.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from pathlib import Path

COLUMNS = ("question", "A", "B", "C", "D", "answer")
WANTED = f"six columns without a header: {', '.join(COLUMNS)}"


def check(data: Path, template: Path | None = None, dev: bool = False) -> int:
    """Check `data`/test and, with `dev`, `data`/dev; return the number of questions.

    Args:
        data: a folder with test/SUBJECT_test.csv and dev/SUBJECT_dev.csv.
        template: the framework's examples by subject, JSON.
        dev: whether the evaluation takes its examples from `data`/dev.

    Raises:
        ValueError: one line about the first file that is wrong.
    """
    files = sorted((data / "test").iterdir()) if (data / "test").is_dir() else []
    if not files:
        raise ValueError(f"{data / 'test'} has no files; needed is SUBJECT_test.csv with {WANTED}")
    subjects = set(json.loads(template.read_text(encoding="utf-8"))) if template else set()
    questions = 0
    for file in files:
        if file.suffix != ".csv":
            raise ValueError(f"{file} is no .csv; the framework reads every file of the folder")
        subject = re.sub(r"_(test|val|dev)$", "", file.stem)
        if template and subject not in subjects:
            raise ValueError(
                f"{file}: the framework has no examples of {subject!r} and leaves it out: {template}"
            )
        questions += _check_file(file)
        if dev:
            examples = data / "dev" / f"{subject}_dev.csv"
            if not examples.is_file():
                raise ValueError(f"{examples} is missing: the examples for {file.name}, in the same download")
            _check_file(examples)
    return questions


def _check_file(file: Path) -> int:
    """Return the number of rows. Raises ValueError."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is no csv in UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"{file} is empty")
    for number, row in enumerate(rows, 1):
        place = f"{file}, row {number}"
        if len(row) != len(COLUMNS):
            shown = ", ".join(cell[:20] for cell in row)
            raise ValueError(f"{place} has {len(row)} columns ({shown[:80]}); needed are {WANTED}")
        if number == 1 and row[-1].strip().lower() in ("answer", "target", "label"):
            raise ValueError(f"{place} is a header ({', '.join(row)}): remove it")
        if not row[-1].strip():
            raise ValueError(f"{place}: the answer is empty")
        if row[-1] not in ("A", "B", "C", "D"):
            raise ValueError(f"{place}: the answer is {row[-1][:20]!r}, not A, B, C or D")
    return len(rows)


def interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share of `right` in `count` (1 or more)."""
    z = 1.959964
    share, weight = right / count, z * z / count
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def score(log: str, questions: int) -> str:
    """Return a line about what the framework's evaluation logged. Raises ValueError."""
    counts = re.findall(r"mmlu acc = (\d+)/(\d+)=", log)
    if not counts:
        raise ValueError("the evaluation ended without a result: its log says why")
    right, count = map(int, counts[-1])
    if count != questions:
        raise ValueError(f"the evaluation counted {count} questions, the files have {questions}")
    low, high = interval(right, count)
    return (
        f"mmlu: {right} of {count} right, {100 * right / count:.1f} %,"
        f" with 95 % confidence between {100 * low:.1f} and {100 * high:.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check MMLU's files before an evaluation, and its count after."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser("check")
    checks.add_argument("data", type=Path, help="the folder with test/ and dev/")
    checks.add_argument("--template", type=Path, help="the framework's mmlu_5shot_template.json")
    checks.add_argument("--dev", action="store_true", help="examples are taken from dev/")
    scores = commands.add_parser("score")
    scores.add_argument("log", type=Path)
    scores.add_argument("data", type=Path)
    parsed = parser.parse_args()
    try:
        if parsed.command == "check":
            print(f"{parsed.data}: {check(parsed.data, parsed.template, parsed.dev)} questions")
        else:
            print(score(parsed.log.read_text(encoding="utf-8", errors="replace"), check(parsed.data)))
    except (ValueError, OSError) as error:
        sys.exit(f"mmlu.py: {error}")


if __name__ == "__main__":
    main()

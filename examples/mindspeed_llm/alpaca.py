"""`python alpaca.py SOURCE --to TARGET [--drop-empty]`: Alpaca data for the framework's preprocessing.

SOURCE is .parquet, .json (a list) or .jsonl with the columns instruction, output and perhaps input; TARGET is
JSON with exactly these. The data set of tatsu-lab has answers that are empty: a model learns to say nothing
from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NEEDED = ("instruction", "output")
COLUMNS = ("instruction", "input", "output")


def read(source: Path) -> list[Any]:
    """Return the rows of a file. Raises ValueError, OSError."""
    if source.suffix == ".parquet":
        import pyarrow  # comes with datasets, which the framework needs
        from pyarrow import parquet

        try:
            return list(parquet.read_table(source).to_pylist())
        except pyarrow.ArrowException as error:
            raise ValueError(f"{source} is no parquet file: {str(error).splitlines()[0]}") from None
    if source.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{source}: say a .parquet, .json or .jsonl file")
    text = source.read_text(encoding="utf-8")
    try:
        if source.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is no JSON: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{source} has no list of rows; one object for each line is .jsonl")
    return rows


def convert(source: Path, drop_empty: bool = False) -> tuple[list[dict[str, str]], int]:
    """Return the rows with the three columns, and how many empty answers were left out. Raises ValueError."""
    rows = read(source)
    if not rows:
        raise ValueError(f"{source} has no rows")
    kept, empty = [], []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or any(name not in row for name in NEEDED):
            description = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{source}, row {number} has {description}; needed are {', '.join(COLUMNS)}")
        texts = {name: row.get(name) or "" for name in COLUMNS}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"{source}, row {number}: {name} is {type(text).__name__}, not text")
        if not texts["output"].strip():
            empty.append(number)
        else:
            kept.append(texts)
    if empty and not drop_empty:
        raise ValueError(
            f"{source}: {len(empty)} of {len(rows)} outputs are empty, the first in row {empty[0]};"
            " leave them out with --drop-empty (flow.sh: DROP_EMPTY=1)"
        )
    if not kept:
        raise ValueError(f"{source}: all {len(rows)} outputs are empty")
    return kept, len(empty)


def main() -> None:
    parser = argparse.ArgumentParser(description="Alpaca data for the framework's preprocessing.")
    parser.add_argument("source", type=Path)
    parser.add_argument("--to", type=Path, help="where to write JSON; without it, only check")
    parser.add_argument("--drop-empty", action="store_true", help="leave out rows without an answer")
    parsed = parser.parse_args()
    try:
        rows, dropped = convert(parsed.source, parsed.drop_empty)
        if parsed.to:
            parsed.to.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"alpaca.py: {error}")
    print(
        f"{parsed.source}: {len(rows)} instructions"
        + (f", {dropped} without an answer left out" * bool(dropped))
    )


if __name__ == "__main__":
    main()

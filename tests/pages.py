"""Pages in docs/ with sections that commands write; the other sections stay unchanged."""

from __future__ import annotations

import re
from pathlib import Path


def write_section(page: Path, heading: str, text: str) -> None:
    """Write `text` below the line `## heading`, in place of the former section; a new section goes to the
    end.
    """
    old = page.read_text() if page.exists() else ""
    body = text.strip("\n")
    section = f"## {heading}\n\n{body}\n"
    match = re.search(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)
    if match is None:
        new = f"{old.rstrip()}\n\n{section}".lstrip()
    else:
        text_after = old[match.end() :]
        new = old[: match.start()] + section + (f"\n{text_after}" if text_after else "")
    page.write_text(new)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

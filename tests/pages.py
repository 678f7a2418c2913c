"""Pages in docs/ that commands write: each command has a section of its own, the rest is left as it is."""

from __future__ import annotations

import re
from pathlib import Path


def write_section(page: Path, heading: str, text: str) -> None:
    """Put `text` below the line `## heading`, in place of what is there; a new section goes to the end."""
    old = page.read_text() if page.exists() else ""
    body = text.strip("\n")
    section = f"## {heading}\n\n{body}\n"
    match = re.search(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)
    if match is None:
        new = f"{old.rstrip()}\n\n{section}".lstrip()
    else:
        rest = old[match.end() :]
        new = old[: match.start()] + section + (f"\n{rest}" if rest else "")
    page.write_text(new)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

"""Prints the answers of `ttp`: with colours on a terminal, where rich is installed; else the same text."""

from __future__ import annotations

import sys
from collections.abc import Iterable

# Words of answers, by what they mean to a reader; the later ones win.
_STYLES = (
    (r"^(job|at|step|protection|ranks|restarts|incidents|controller|save folder|host) {2,}", "bold"),
    (r"^(OK|protection +protected)\b", "green"),
    (r"\b(intact|recovered|saved)\b", "green"),
    (r"^WARN\b.*|\bsizes are right\b", "yellow"),
    (r"^(FAIL|REFUSED)\b.*|\b(damaged|unreadable|changed|missing|lost)\b", "red"),
    (r"\b(NOT PROTECTED|silent for|not protected)\b.*", "bold red"),
    (r"^(goodput|verdict)\b.*", "bold"),
)


def show(lines: Iterable[str]) -> None:
    """Print lines to stdout, at once."""
    lines = list(lines)
    if not (sys.stdout.isatty() and _in_colour(lines)):
        print("\n".join(lines), flush=True)


def _in_colour(lines: Iterable[str]) -> bool:
    """Print lines by rich; return False where it is not installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        words = Text(line)
        for pattern, style in _STYLES:
            words.highlight_regex(pattern, style)
        console.print(words)
    return True

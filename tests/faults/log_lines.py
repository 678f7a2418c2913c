"""Finds the adaptor's lines in a log that scripts write to as well.

The adaptor writes each line in one piece. But `print` of an unbuffered script writes a text and its newline
separately, and a line of the adaptor, written by another thread or process, may come between them.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"(?:\[ttp\]|ttprun: error:) .*")


def lines(log: str) -> list[str]:
    """Return the adaptor's lines, each without text of a script in front of it."""
    return _LINE.findall(log)


def last_line(log: str) -> str:
    """Return the last line of `log`; if the adaptor wrote it, without text of a script in front of it."""
    last = log.rstrip().rpartition("\n")[2]
    return next(iter(lines(last)), last)

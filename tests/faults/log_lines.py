"""Finds the adaptor's lines in a log that scripts also write to.

The adaptor writes each line in one piece. But `print` of an unbuffered script writes a text and the newline
separately, and a line of the adaptor from another thread or process may come in between.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"(?:\[ttp\]|ttprun: error:) .*")


def lines(log: str) -> list[str]:
    """Return the adaptor's lines, each without text of a script in front of it."""
    return _LINE.findall(log)


def last_line(log: str) -> str:
    """Return the last line of `log`; of a line of the adaptor, without a script's text in front."""
    last = log.rstrip().rpartition("\n")[2]
    return next(iter(lines(last)), last)

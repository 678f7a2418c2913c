"""The lines that the adaptor tells, in a log into which scripts write, too.

Each is written in one piece. But where a script's output is not buffered, `print` writes a text and the end
of its line apart, and the adaptor, whose threads and processes write in their own time, may come between.
"""

from __future__ import annotations

import re

_TOLD = re.compile(r"(?:\[ttp\]|ttprun: error:) .*")


def lines(log: str) -> list[str]:
    """Return the lines that the adaptor has told, each without what a script had begun to write before it."""
    return _TOLD.findall(log)


def last_line(log: str) -> str:
    """Return the last line of `log`; of one that the adaptor has told, the same as `lines`."""
    last = log.rstrip().rpartition("\n")[2]
    return next(iter(lines(last)), last)

"""The finding of a check of `ttp doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One line of `ttp doctor`.

    Attributes:
        name: what was looked at
        level: OK; WARN: worse than it could be; FAIL: a job would be refused, or a fault would lose steps
        words: what was found
        remedy: what to do about it, '' where nothing is to be done
    """

    name: str
    level: Literal["OK", "WARN", "FAIL"]
    words: str
    remedy: str = ""

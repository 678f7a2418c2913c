"""The starts of the workers of a job, as they are counted for whoever joins it later."""

from __future__ import annotations

from typing import NamedTuple


class StartCounts(NamedTuple):
    """The starts of the workers of a job so far.

    Attributes:
        restarts: how many of --max-restarts are used up
        generations: how many times workers were started, restarts included
    """

    restarts: int = 0
    generations: int = 0


NO_STARTS = StartCounts()

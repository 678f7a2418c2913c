"""Chooses the checkpoint of a save folder that is sent next; no clock, no disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of the save folder.

    Attributes:
        place: tells one checkpoint from another of the same step (`layout.place`)
    """

    step: int
    last_words: bool
    place: str = ""


@dataclass(frozen=True)
class Choice:
    """The checkpoint that is sent next, and those that were due before it and are left out."""

    saved: Saved
    skipped: list[Saved]


def choose(pending: Sequence[Saved], last: int | None, every: int, *, at_end: bool) -> Choice | None:
    """Return what is sent next, None where nothing is due.

    Only the newest one that is due is sent: who resumes takes the newest.

    Args:
        pending: what is neither sent nor given up, in the order in which it was saved. A job that has gone
            back saves earlier steps again.
        last: the step that was sent or given up last, None where there is none.
        every: how many steps lie at least between two that are sent; last words are always sent.
        at_end: the job has ended, so the newest one is sent in any case.
    """
    due: list[Saved] = []
    newest_step = last
    for saved in pending:
        forced = saved.last_words or (at_end and saved is pending[-1])
        if newest_step is None or forced or saved.step <= newest_step or saved.step - newest_step >= every:
            due.append(saved)
            newest_step = saved.step
    return Choice(due[-1], due[:-1]) if due else None

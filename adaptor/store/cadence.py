"""Chooses the checkpoint of a save folder that is sent next; no clock, no disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of the save folder."""

    step: int
    last_words: bool


@dataclass(frozen=True)
class Choice:
    """The checkpoint that is sent next, and the steps that were due before it and are left out."""

    step: int
    skipped: list[int]


def choose(saved: Sequence[Saved], last: int | None, every: int, *, at_end: bool) -> Choice | None:
    """Return what is sent next, None where nothing is due.

    Only the newest one that is due is sent: who resumes takes the newest.

    Args:
        saved: of the save folder, by step.
        last: the step that was sent or given up last, None where there is none.
        every: how many steps lie at least between two that are sent; last words are always sent.
        at_end: the job has ended, so the newest one is sent in any case.
    """
    due: list[int] = []
    before = last
    newer = [one for one in saved if last is None or one.step > last]
    for one in newer:
        forced = one.last_words or (at_end and one is newer[-1])
        if before is None or forced or one.step - before >= every:
            due.append(one.step)
            before = one.step
    return Choice(due[-1], due[:-1]) if due else None

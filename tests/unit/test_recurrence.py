"""Repeated faults without progress."""

from __future__ import annotations

import msgspec
import pytest

from adaptor.controller.verdict import EXIT_NO_PROGRESS, Recurrence
from adaptor.protocol.messages import Fault, Verdict

SAME = "ValueError at train.py:8"


def verdict(
    key: str = SAME, finished: int | None = 7, outcome: str = "nothing", step: int = 7, newest: int = 7
) -> Verdict:
    fault = Fault(key, finished, (0,))
    return Verdict(
        incident=1,
        outcome=outcome,
        step=step,
        line="as it was",
        cause_rank=0,
        exit_code=1,
        save_folder="/save",
        fault=fault,
        newest=newest,
    )


def stops(recurrence: Recurrence, *verdicts: Verdict) -> list[bool]:
    """Return for each verdict whether it ends the job."""
    judged = []
    for each_verdict in verdicts:
        judgement = recurrence.judge(each_verdict)
        recurrence.note(judgement)
        judged.append(bool(judgement.stop))
    return judged


def test_the_third_fault_ends_the_job() -> None:
    first = verdict(outcome="saved")
    assert stops(Recurrence(3), first, verdict(), verdict()) == [False, False, True]


def test_the_reason_names_the_fault_and_its_count() -> None:
    recurrence = Recurrence(2)
    recurrence.note(verdict())
    judgement = recurrence.judge(verdict())
    assert (judgement.exit_code, judgement.stop) == (
        EXIT_NO_PROGRESS,
        f"{SAME} came 2 times after step 7 without a newer checkpoint (TTP_NO_PROGRESS)",
    )


@pytest.mark.parametrize(
    "other_fault",
    [
        verdict(key="KeyError at train.py:8"),
        verdict(key="ValueError at train.py:9"),
        verdict(finished=8),
        verdict(key=""),
    ],
    ids=["another exception", "another place", "another step", "told to end"],
)
def test_faults_in_turn_without_a_newer_checkpoint_end_the_job(other_fault: Verdict) -> None:
    alternating = [verdict(), other_fault, verdict(), other_fault, verdict()]
    assert stops(Recurrence(3), *alternating) == [False] * 4 + [True]


def test_a_newer_checkpoint_begins_anew() -> None:
    newer = verdict(outcome="saved", step=8)
    assert stops(Recurrence(3), verdict(), verdict(), newer, verdict(step=8)) == [False] * 4


def test_a_regular_checkpoint_is_progress() -> None:
    """Each start begins at a later step, although the adaptor saved nothing."""
    from_later = [verdict(step=step, newest=step) for step in (7, 8, 9, 10)]
    assert stops(Recurrence(2), *from_later) == [False] * 4


def test_a_hang_of_nobody_in_particular_is_known_by_the_step_of_the_job() -> None:
    hangs = [verdict("a hang", None, "lost", -1, newest=newest) for newest in (10, 20, 20)]
    assert stops(Recurrence(2), *hangs) == [False, False, True]


def test_a_lost_checkpoint_does_not_make_the_next_one_newer() -> None:
    saved, lost = verdict(outcome="saved"), verdict(outcome="lost", step=-1)
    assert stops(Recurrence(4), saved, lost, saved, lost) == [False, False, False, True]


def test_a_limit_of_one_ends_the_job_at_once() -> None:
    judgement = Recurrence(1).judge(verdict("exit code 1"))
    assert judgement.stop == "exit code 1 came once after step 7 without a newer checkpoint (TTP_NO_PROGRESS)"


def test_unknown_faults_never_count_as_repeated() -> None:
    assert stops(Recurrence(2), *[verdict(key="")] * 5) == [False] * 5


def test_a_limit_of_zero_never_ends_the_job() -> None:
    assert stops(Recurrence(0), *[verdict()] * 9) == [False] * 9


@pytest.mark.parametrize(
    ("lasting", "on_all_ranks", "trained", "ends"),
    [
        (True, True, False, [True]),
        (True, False, False, [False, True]),
        (False, True, False, [False, False, True]),
        (True, True, True, [False, False, True]),
    ],
    ids=["of-all-ranks", "of-one-rank", "of-the-system", "after-training"],
)
def test_an_exception_before_training(
    lasting: bool, on_all_ranks: bool, trained: bool, ends: list[bool]
) -> None:
    recurrence = Recurrence(3)
    if trained:
        recurrence.note(verdict(key="SIGKILL", outcome="saved"))
    first_verdict = verdict(finished=-1, step=-1, newest=-1)
    fault = msgspec.structs.replace(first_verdict.fault, lasting=lasting, on_all_ranks=on_all_ranks)
    first_verdict = msgspec.structs.replace(first_verdict, fault=fault)
    assert stops(recurrence, *[first_verdict] * len(ends)) == ends

"""The twin check on one rank: its effect on the update window, and the agreement on the interval."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.checkpoint.shards import HeldShard
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol.messages import Corruption, Share
from adaptor.replica import group
from adaptor.verification import twin_check, verdict
from adaptor.verification.twin_check import TwinCheck
from adaptor.worker.door import Unwind
from tests.unit.test_session import Worker, worker
from tests.unit.threads import Thread, wait_for_waiter

__all__ = ["worker"]  # a fixture


class _Verifier:
    """Reports different holders at the door of step `bad`, and before a save of the previous step."""

    def __init__(self, bad: int) -> None:
        self.calls: list[Any] = []
        self._bad = bad
        self._step = 0

    def begin(self, trainee: Any, restored: int | None = None) -> None:
        self.calls.append(("begin", restored))

    def after_update(self, trainee: Any, step: int) -> None:
        self.calls.append(("after", step, trainee.weights))

    def begin_step(self, trainee: Any) -> None:
        self._step += 1

    def is_equal(self, trainee: Any, step: int, *, is_saved: bool = False) -> bool:
        return (step + 1 if is_saved else step) != self._bad


def test_where_holders_differ_no_update_is_made(worker: Worker) -> None:
    verifier = worker.session.window.verifier = _Verifier(bad=3)
    worker.loop.begin(0)
    worker.loop.step(1)
    worker.loop.step(2)
    worker.session.begin_step(3)
    errors: list[BaseException] = []

    def update() -> None:
        try:
            worker.loop.update(3)
        except Unwind as error:
            errors.append(error)

    with Thread(update):
        wait_for_waiter(worker.changed)
        assert worker.stands == ("RUNNING", 2, 2)
        assert worker.gives == [2], "never READY: the controller lets no rank pass"
        assert worker.frozen().finished == 2
        worker.session.door.let_through(2)  # as for a dump of step 2
        worker.session.door.turn_away()
    assert len(errors) == 1
    assert worker.trainee.weights == 2
    assert verifier.calls == [("begin", None), ("after", 1, 1), ("after", 2, 2)]


def test_where_holders_differ_no_step_is_saved(worker: Worker) -> None:
    worker.session.before_save()  # before training begins
    worker.session.window.verifier = _Verifier(bad=3)
    worker.loop.begin(0)
    worker.loop.step(1)
    worker.session.before_save()
    worker.loop.step(2)
    worker.session.door.shut()
    worker.session.door.turn_away()
    with pytest.raises(Unwind):
        worker.session.before_save()
    assert worker.gives == [2]


def test_restored_state_is_compared_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with TTP_VERIFY_EVERY=5; a survivor keeps the sums of its update, a newcomer takes new sums."""
    monkeypatch.setattr(twin_check, "_sums_of_shards", lambda trainee: {0: trainee})
    _others_say(monkeypatch)
    check, _ = _check(5)
    updated, put_back = (_trainee(*TWINS.shares_by_rank) for _ in range(2))
    check.begin(updated)
    check.after_update(updated, 4)
    assert check._updated is None
    check.after_update(updated, 5)
    check.begin(put_back, 5)
    assert check._updated == {0: updated}
    for step in (4, 7):
        check.begin(put_back, step)
        assert (check._step, check._updated) == (step, {0: put_back})
    check.begin(put_back)
    assert check._updated is None


def _trainee(*shares: tuple[Share, ...]) -> Any:
    return types.SimpleNamespace(
        shares_by_rank=list(shares),
        state=types.SimpleNamespace(optimizer=types.SimpleNamespace()),
        mirrors=(),
        device=types.SimpleNamespace(
            mark=lambda: None, wait=lambda mark, seconds: True, beside=contextlib.nullcontext
        ),
    )


TWINS = _trainee((Share("g", 0, 1),), (Share("g", 0, 1),))


def _check(every: int | None = None, on_corruption: str = "replace") -> tuple[TwinCheck, list[Corruption]]:
    reports: list[Any] = []
    return TwinCheck(every, on_corruption, 0, reports.append), reports


def _others_say(monkeypatch: pytest.MonkeyPatch, *others_numbers: Sequence[int]) -> None:
    monkeypatch.setattr(
        twin_check,
        "_smallest",
        lambda *own_numbers: [min(numbers) for numbers in zip(own_numbers, *others_numbers, strict=True)],
    )


@pytest.mark.parametrize(
    ("every", "other_numbers", "expected"),
    [
        (None, (True, -16, False, False, 1, -40), 16),  # a new process adopts the interval of the other ranks
        (7, (True, -7, False, True, 7, -40), 7),
        (None, (False, -1, False, False, 1, -40), 0),  # the other ranks have turned the check off
    ],
)
def test_a_new_process_verifies_the_steps_of_the_others(
    every: int | None, other_numbers: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _others_say(monkeypatch, other_numbers)
    check, _ = _check(every)
    check.begin(TWINS)
    assert (check._every, check._chooses, check._first, check._agreed) == (
        expected,
        False,
        other_numbers[4],
        40,
    )


def test_a_restart_does_not_test_the_layout_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(twin_check.context, "part", lambda kind: types.SimpleNamespace(path=tmp_path))
    _check(1)[0]._learn("proven")
    _others_say(monkeypatch, (True, -1, False, True, 1, -40))
    check, _ = _check(1)
    check.begin(TWINS)
    assert (check._every, check._layout) == (1, "proven")
    _others_say(monkeypatch, (True, -1, False, False, 1, -40))  # a rank on another node
    check.begin(TWINS)
    assert (check._every, check._layout) == (1, "")
    check._learn("off")
    check, _ = _check(1)
    check.begin(TWINS)
    assert check._every == 0


def test_a_shard_that_changed_since_its_update_is_not_provided(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([param])
    optimizer.step()
    monkeypatch.setattr(twin_check.shards, "held_shards", lambda *_: [HeldShard(0, False, optimizer)])
    _others_say(monkeypatch)
    check, _ = _check(1)
    check.begin(TWINS)
    check.after_update(TWINS, 1)
    check.require_unchanged(TWINS, 1, {0})
    optimizer.state[param]["exp_avg"].view(torch.int32)[2] ^= 1
    check.require_unchanged(TWINS, 2, {0})  # the sums belong to another step
    check.require_unchanged(TWINS, 1, {1})  # this rank provides another shard
    with pytest.raises(CheckpointError, match=r"exp_avg of shard g/0 changed at rest after .* step 1"):
        check.require_unchanged(TWINS, 1, {0})


def test_a_job_without_second_holders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _others_say(monkeypatch)
    check, _ = _check(1)
    with pytest.raises(UnsupportedError, match="no shard of this job has a second holder"):
        check.begin(_trainee((Share("g", 0, 2),), (Share("g", 1, 2),)))


FINDING = verdict.Finding(verdict.Kind.UPDATE, "g/0", ("param",), (), (0, 1), 4, "param differs")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(twin_check.output, "tell", lines.append)
    return lines


def test_in_the_self_test_a_difference_turns_the_check_off(printed: list[str]) -> None:
    check, reports = _check(1)
    assert check._act_on(FINDING, FINDING.agreed, is_self_test=True)
    assert (check._every, reports) == (0, [])
    (line,) = printed
    assert line.startswith("[ttp] no step is verified (TTP_VERIFY_EVERY): param differs, in the first 20")


@pytest.mark.parametrize("on_corruption", ["replace", "stop", "report"])
def test_after_the_self_test_the_setting_decides(on_corruption: str, printed: list[str]) -> None:
    check, reports = _check(1, on_corruption)
    goes_on = on_corruption == "report"
    assert [check._act_on(FINDING, 7, is_self_test=False) for _ in range(2)] == [goes_on] * 2
    sent = [(message.suspects, message.agreed, message.stops) for message in reports]
    assert sent == ([] if goes_on else [((0, 1), 4, on_corruption == "stop")] * 2)
    line = "[ttp] CORRUPTION: param differs; rank 0 and 1: one of them corrupt"
    assert printed == [line] * goes_on


def test_state_that_the_script_changes_in_every_step_is_reported_once(printed: list[str]) -> None:
    check, reports = _check(1)
    for step, label in ((4, "g/0"), (5, "g/0"), (6, "g/1")):
        alike = verdict.Finding(verdict.Kind.UNKNOWN, label, (), (), (), step, f"alike after step {step}")
        assert check._act_on(alike, step, is_self_test=False)
    assert (reports, printed) == ([], ["[ttp] alike after step 4", "[ttp] alike after step 6"])


def test_holders_that_a_script_has_changed_alike_agree(
    printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin_check.group, "of_training_job", lambda: None)
    monkeypatch.setattr(group, "total", lambda everyone, number: 1)
    monkeypatch.setattr(group, "gather_bytes", lambda everyone, data: [data, data])
    check, reports = _check(1)
    check._holders, check._models, check._step = {"g/0": [0, 1]}, {"g": [0, 1]}, 30
    record = verdict.ShardRecord({"param": "a"}, {"param": "b"}, {"grad": "c"})
    report = verdict.Report({"g/0": record}, {"g": ("w", "w")}, 29)
    assert check._is_agreed(report, 31, lambda is_agreed: None)
    assert (check._agreed, reports, len(printed)) == (30, [], 1)

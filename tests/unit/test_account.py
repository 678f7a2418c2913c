"""The lines for an operator: counts over the starts of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from adaptor import output
from adaptor.launchers.records import log
from adaptor.launchers.records.log import Account
from adaptor.protocol.messages import Fault, Recovered, Verdict
from tests.unit.threads import LONG_S


@pytest.fixture
def printed_lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(output, "tell", lines.append)
    return lines


def lost(newest: int, save: str = "") -> Verdict:
    return Verdict(
        incident=1,
        outcome="lost",
        step=-1,
        line="as it was",
        cause_rank=0,
        exit_code=1,
        save_folder=save,
        newest=newest,
    )


def test_a_start_that_fails_before_training_takes_no_lost_step_from_the_sum(printed_lines: list[str]) -> None:
    account, fault_time = Account(3), time.time()
    account.fault(lost(30), fault_time - 100, "")
    account.restart()
    account.fault(lost(-1), fault_time, "")
    account.restart()
    account.training_began(20, time.monotonic())
    assert ": from step 20, 10 steps lost, 100." in printed_lines[-1]
    account.ended()
    assert "2 incidents, 10 steps lost" in printed_lines[-1]


def test_a_recovery_is_an_incident_and_no_restart(printed_lines: list[str]) -> None:
    account = Account(1)
    line = "rank 2 was ended by SIGKILL; replaced by pid 47, training goes on after step 47, 0 steps lost"
    fault = Fault("SIGKILL", 47, (2,), 71, "n1", "signal")
    start = time.time()
    account.recovered(Recovered(1, 47, line, fault, replaced=(2,), seconds=0.9), "/logs/incident-1.json")
    utc = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(start - 0.9))
    assert printed_lines[0].startswith(f"[ttp] {utc}")
    assert printed_lines[0].endswith(
        " incident 1, rank 2 (pid 71, host n1), after step 47, report /logs/incident-1.json"
    )
    assert printed_lines[1:] == [f"[ttp] {line}"]
    account.ended()
    assert printed_lines[-1].endswith("1 incident (1 without a restart), 0 steps lost; reports in /logs")
    account.fault(lost(50), time.time(), "")
    account.restart()
    account.training_began(49, time.monotonic())
    assert "restart 1 of 1: from step 49, 1 step lost" in printed_lines[-1]
    account.ended()
    assert "2 incidents (1 without a restart), 1 step lost" in printed_lines[-1]


def test_the_ttprun_that_was_told_to_end_is_named(printed_lines: list[str]) -> None:
    verdict = msgspec.structs.replace(
        lost(30), cause_rank=-1, fault=Fault(host="n1", pid=71, kind="told-to-end")
    )
    Account(3).fault(verdict, 0.0, "")
    assert printed_lines == ["[ttp] 1970-01-01T00:00:00Z incident 1, ttprun (pid 71, host n1)"]


def test_where_the_reports_are(printed_lines: list[str]) -> None:
    account = Account(3)
    account.fault(lost(30), time.time(), "on node 1")
    account.ended()
    assert printed_lines[-1].endswith("; reports on node 1")
    account.fault(lost(30), time.time(), "/logs/incident_2/report.txt")
    account.ended()
    assert printed_lines[-1].endswith("; reports in /logs/incident_2")


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A save folder that blocks until the event is set; its tracker then names step 20."""
    answers = threading.Event()
    monkeypatch.setattr(log, "PROMPT_S", 0.05)
    monkeypatch.setattr(log, "tracked_step", lambda root: 20 if answers.wait(LONG_S) else None)
    yield answers
    answers.set()


def test_a_save_folder_that_hangs_costs_no_line(
    printed_lines: list[str], hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "TRACKER_S", 0.05)
    account = Account(3)
    account.fault(lost(30, "/save"), time.time(), "")
    account.fault(lost(30, "/save"), time.time(), "")
    account.failed("as it was")
    assert printed_lines[-2] == "[ttp] as it was"
    assert "the job has failed, 2 incidents" in printed_lines[-1]


def test_the_last_line_does_not_wait_for_a_save_folder_that_hangs(
    printed_lines: list[str], hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker's step follows in a later line."""
    monkeypatch.setattr(log, "TRACKER_S", LONG_S)
    account = Account(3)
    account.fault(lost(30, "/save"), time.time(), "")
    say = printed_lines.append

    def tell(line: str) -> None:
        say(line)
        hung.set()  # the disk answers only after the first line

    monkeypatch.setattr(output, "tell", tell)
    account.failed("as it was")
    assert printed_lines[-2:] == ["[ttp] as it was", "[ttp] the newest checkpoint in /save is step 20"]


def test_the_last_line_has_the_newest_checkpoint(
    printed_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PROMPT_S", LONG_S)
    monkeypatch.setattr(log, "tracked_step", lambda root: 20)
    account = Account(3)
    for _ in range(2):
        account.fault(lost(30, "/save"), time.time(), "")
    account.failed("as it was")
    assert "the job has failed, 2 incidents, 10 steps lost" in printed_lines[-2]
    assert printed_lines[-1] == "[ttp] as it was; the newest checkpoint in /save is step 20"


def test_what_was_loaded_from_another_folder_is_not_lost(printed_lines: list[str]) -> None:
    account = Account(3)
    account.training_began(28, time.monotonic())
    for _ in range(2):
        account.fault(lost(30, "/no/checkpoint"), time.time(), "")
    account.failed("as it was")
    assert "the job has failed, 2 incidents, 2 steps lost" in printed_lines[-2]


def test_a_job_that_is_told_to_end_has_not_failed(printed_lines: list[str]) -> None:
    account = Account(1)
    account.recovered(Recovered(1, 47, "rank 2 was replaced", replaced=(2,), seconds=0.9), "")
    fault = Fault("SIGTERM", 50, (), 70, "n0", "told-to-end")
    account.fault(
        msgspec.structs.replace(lost(50), outcome="saved", fault=fault, cause_rank=-1), time.time(), ""
    )
    account.failed("as it was")
    assert printed_lines[-2].endswith(" the job was ended, 2 incidents (1 without a restart), 0 steps lost")


def test_steps_that_nobody_has_counted_are_not_known(printed_lines: list[str]) -> None:
    """For an unprotected job, and for a job that never reports training again."""
    for unprotected in (True, False):
        account = Account(3)
        nothing = msgspec.structs.replace(lost(-1), outcome="nothing", unprotected=unprotected)
        account.fault(nothing, time.time(), "")
        account.restart()
        account.ended()
        assert printed_lines[-1].endswith(" the job has come to its end, 1 incident, steps lost: not known")
    account = Account(3)
    for _ in range(2):
        account.fault(msgspec.structs.replace(nothing, unprotected=True), time.time(), "")
    account.failed("as it was")
    assert " the job has failed, 2 incidents, steps lost: not known" in printed_lines[-2]


def test_a_newest_step_or_a_checkpoint_that_is_not_known(printed_lines: list[str]) -> None:
    account = Account(3)
    account.fault(lost(-1), time.time(), "")
    account.restart()
    account.training_began(20, time.monotonic())
    assert "restart 1 of 3: from step 20, steps lost: not known, " in printed_lines[-1]
    account.ended()
    assert printed_lines[-1].endswith("1 incident, steps lost: not known")
    account = Account(3)
    for _ in range(2):
        account.fault(lost(30), time.time(), "")  # without a folder the saved step is unknown
    account.failed("as it was")
    assert " the job has failed, 2 incidents, steps lost: not known" in printed_lines[-2]


def test_a_start_on_more_nodes_is_no_restart(printed_lines: list[str]) -> None:
    account = Account(1)
    account.fault(lost(5), time.time(), "")
    assert account.join() == "start on more nodes"
    account.training_began(5, time.monotonic())
    assert "start on more nodes: from step 5, 0 steps lost, " in printed_lines[-1]
    assert account.begun == 0

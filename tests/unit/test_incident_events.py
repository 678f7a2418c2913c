"""The lines of an incident's report in the agent's log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from adaptor import output
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.job_files import JobFiles
from adaptor.protocol.messages import (
    BoardRecord,
    Died,
    Dying,
    Exit,
    Fault,
    Freeze,
    Frozen,
    Hello,
    Joined,
    Phase,
    Prepare,
    Raised,
    Recovered,
    Replace,
    Verdict,
)
from adaptor.protocol.records import unix
from tests.unit.threads import LONG_S


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_events_of_every_rank_are_debug_lines(
    level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of ranks a line for each would delay the orders."""
    monkeypatch.setattr(logging.getLogger("adaptor"), "propagate", True)
    caplog.set_level(level, "adaptor")
    board = BoardRecord(1, 1, Phase.RUNNING, 5, 5, 5)
    report = IncidentReport(JobFiles(str(tmp_path)))
    report.record_message(0, Died(0, -9, 0.0, board))
    report.record_order(0, 1, Freeze(1))
    report.record_message(0, Frozen(1, 1, board))
    report.record_order(0, None, Prepare(1, "/save", 5))
    report.record_order(0, 1, Exit(1))
    expected = ["rank 0: fault-noticed status -9, RUNNING after step 5", "node 0: prepare step 5"]
    if level == logging.DEBUG:
        expected[1:1] = ["rank 1: freeze ", "rank 1: frozen RUNNING after step 5"]
        expected.append("rank 1: exit ")
    assert caplog.messages == expected


@pytest.mark.robustness(
    "A6",
    "a rank is killed, and a survivor's exception is heard first",
    "the report and the verdict name one rank",
)
def test_the_fault_of_the_report_is_that_of_the_verdict(tmp_path: Path) -> None:
    report = IncidentReport(JobFiles(str(tmp_path)))
    report.record_message(0, Raised(0, "RuntimeError: Connection closed by peer", 1))
    report.record_message(0, Dying(1, 2.0, BoardRecord(1)))
    report.record_message(0, Died(1, -9, 3.0, BoardRecord(1)))
    fault = Fault("SIGKILL", 5, (1,))
    report.record_order(
        0,
        None,
        Verdict(
            incident=1,
            outcome="saved",
            step=5,
            line="rank 1 was ended by SIGKILL",
            cause_rank=1,
            exit_code=137,
            save_folder="",
            fault=fault,
        ),
    )
    assert output.drain(LONG_S)
    written = json.loads(Path(report.path).read_text())
    assert (written["blamed"], unix(written["began"])) == (1, 2.0)


def test_an_incident_that_ends_without_a_restart_has_its_own_report(tmp_path: Path) -> None:
    """Later events are in no report of the next incident."""
    report = IncidentReport(JobFiles(str(tmp_path)))
    board = BoardRecord(1, 7, Phase.RUNNING, 5, 5)
    fault = Fault("SIGKILL", 5, (1,), 7, "host")
    reports = []
    for number in (1, 2):
        report.record_message(0, Dying(1, 2.0, board))
        report.record_message(0, Died(1, -9, 3.0, board))
        report.record_order(0, 0, Freeze(number))
        report.record_order(0, None, Replace(number, 1, 1))
        report.record_message(0, Hello(1, 8))
        report.record_message(0, Joined(0, number, 1, 5, "same"))
        line = f"rank 1 was ended by SIGKILL; replaced by pid {number}"
        for node in (0, 1):  # every agent gets it
            report.record_order(node, None, Recovered(number, 5, line, fault, (1,)))
        report.record_message(0, Frozen(0, number, board))
        assert output.drain(LONG_S)
        reports.append(json.loads(Path(report.path).read_text()))
    assert [(written["incident"], written["reason"]) for written in reports] == [
        (1, "rank 1 was ended by SIGKILL; replaced by pid 1"),
        (2, "rank 1 was ended by SIGKILL; replaced by pid 2"),
    ]
    for written in reports:
        assert (written["verdict"], written["blamed"], written["pid"], written["step"]) == (
            "recovered",
            1,
            7,
            5,
        )
        kinds = ["fault-noticed", "died", "freeze", "replace", "started", "joined", "recovered"]
        assert [event["type"] for event in written["events"]] == kinds
    assert report.next_incident == 3

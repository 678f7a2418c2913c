"""The trace of an incident, made from the files that ttprun writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptor import output
from adaptor.launchers.cli import ttp
from adaptor.operations.timeline import chrome_trace
from adaptor.protocol.records import IncidentRecord
from tests.unit.test_operations import RecordedJob
from tests.unit.test_serve import get, job, served, server_of  # noqa: F401
from tests.unit.threads import LONG_S


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The log folder of a job that lost rank 1 and continued."""
    recorded_job = RecordedJob(tmp_path)
    recorded_job.rank_1_is_killed(100.0)
    recorded_job.report.record_next_action("restart 1 of 3")
    recorded_job.report.begin(2)
    recorded_job.starts(110.0)
    recorded_job.report.record_progress(41)
    recorded_job.incident()
    assert output.drain(LONG_S)
    (tmp_path / "job_7" / "status.json").write_text("{}")
    return tmp_path


def entries(trace: dict[str, Any], kind: str, **place: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = trace["traceEvents"]
    return [event for event in events if event["ph"] == kind and place.items() <= event.items()]


def test_parts_and_rows(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert ttp.main(["report", str(recorded / "job_7"), "--trace", "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: the trace of incident ")
    trace = json.loads(out.read_text())
    parts = {entry["name"]: (entry["ts"], entry["dur"]) for entry in entries(trace, "X", pid=0)}
    assert {name: pytest.approx(times, abs=20) for name, times in parts.items()} == {
        "detect": (0, 20_000),
        "freeze": (20_000, 30_000),
        "write": (60_000, 100_000),
        "publish": (170_000, 30_000),
        "restart": (parts["restart"][0], 10_790_000),
        "load": (parts["restart"][0] + parts["restart"][1], 2_000_000),
        "first step": (parts["load"][0] + parts["load"][1], parts["first step"][1]),
    }
    (rank_0,) = (entry for entry in entries(trace, "X", pid=1, tid=1) if entry["name"] == "freeze")
    assert (rank_0["ts"], rank_0["dur"]) == pytest.approx((20_000, 30_000), abs=20)
    names = {(entry["pid"], entry.get("tid")): entry["args"]["name"] for entry in entries(trace, "M")}
    assert (names[1, 1], names[2, 2], names[2, None]) == ("rank 0", "rank 1, blamed", "node 1 n1")
    assert [entry["name"] for entry in entries(trace, "i", pid=2, tid=2)] == ["fault-noticed", "died"]
    assert all(event["ts"] >= 0 for event in trace["traceEvents"] if "ts" in event)


def test_an_incident_that_is_not_there(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ttp.main(["report", str(recorded / "job_7"), "--trace", "absent"]) == 2
    assert "--trace is 'absent': this job has no such incident, it has 19" in capsys.readouterr().err
    (incident,) = (recorded / "job_7" / "incidents").iterdir()
    incident.unlink()
    assert ttp.main(["report", str(recorded / "job_7"), "--trace"]) == 2
    assert capsys.readouterr().err.endswith("this job has had no incident\n")


def test_a_trace_is_served(job: Path) -> None:  # noqa: F811
    (path,) = (job / "incidents").iterdir()
    with served(server_of(job)) as address:
        base = f"http://{address}/incidents"
        code, text = get(f"{base}/{path.stem}/trace")
        assert (code, json.loads(text)["otherData"]["job"]) == (200, "j")
        for wrong_path in (f"{path.stem}/other", path.stem, "absent/trace", "../status/trace"):
            assert get(f"{base}/{wrong_path}")[0] == 404
        code, text = get(f"http://{address}/api/v1/incidents/{path.stem}")
        assert (code, json.loads(text)["schema"]) == (200, "ttp.incident/1")


def test_an_incident_without_an_event(job: Path) -> None:  # noqa: F811
    (path,) = (job / "incidents").iterdir()
    record = msgspec.json.decode(path.read_bytes(), type=IncidentRecord)
    record.events = []
    record.blamed = None
    assert [entry["name"] for entry in entries(chrome_trace(record), "X")] == []

"""Reading the files of a running job: new entries are added once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from adaptor.operations import job_reader
from adaptor.operations.goodput import Goodput
from adaptor.operations.job_reader import JobFolderError, JobReader, newest_events
from adaptor.protocol.records import EVENTS_FILE, STATUS_FILE
from tests.unit.test_serve import EVENTS, event, incident, job  # noqa: F401

LINES = [msgspec.json.encode(event) + b"\n" for event in EVENTS]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def spent_of(folder: Path) -> Goodput:
    """Return the times that a new reader computes."""
    return JobReader(folder).spent()


@pytest.mark.parametrize("bytes_at_once", [7, 64, 1 << 20])
def test_events_that_arrive_in_pieces(bytes_at_once: int, job: Path) -> None:  # noqa: F811
    path = job / EVENTS_FILE
    path.write_bytes(b"")
    fixed = msgspec.json.decode((job / STATUS_FILE).read_bytes())
    reader, data = JobReader(job), b"".join(LINES)
    for place in range(0, len(data), bytes_at_once):
        append(path, data[place : place + bytes_at_once])
        assert reader.spent() == spent_of(job)
    assert reader.spent().steps == fixed["step"]
    assert reader.spent().seconds["recovery"] == 8


def test_a_truncated_line_loses_only_itself(job: Path) -> None:  # noqa: F811
    """A full disk truncates a line; the next line follows on it or on a new line."""
    path = job / EVENTS_FILE
    path.write_bytes(LINES[0] + LINES[1][:20] + LINES[2] + b'"\xff"\n' + LINES[1] + b"[" * 100_000 + b"\n")
    reader = JobReader(job)
    assert reader.spent().seconds["startup"] == 10
    append(path, b"".join(LINES[2:]))
    assert reader.spent() == spent_of(job)
    assert reader.spent().seconds["recovery"] == 8


@pytest.mark.parametrize("change", ["truncated", "replaced", "removed"])
def test_a_replaced_file_is_read_from_its_beginning(change: str, job: Path) -> None:  # noqa: F811
    path = job / EVENTS_FILE
    reader = JobReader(job)
    assert reader.spent().seconds["recovery"] == 8
    if change == "truncated":
        path.write_bytes(b"".join(LINES[:2]))
    elif change == "replaced":
        other_path = path.with_name("other")
        other_path.write_bytes(b"".join([*LINES[:2], *LINES]))
        other_path.replace(path)
    else:
        path.unlink()
    assert reader.spent() == spent_of(job)
    assert reader.spent().seconds["recovery"] == (8 if change == "replaced" else 0)


def test_the_newest_events_are_read_from_the_end(job: Path) -> None:  # noqa: F811
    path = job / EVENTS_FILE
    events = [event(number, "written" * (number % 50), step=number) for number in range(3000)]
    data = b"".join(msgspec.json.encode(written_event) + b"\n" for written_event in events)
    assert len(data) > 3 * job_reader._BLOCK
    path.write_bytes(data + b'{"cut')
    for count in (1, 2, 700, 2999, 3000, 4000):
        assert newest_events(job, count) == events[-count:]
    path.write_bytes(b"")
    assert newest_events(job, 1) == []
    path.unlink()
    assert newest_events(job, 1) == []


def test_an_incident_is_read_again_when_its_file_has_changed(job: Path) -> None:  # noqa: F811
    reader = JobReader(job)
    assert [summary.steps_lost for summary in reader.summaries()] == [2]
    path = job / "incidents" / f"{incident().id}.json"
    path.write_bytes(msgspec.json.encode(incident(lost=12)))
    assert [summary.steps_lost for summary in reader.summaries()] == [12]
    (job / "incidents" / "2.json").write_bytes(msgspec.json.encode(incident(2)))
    path.unlink()
    assert [summary.incident for summary in reader.summaries()] == [2]


def test_unreadable_files_are_reported(job: Path) -> None:  # noqa: F811
    (job / EVENTS_FILE).unlink()
    (job / EVENTS_FILE).mkdir()
    with pytest.raises(JobFolderError, match=r"events\.jsonl: it cannot be read"):
        JobReader(job).spent()
    with pytest.raises(JobFolderError, match=r"events\.jsonl: it cannot be read"):
        newest_events(job, 1)

"""The page of a job: its content for a reader, made from files as ttprun writes them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from adaptor.launchers.cli import ttp
from adaptor.operations import page, timeline
from adaptor.operations.job_reader import CheckpointSummary, JobReader
from adaptor.protocol import records
from adaptor.protocol.records import Phases, utc
from tests.unit.test_serve import BEGAN, EVENTS, event, incident, status

JOB = "j"
CHECKPOINT = CheckpointSummary(16, BEGAN + 100, 3_000_000)


class Text(HTMLParser):
    """The text of a page, and the tags that would load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self._skips = False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._skips = tag in ("style", "script")
        # The icon is empty, and the script has its own test below.
        attribute_values = dict(attributes)
        places = [
            attribute_values[name] or "" for name in ("src", "href", "style") if name in attribute_values
        ]
        if tag in ("img", "iframe") or any(not place.startswith(("#", "data:,")) for place in places):
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        if not self._skips:
            self.words.append(data)

    def __str__(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def write(folder: Path, record: object, *, state: object = None) -> Path:
    (folder / JOB / "incidents").mkdir(parents=True)
    (folder / JOB / records.STATUS_FILE).write_bytes(msgspec.json.encode(state or status()))
    (folder / JOB / records.EVENTS_FILE).write_bytes(
        b"".join(msgspec.json.encode(event) + b"\n" for event in EVENTS)
    )
    if record is not None:
        (folder / JOB / "incidents" / "1.json").write_bytes(msgspec.json.encode(record))
    return folder / JOB


def html_of(job: Path) -> str:
    return page.Pages().page(JobReader(job), CHECKPOINT)


def test_the_figures_of_an_incident(tmp_path: Path) -> None:
    record = incident()
    record.events.append(event(50.6, "published", 8))
    record.phases = Phases(
        detect=0.02, freeze=0.03, write=0.4, publish=0.1, restart=2.0, load=5.0, first_step=1.5
    )
    text = str(Text(html_of(write(tmp_path, record))))
    assert "Rank 1 was ended by SIGKILL" in text
    assert "Detected after 20 ms" in text
    assert "Published after 600 ms step 8 is saved" in text
    assert "First step again after 9.5 s" in text
    assert "until the checkpoint has its name 600 ms" in text
    assert "until the verdict 400 ms" in text
    assert "Steps lost 2" in text
    assert "Goodput" in text


@pytest.mark.parametrize(
    ("holders", "text"),
    [(2, "Holders of each shard 2 at least: any one rank may be lost"), (1, "1 of some: if that rank dies")],
)
def test_holders_in_the_header(tmp_path: Path, holders: int, text: str) -> None:
    job_status = msgspec.structs.replace(status(), shard_holders=holders)
    assert text in str(Text(html_of(write(tmp_path, None, state=job_status))))


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("rank 1 was ended by SIGKILL; step 8 is saved", "Rank 1 was ended by SIGKILL"),
        ("ttprun was told to end by SIGTERM; step 8 is saved", "ttprun was told to end by SIGTERM"),
    ],
)
def test_the_cause_in_a_sentence(reason: str, sentence: str, tmp_path: Path) -> None:
    record = incident()
    record.reason = reason
    assert f'<h3 id="incident-{record.id}-title">{sentence}</h3>' in html_of(write(tmp_path, record))


def test_a_job_without_an_incident_and_without_a_step(tmp_path: Path) -> None:
    state = status(step=None, step_time=None, protected=False, why_not="no replica", incidents=0)
    text = str(Text(html_of(write(tmp_path, None, state=state))))
    assert "Newest finished step none" in text
    assert "NOT PROTECTED: no replica" in text
    assert "None." in text


def test_the_page_names_the_script_the_save_folder_and_the_newest_checkpoint(tmp_path: Path) -> None:
    job_status = status(time=utc(BEGAN + 160), script="/megatron/pretrain_gpt.py", save="/shared/run7")
    html = html_of(write(tmp_path, None, state=job_status))
    assert "<h1>pretrain_gpt.py</h1>" in html
    text = str(Text(html))
    assert f"Checkpoints in /shared/run7. Job {JOB}." in text
    assert "Newest checkpoint step 16 3.0 MB, 60.0 s before this was written" in text


def test_the_page_has_the_advice_of_the_runbook(tmp_path: Path) -> None:
    record = incident()
    record.runbook = "docs/runbook.md#signal"
    text = str(Text(html_of(write(tmp_path, record))))
    assert "What to do A process was ended by a signal (cause.signal)" in text
    assert "A process left with an exit code" not in text, "the next section"


def test_captions_end_with_their_lanes(tmp_path: Path) -> None:
    """The lanes of the save end with its scale; later events have lanes on the scale of the recovery."""
    record = incident()
    record.verdict, record.ended = "recovered", utc(BEGAN + 64)
    record.phases = Phases(detect=0.02, freeze=0.03, write=0.04, publish=0.01, first_step=0.5)
    record.events += [event(50.01, "freeze"), event(50.1, "published", 8), event(63.7, "joined")]
    text = str(Text(html_of(write(tmp_path, record))))
    save, recovery = re.split("The whole recovery: ", text)
    assert "told to stop 10 ms, checkpoint has its name 100 ms 0 " in save
    assert "has met the others" not in save
    assert "controller, agents has met the others 13.7 s 0 5 s 10 s 15 s" in recovery


def test_a_job_that_stopped_writing(tmp_path: Path) -> None:
    html = html_of(write(tmp_path, None, state=status(time=utc(BEGAN))))
    assert re.search(r'class="pill bad">silent for [\d.]+ h, last training', html)


def test_messages_of_a_job_are_escaped(tmp_path: Path) -> None:
    """An exception's message may hold anything, and the page may be sent to anybody."""
    record = incident()
    record.reason = record.next_action = "<script>alert(1)</script><img src=x>"
    record.events[0].data["detail"] = "<b onclick=x>"
    html = html_of(write(tmp_path, record, state=status(job="<i>", why_not="<u>", protected=False)))
    text = Text(html)
    assert text.loads == []
    assert html.count("<script>") == 1
    assert "<script>alert(1)</script><img src=x>" in str(text)


def test_an_incident_with_more_events_than_a_browser_takes(tmp_path: Path) -> None:
    record = incident()
    record.events *= page.MOST_EVENTS + 7
    html = html_of(write(tmp_path, record))
    assert html.count("<td>fault noticed</td>") == page.MOST_EVENTS
    assert "The other 7 are in incidents/" in html


def test_only_changed_pages_are_made_again(tmp_path: Path) -> None:
    job = write(tmp_path, incident())
    pages, reader = page.Pages(), JobReader(job)
    assert "Steps lost 2" in str(Text(pages.page(reader, None)))
    changed = incident(lost=12)
    changed.reason = "another reason"
    (job / "incidents" / "1.json").write_bytes(msgspec.json.encode(changed))
    text = str(Text(pages.page(reader, None)))
    assert ("Another reason" in text, "SIGKILL" in text, "Steps lost 12" in text) == (True, False, True)


def test_a_job_with_more_incidents_than_a_browser_takes(tmp_path: Path) -> None:
    job = write(tmp_path, None)
    for number in range(page.MOST_INCIDENTS + 7):
        record = incident(number)
        record.began = utc(BEGAN + number)
        record.reason = f"fault number {number}."
        (job / "incidents" / f"20260101T0000{number:02}Z-1.json").write_bytes(msgspec.json.encode(record))
    text = str(Text(html_of(job)))
    assert text.count("Fault number") == 2 * page.MOST_INCIDENTS, "in the list, and above its section"
    assert text.index("Fault number 26 ") < text.index("Fault number 7 ")
    assert "Fault number 6 " not in text
    assert "7 older ones:" in text


def test_ttp_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write(tmp_path / "logs", incident())
    assert ttp.main(["report", str(job.parent), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    second_file = tmp_path / "again.html"
    assert ttp.main(["report", str(job), "--json", "-o", str(second_file)]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(second_file), "job": "j"}
    assert ttp.main(["report", str(job), "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"ttp: error: {tmp_path}: the page of j cannot be written")


def test_a_browser_runs_this_script_and_takes_this_style(tmp_path: Path) -> None:
    html = html_of(write(tmp_path, None))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy.replace("&#39;", "'") == page.POLICY
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in page.POLICY


def test_stacks_that_were_written_meanwhile_are_in_the_page(tmp_path: Path) -> None:
    record = incident()
    record.silent = [3]
    job = write(tmp_path, record)
    for folder, rank, at in (("stacks-a", 0, 50.5), ("stacks-a", 3, 50.5), ("stacks-b", 1, 500.0)):
        file = tmp_path / folder / f"rank{rank}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"<stack> of {rank}")
        os.utime(file, (BEGAN + at, BEGAN + at))
    text = str(Text(html_of(job)))
    assert "Stacks of 2 ranks Rank 3: stacks-a/rank3.txt <stack> of 3 Rank 0: stacks-a/rank0.txt" in text
    assert "<stack> of 1" not in text


def test_only_involved_ranks_have_lanes(tmp_path: Path) -> None:
    record = incident()
    record.silent = [2]
    record.ranks = list(range(20))
    kinds = [("freeze", 50.01), ("frozen", 50.02)]
    record.events += [
        msgspec.structs.replace(event(at, kind), rank=rank) for rank in range(20) for kind, at in kinds
    ]
    record.events += [msgspec.structs.replace(event(50.03, "dump-ordered", 8), rank=19)]
    lanes, left_out = timeline.lanes_of(record, BEGAN + 50, 1.0)
    assert [(lane.name, lane.note) for lane in lanes[:5]] == [
        ("controller, agents", ""),
        ("rank 1", "blamed"),
        ("rank 2", "did not answer"),
        ("rank 19", "writes"),
        ("rank 0", ""),
    ]
    assert (len(lanes), left_out) == (timeline.MOST_LANES + 1, 20 - timeline.MOST_LANES)
    spans = [[(span.kind, round(span.begin, 3), round(span.end, 3)) for span in lane.spans] for lane in lanes]
    assert spans[1] == [("gone", 0.0, 1.0), ("stop", 0.01, 0.02)]
    assert spans[2] == [("silent", 0.01, 0.02)]
    assert spans[3] == [("stop", 0.01, 0.02), ("write", 0.03, 1.0)]
    assert [(word, round(at, 2)) for word, at in lanes[3].words] == [
        ("told to stop", 0.01),
        ("stopped", 0.02),
        ("told to write", 0.03),
    ]


@pytest.mark.parametrize(
    ("until", "ticks"),
    [(0.133, [0, 0.05, 0.1, 0.15]), (7.1, [0, 2, 4, 6, 8]), (5.0, [0, 1, 2, 3, 4, 5]), (0, [0, 1])],
)
def test_a_scale_has_round_numbers(until: float, ticks: list[float]) -> None:
    assert [round(at, 6) for at in timeline.scale(until)[1]] == ticks


@pytest.mark.parametrize(
    ("until", "labels"),
    [
        (0.133, ["0", "50 ms", "100 ms", "150 ms"]),
        (7.1, ["0", "2 s", "4 s", "6 s", "8 s"]),
        (172, ["0", "1 min", "2 min", "3 min"]),
        (9000, ["0", "0.5 h", "1 h", "1.5 h", "2 h", "2.5 h"]),
    ],
)
def test_a_scale_has_one_unit(until: float, labels: list[str]) -> None:
    assert timeline.tick_labels(timeline.scale(until)[1]) == labels


def test_the_history_of_a_job() -> None:
    changes = [(0.0, "startup"), (20.0, "training"), (60.0, "recovery"), (70.0, "training")]
    history = timeline.history_of(changes, 80.0)
    assert history is not None
    assert [round(history.ratios[at], 3) for at in (19, 39, 59, 79)] == [0, 0.5, 0.667, 0.625]
    assert [rect.kind for rect in history.rects] == ["load"] * 20 + ["first"] * 40 + ["write"] * 10 + [
        "first"
    ] * 10
    assert timeline.history_of([], 80.0) is None
    assert timeline.history_of(changes[:1], 1.0) is None

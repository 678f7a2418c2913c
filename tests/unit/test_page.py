"""The page of a job: what a person reads in it, of files as ttprun writes them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from adaptor.launchers import ttp
from adaptor.operations import job_folder, page
from adaptor.operations.job_reader import JobReader
from adaptor.operations.records import Phases, utc
from tests.unit.test_serve import BEGAN, EVENTS, incident, status

JOB = "j"


class Text(HTMLParser):
    """The text of a page, and the tags that would load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self._skips = False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._skips = tag == "style"
        if tag in ("script", "link", "img", "iframe") or any(
            name in ("src", "href") for name, _ in attributes
        ):
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        if not self._skips:
            self.words.append(data)

    def __str__(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def write(folder: Path, one: object, *, state: object = None) -> Path:
    (folder / JOB / "incidents").mkdir(parents=True)
    (folder / JOB / job_folder.STATUS_FILE).write_bytes(msgspec.json.encode(state or status()))
    (folder / JOB / job_folder.EVENTS_FILE).write_bytes(
        b"".join(msgspec.json.encode(event) + b"\n" for event in EVENTS)
    )
    if one is not None:
        (folder / JOB / "incidents" / "1.json").write_bytes(msgspec.json.encode(one))
    return folder / JOB


def html_of(job: Path) -> str:
    return page.Pages().page(JobReader(job))


def test_an_incident_in_figures(tmp_path: Path) -> None:
    one = incident()
    one.phases = Phases(
        detect=0.02, freeze=0.03, write=0.4, publish=0.1, restart=2.0, load=5.0, first_step=1.5
    )
    text = str(Text(html_of(write(tmp_path, one))))
    assert "rank 1 was ended by SIGKILL" in text
    assert "Noticed after 20 ms" in text
    assert "Verdict after 1.0 s" in text
    assert "First step again after 9.5 s" in text
    assert "other 450 ms" in text
    assert "Steps lost 2" in text
    assert "Goodput" in text


def test_a_job_without_an_incident_and_without_a_step(tmp_path: Path) -> None:
    state = status(step=None, step_time=None, protected=False, why_not="no replica", incidents=0)
    text = str(Text(html_of(write(tmp_path, None, state=state))))
    assert "Newest finished step none" in text
    assert "NOT PROTECTED: no replica" in text
    assert "None." in text


def test_a_job_that_writes_nothing_any_more(tmp_path: Path) -> None:
    html = html_of(write(tmp_path, None, state=status(time=utc(BEGAN))))
    assert re.search(r'class="bad">silent for [\d.]+ h, last training', html)


def test_what_a_job_says_is_text(tmp_path: Path) -> None:
    """An exception's words may be anything, and the page may be sent to anybody."""
    one = incident()
    one.reason = one.next_action = "<script>alert(1)</script><img src=x>"
    one.events[0].data["detail"] = "<b onclick=x>"
    made = Text(html_of(write(tmp_path, one, state=status(job="<i>", why_not="<u>", protected=False))))
    assert made.loads == []
    assert "<script>alert(1)</script><img src=x>" in str(made)


def test_an_incident_with_more_events_than_a_browser_takes(tmp_path: Path) -> None:
    one = incident()
    one.events *= page.MOST_EVENTS + 7
    html = html_of(write(tmp_path, one))
    assert html.count("fault noticed") == page.MOST_EVENTS
    assert "The other 7 are in incidents/" in html


def test_a_page_is_made_again_of_what_has_changed(tmp_path: Path) -> None:
    job = write(tmp_path, incident())
    pages, reader = page.Pages(), JobReader(job)
    assert "Steps lost 2" in str(Text(pages.page(reader)))
    changed = incident(lost=12)
    changed.reason = "another reason"
    (job / "incidents" / "1.json").write_bytes(msgspec.json.encode(changed))
    text = str(Text(pages.page(reader)))
    assert ("another reason" in text, "SIGKILL" in text, "Steps lost 12" in text) == (True, False, True)


def test_a_job_with_more_incidents_than_a_browser_takes(tmp_path: Path) -> None:
    job = write(tmp_path, None)
    for number in range(page.MOST_INCIDENTS + 7):
        one = incident(number)
        one.began = utc(BEGAN + number)
        one.reason = f"fault number {number}."
        (job / "incidents" / f"20260101T0000{number:02}Z-1.json").write_bytes(msgspec.json.encode(one))
    text = str(Text(html_of(job)))
    assert text.count("fault number") == page.MOST_INCIDENTS
    assert text.index("fault number 26.") < text.index("fault number 7.")
    assert "fault number 6." not in text
    assert "7 older ones:" in text


def test_ttp_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write(tmp_path / "logs", incident())
    assert ttp.main(["report", str(job.parent), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert ttp.main(["report", str(job), "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"ttp: error: {tmp_path}: the page of j cannot be written")

"""The page of a job in Debian's Chromium: no overflow, no requests, WCAG AA, filters, the live page."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptor.operations import access, serve
from adaptor.operations.settings import HostPort
from adaptor.protocol.records import Phases, utc
from tests import browser
from tests.unit.test_page import JOB, html_of, write
from tests.unit.test_serve import BEGAN, event, incident, status

pytestmark = pytest.mark.skipif(bool(browser.why_absent()), reason=browser.why_absent())

EVENTS = [
    event(50, "fault-noticed"),
    *(event(50.01, "freeze"), event(50.03, "frozen"), event(50.04, "dump-ordered", 8)),
    *(event(50.5, "written", 8), event(50.6, "published", 8), event(51, "verdict")),
]


@dataclass
class BrowserPage:
    """A page in the browser, with its requests and console messages."""

    page: Any
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as browser_context:
        yield browser_context


@pytest.fixture
def browser_page(context: Any) -> Iterator[BrowserPage]:
    opened = BrowserPage(context.new_page())
    opened.page.on("request", lambda request: opened.requests.append(request.url))
    opened.page.on("console", lambda message: opened.messages.append(message.text))
    opened.page.on("pageerror", lambda error: opened.messages.append(str(error)))
    yield opened
    opened.page.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with an incident of 12 ranks, long words and stacks."""
    record = incident()
    record.cause = msgspec.structs.replace(record.cause, kind="hang")
    record.reason = f"nothing has moved for 8 s: rank 1 {'stands_still.' * 20}; step 8 is saved"
    record.phases = Phases(
        detect=8, freeze=0.03, write=0.4, publish=0.1, restart=2.0, load=5.0, first_step=1.5
    )
    record.silent = [3]
    record.events = [
        msgspec.structs.replace(event, rank=rank, node=0, data={"detail": "x" * 300})
        for rank in range(12)
        for event in EVENTS
    ] + EVENTS
    job = write(tmp_path, record)
    stacks = tmp_path / "stacks-1234" / "rank1.txt"
    stacks.parent.mkdir()
    stacks.write_text("Thread 1 (main): " + "f < " * 500)
    os.utime(stacks, (BEGAN + 50, BEGAN + 50))
    return job


def test_a_page_in_both_schemes_and_widths(browser_page: BrowserPage, job: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_of(job))
    for scheme in browser.SCHEMES:
        for width in browser.WIDTHS:
            browser_page.page.emulate_media(color_scheme=scheme)
            browser_page.page.set_viewport_size({"width": width, "height": 900})
            browser_page.page.goto(file.as_uri())
            for summary in browser_page.page.locator("summary").all():
                summary.click()
            assert browser_page.page.evaluate("document.documentElement.scrollWidth") == width, (
                scheme,
                width,
            )
            lost = browser_page.page.locator(".incidents .number").bounding_box()
            assert lost["x"] + lost["width"] <= width, "steps lost are shown without scrolling"
            if (scheme, width) in (("light", 1280), ("dark", 390)):  # axe takes seconds
                assert browser.violations(browser_page.page) == [], (scheme, width)
    assert (set(browser_page.requests), browser_page.messages) == ({file.as_uri()}, [])
    assert "Thread 1 (main)" in browser_page.page.locator("details pre").inner_text()


def test_axe_finds_a_missing_language(browser_page: BrowserPage, job: Path, tmp_path: Path) -> None:
    """Show that an empty list of findings has a meaning."""
    file = tmp_path / "report.html"
    file.write_text(html_of(job).replace('<html lang="en">', "<html>"))
    browser_page.page.goto(file.as_uri())
    assert [line for line in browser.violations(browser_page.page) if line.startswith("html-has-lang")]


def test_events_are_filtered(browser_page: BrowserPage, job: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_of(job))
    browser_page.page.goto(file.as_uri())
    browser_page.page.locator("summary", has_text="events").click()
    rows = browser_page.page.locator(".events tbody tr:visible")
    assert rows.count() == 13 * len(EVENTS)
    browser_page.page.get_by_label("Where").select_option("rank 1")
    assert rows.count() == len(EVENTS)
    browser_page.page.get_by_label("What").select_option("written")
    assert rows.count() == 1
    assert browser_page.page.locator(".events output").inner_text() == f"1 of {13 * len(EVENTS)} events"
    browser_page.page.get_by_label("Text").fill("no such words")
    assert rows.count() == 0
    # Folds and filters print as on the screen; the input fields are not printed.
    browser_page.page.emulate_media(media="print")
    assert not browser_page.page.get_by_label("Where").is_visible()


def test_the_live_page_shows_new_content(
    browser_page: BrowserPage, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state changes; the filter of an incident with an unchanged file stays."""
    monkeypatch.setattr(serve, "_REFRESH_S", 1)
    address = HostPort("127.0.0.1", 0)
    listening = access.listen(address)
    origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with serve.Server(tmp_path, listening, access.clients(address, None, None)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            browser_page.page.goto(f"{origin}/")
            browser_page.page.locator("summary", has_text="events").click()
            browser_page.page.get_by_label("What").select_option("written")
            (job / "status.json").write_bytes(msgspec.json.encode(status(state="restarting")))
            second = incident(2)
            second.began = utc(BEGAN + 60)
            (job / "incidents" / "2.json").write_bytes(msgspec.json.encode(second))
            browser_page.page.locator(".pill", has_text="restarting").wait_for(timeout=120_000)
            browser_page.page.locator("#sections > section").nth(1).wait_for(timeout=120_000)
            first = browser_page.page.locator("#sections > section").nth(1)
            assert first.locator(".events tbody tr:visible").count() == 13
            assert browser_page.page.title() == f"{JOB}: restarting", "no script is known"
        finally:
            server.shutdown()
            thread.join()
    browser_page.page.locator("#late", has_text="This page is old").wait_for(timeout=120_000)
    assert {re.sub(r"/#.*", "/", url) for url in browser_page.requests} == {f"{origin}/"}
    assert [line for line in browser_page.messages if "ERR_CONNECTION_REFUSED" not in line] == []

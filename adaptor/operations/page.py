"""One page about a job, from its files: `ttp report`, and what `ttp serve` shows to a browser.

It has no script and asks nothing of any other place, so a file of it can be sent to anybody.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from adaptor.operations import job_folder
from adaptor.operations.job_reader import JobReader
from adaptor.operations.records import Event, Incident, Status, unix
from adaptor.operations.words import duration, protection

# More events of an incident than these are left to its file: with thousands of ranks a browser would stall.
MOST_EVENTS = 500
# So are more incidents than these, the newest ones.
MOST_INCIDENTS = 20
# By the part of an incident or the state of a job: the name of its colour in the template.
_COLOURS = {
    "detect": "detect",
    "freeze": "freeze",
    "write": "write",
    "publish": "publish",
    "regroup": "regroup",
    "restart": "restart",
    "load": "load",
    "first_step": "first",
    "other": "other",
    "to-the-verdict": "publish",
    "productive": "first",
    "wasted": "restart",
    "startup": "load",
    "recovery": "write",
    "down": "other",
}


class _Section(NamedTuple):
    """The part of the page about one incident, as HTML.

    order   of incidents: when it began, and its number
    action  what was done after it
    """

    order: tuple[str, int]
    action: str
    html: Markup


class Pages:
    """Makes pages; what they say of an incident is made again only when its file has changed."""

    def __init__(self) -> None:
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("adaptor.operations", ""),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
        )
        environment.globals.update(duration=duration, figure=_figure)
        self._page = environment.get_template("page.html.j2")
        self._incident = environment.get_template("incident.html.j2")
        self._sections: dict[str, tuple[tuple[int, int], _Section]] = {}
        self._lock = threading.Lock()

    def page(self, reader: JobReader, *, refresh_s: int = 0) -> str:
        """Return the page of a job, as HTML.

        Args:
            reader: of the job.
            refresh_s: after so many seconds a browser loads it again; 0: never.

        Raises:
            JobFolderError: the files of the job cannot be read.
        """
        status = reader.status()
        with self._lock:
            newest = self._newest_sections(reader.job)
        incidents = reader.summaries()
        silent_s = job_folder.silent_s(status)
        ended_badly = bool(newest) and newest[0].action.startswith("the job ends")
        bad = bool(silent_s) or status.protected is False or (status.state == "ended" and ended_badly)
        return self._page.render(
            status=status,
            state=f"silent for {duration(silent_s)}, last {status.state}" if silent_s else status.state,
            bad=bad,
            protection=protection(status),
            step_age=_step_age(status),
            spent=reader.spent(),
            incidents=len(incidents),
            sections=[section.html for section in newest],
            refresh_s=refresh_s,
            colours=_COLOURS,
        )

    def _newest_sections(self, job: Path) -> list[_Section]:
        """Return the sections of the newest incidents, the newest first."""
        there: dict[str, tuple[tuple[int, int], _Section]] = {}
        # By their names, which begin with the time and have no order among those of one second.
        for path in sorted((job / job_folder.INCIDENTS).glob("*.json"))[-2 * MOST_INCIDENTS :]:
            mark = job_folder.mark_of(path)
            if mark is not None:
                known = self._sections.get(str(path))
                there[str(path)] = known if known and known[0] == mark else (mark, self._section(path))
        self._sections = there
        found = sorted((section for _, section in there.values()), key=lambda one: one.order, reverse=True)
        return found[:MOST_INCIDENTS]

    def _section(self, path: Path) -> _Section:
        one = job_folder.read(path, Incident)
        html = self._incident.render(
            one=one,
            most=MOST_EVENTS,
            after=_after,
            saving=_saving,
            recovering=_recovering,
            until_verdict=_until_verdict,
            until_step=_until_step,
        )
        return _Section((one.began, one.incident), one.next_action, Markup(html))


def _figure(seconds: float | None) -> str:
    return "not known" if seconds is None else duration(seconds)


def _step_age(status: Status) -> str:
    if status.step_time is None:
        return ""
    return duration(max(0.0, unix(status.time) - unix(status.step_time)))


def _after(incident: Incident, event: Event) -> float:
    """Return the seconds from the notice of the fault; below 0 for what another node's clock has earlier."""
    return unix(event.time) - unix(incident.began)


def _until_verdict(incident: Incident) -> float:
    return max(0.0, unix(incident.ended) - unix(incident.began))


def _until_step(incident: Incident) -> float | None:
    """Return the seconds from the notice to the first step after it; None while there is none."""
    phases = incident.phases
    if phases.first_step is None:
        return None
    return _until_verdict(incident) + (phases.restart or 0.0) + (phases.load or 0.0) + phases.first_step


def _saving(incident: Incident) -> dict[str, float]:
    """Return the parts up to the verdict; what lies between them is `other`."""
    phases = incident.phases
    parts = {
        name: getattr(phases, name) or 0.0 for name in ("detect", "freeze", "write", "publish", "regroup")
    }
    if incident.cause.kind == "hang":
        parts["detect"] = 0.0  # the time in which nothing had moved: long before the notice
    parts["other"] = max(0.0, _until_verdict(incident) - sum(parts.values()))
    return parts


def _recovering(incident: Incident) -> dict[str, float]:
    phases = incident.phases
    return {
        "to the verdict": _until_verdict(incident),
        "restart": phases.restart or 0.0,
        "load": phases.load or 0.0,
        "first_step": phases.first_step or 0.0,
    }

"""One page about a job, from its files: `ttp report`, and what `ttp serve` shows to a browser.

It has no script and asks nothing of any other place, so a file of it can be sent to anybody.
"""

from __future__ import annotations

from pathlib import Path

import jinja2

from adaptor.operations import goodput, job_folder
from adaptor.operations.records import Event, Incident, Status, unix
from adaptor.operations.words import duration, protection

# More events of an incident than these are left to its file: with thousands of ranks a browser would stall.
MOST_EVENTS = 500
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


def page(job: Path, *, refresh_s: int = 0) -> str:
    """Return the page of a job, as HTML.

    Args:
        job: its folder.
        refresh_s: after so many seconds a browser loads it again; 0: never.

    Raises:
        JobFolderError: the files of the job cannot be read.
    """
    status = job_folder.status(job)
    incidents = job_folder.incidents(job)
    silent_s = job_folder.silent_s(status)
    bad = bool(silent_s) or status.protected is False or (status.state == "ended" and _ended_badly(incidents))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("adaptor.operations", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        status=status,
        state=f"silent for {duration(silent_s)}, last {status.state}" if silent_s else status.state,
        bad=bad,
        protection=protection(status),
        step_age=_step_age(status),
        spent=goodput.of_job(job, status, incidents),
        incidents=incidents[::-1],
        refresh_s=refresh_s,
        most=MOST_EVENTS,
        colours=_COLOURS,
        duration=duration,
        figure=lambda seconds: "not known" if seconds is None else duration(seconds),
        after=_after,
        saving=_saving,
        recovering=_recovering,
        until_verdict=_until_verdict,
        until_step=_until_step,
    )


def _ended_badly(incidents: list[Incident]) -> bool:
    return bool(incidents) and incidents[-1].next_action.startswith("the job ends")


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

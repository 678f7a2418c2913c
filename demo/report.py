"""The demo's report: the page of a job, with what the demo found out in place of the job's state."""

from __future__ import annotations

from pathlib import Path

import jinja2

from adaptor.operations import job_reader, page
from adaptor.operations.page import Section, section
from adaptor.protocol.records import IncidentRecord
from demo.findings import ONLINE, Findings, Survival
from demo.losses import curve, difference
from demo.runs import Run
from demo.training import SETTING


def write_page(path: Path, found: Findings, runs: list[Run], survivals: list[Survival]) -> None:
    """Write the page. It shows the table and the sentences that the demo also prints.

    Args:
        path: the file.
        found: what the demo found out.
        runs: all runs, the one without the adaptor first.
        survivals: the killed runs.
    """
    reference, *others = runs
    killed = survivals[0].run.kill
    assert killed is not None
    environment = page.environment(Path(__file__).parent)
    html = environment.get_template("report.html.j2").render(
        kept=found.kept,
        setting=SETTING,
        found=found,
        reference=reference.title,
        curve=curve(reference.steps),
        killed=killed.step(survivals[0].run.steps),
        differences=[difference(run.title, reference.steps, run.steps) for run in others],
        sections=[_section(one, environment) for one in survivals],
        refresh_s=0,
    )
    path.write_text(html, encoding="utf-8")


def _section(one: Survival, environment: jinja2.Environment) -> tuple[str, Section]:
    """Return the heading of a killed run, and the section of its incident."""
    assert one.run.kill is not None
    file = one.incident.path
    incident = job_reader.read(file, IncidentRecord)
    made = section(
        environment,
        incident,
        page.stacks_of(file.parents[2], incident),
        fault_at=one.run.kill.time,
        origin="the kill",
        name=one.run.folder.name,
    )
    return "Online recovery" if one.incident.verdict == ONLINE else "Save and restart", made

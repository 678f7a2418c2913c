"""The demo's report: the page of a job, with the demo's findings in place of the job's state."""

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


def write_page(path: Path, findings: Findings, runs: list[Run], survivals: list[Survival]) -> None:
    """Write the page, with the table and the sentences that the demo prints.

    Args:
        path: the file.
        findings: the findings of the demo.
        runs: all runs; the first is without the adaptor.
        survivals: the killed runs.
    """
    reference, *further_runs = runs
    killed = survivals[0].run.kill
    assert killed is not None
    environment = page.environment(Path(__file__).parent)
    html = environment.get_template("report.html.j2").render(
        kept=findings.kept,
        setting=SETTING,
        findings=findings,
        reference=reference.title,
        curve=curve(reference.steps),
        killed=killed.step(survivals[0].run.steps),
        differences=[difference(run.title, reference.steps, run.steps) for run in further_runs],
        sections=[_section(survival, environment) for survival in survivals],
        refresh_s=0,
    )
    path.write_text(html, encoding="utf-8")


def _section(survival: Survival, environment: jinja2.Environment) -> tuple[str, Section]:
    """Return the heading of a killed run, and the section of its incident."""
    assert survival.run.kill is not None
    file = survival.incident.path
    incident = job_reader.read(file, IncidentRecord)
    content = section(
        environment,
        incident,
        page.stacks_of(file.parents[2], incident),
        fault_at=survival.run.kill.time,
        origin="the kill",
        name=survival.run.folder.name,
    )
    return "Online recovery" if survival.incident.verdict == ONLINE else "Save and restart", content

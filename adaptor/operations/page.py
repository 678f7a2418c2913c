"""A page about a job, from its files: for `ttp report`, and for browsers of `ttp serve`.

A page is one file. It loads nothing from any other place, so it can be sent to anybody: its policy allows
this style and this script by their digests, and requests to the server of the page.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from adaptor.operations import charts, incident_section, job_folder, timeline
from adaptor.operations.incident_section import Section, section
from adaptor.operations.job_reader import CheckpointSummary, JobReader, protection
from adaptor.protocol import records
from adaptor.protocol.records import Incident, Status, unix
from adaptor.text import duration, size


def _text(name: str) -> str:
    return resources.files("adaptor.operations").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


_CSS, _SCRIPT = _text("page.css"), _text("page.js")
POLICY = (
    f"default-src 'none'; style-src {_digest(_CSS)}; script-src {_digest(_SCRIPT)}; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'"
)


def environment(*folders: Path) -> jinja2.Environment:
    """Return the environment of the templates of pages.

    Args:
        folders: with further templates; the templates of this package come first.
    """
    loaders: Sequence[jinja2.BaseLoader] = [
        jinja2.PackageLoader("adaptor.operations", ""),
        jinja2.FileSystemLoader(folders),
    ]
    jinja_environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja_environment.globals.update(
        css=Markup(_CSS),
        script=Markup(_SCRIPT),
        policy=POLICY,
        duration=duration,
        size=size,
        row=charts.row,
        scale_of=timeline.scale,
        tick_labels=timeline.tick_labels,
    )
    return jinja_environment


# The page has the newest incidents only; `ttp incidents` has all.
MOST_INCIDENTS = 20
_USED = {
    "first": ("productive", "productive"),
    "silent": ("data", "waiting for data"),
    "regroup": ("evaluation", "evaluation"),
    "publish": ("save", "regular saves"),
    "stop": ("other", "logs and other phases"),
    "gone": ("wasted", "for steps that were lost"),
    "load": ("startup", "startup"),
    "start": ("load", "loading a checkpoint"),
    "write": ("recovery", "recovery"),
    "other": ("down", "down"),
}


class Pages:
    """Makes pages; the section of an incident is made again only after a change of its file."""

    def __init__(self) -> None:
        self._environment = environment()
        self._sections: dict[str, tuple[tuple[int, int], Section]] = {}
        self._lock = threading.Lock()

    def page(self, reader: JobReader, checkpoint: CheckpointSummary | None, *, refresh_s: int = 0) -> str:
        """Return the page of a job, as HTML.

        Args:
            reader: of the job.
            checkpoint: the newest checkpoint of the job; None: unknown.
            refresh_s: the seconds after which a browser reloads the page; 0: never.

        Raises:
            JobFolderError: the files of the job cannot be read.
        """
        status = reader.status()
        with self._lock:
            newest = self._newest_sections(reader.job)
        silent_s = job_folder.silent_s(status)
        ended_badly = bool(newest) and newest[0].action.startswith("the job ends")
        bad = bool(silent_s) or status.protected is False or (status.state == "ended" and ended_badly)
        is_waiting = status.state in ("incident", "restarting", "starting")
        spent = reader.spent()
        return self._environment.get_template("job.html.j2").render(
            status=status,
            trained=Path(status.script).name,
            state=f"silent for {duration(silent_s)}, last {status.state}" if silent_s else status.state,
            colour="bad" if bad else "" if is_waiting else "good",
            protection=protection(status),
            step_age=_age(status, unix(status.step_time) if status.step_time else None),
            drill_age=_age(status, unix(status.drill_time) if status.drill_time else None),
            checkpoint=checkpoint,
            checkpoint_age=_age(status, checkpoint.at if checkpoint else None),
            spent=spent,
            used={colour: spent.seconds.get(state, 0.0) for colour, (state, _) in _USED.items()},
            used_words={colour: label for colour, (_, label) in _USED.items()},
            history=charts.history_of(reader.changes(), unix(status.time)),
            index=reader.summaries(),
            sections=newest,
            refresh_s=refresh_s,
        )

    def _newest_sections(self, job: Path) -> list[Section]:
        """Return the sections of the newest incidents, the newest first."""
        entries_by_path: dict[str, tuple[tuple[int, int], Section]] = {}
        # By their names, which begin with the time; incidents of the same second have no order.
        for path in sorted((job / records.INCIDENTS).glob("*.json"))[-2 * MOST_INCIDENTS :]:
            mark = job_folder.mark_of(path)
            if mark is not None:
                known_entry = self._sections.get(str(path))
                entries_by_path[str(path)] = (
                    known_entry if known_entry and known_entry[0] == mark else (mark, self._section(path))
                )
        self._sections = entries_by_path
        newest_sections = sorted(
            (entry for _, entry in entries_by_path.values()), key=lambda entry: entry.order, reverse=True
        )
        return newest_sections[:MOST_INCIDENTS]

    def _section(self, path: Path) -> Section:
        incident = job_folder.read(path, Incident)
        stacks = incident_section.stacks_of(path.parents[2], incident)
        return section(self._environment, incident, stacks)


def _age(status: Status, at: float | None) -> str:
    """Return the time from `at`, in Unix seconds, to the status; "" for None."""
    return "" if at is None else duration(max(0.0, unix(status.time) - at))

"""A page about a job, from its files: for `ttp report`, and for browsers of `ttp serve`.

A page is one file. It loads nothing from any other place, so it can be sent to anybody: its policy allows
this style and this script by their digests, and requests to the server of the page.

The section of an incident is made from its file and from the stacks in the log folder.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import threading
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from adaptor.operations import job_reader, timeline
from adaptor.operations.job_reader import CheckpointSummary, JobReader, first_step_again, protection
from adaptor.operations.timeline import Lane, Span
from adaptor.protocol import records
from adaptor.protocol.records import Event, IncidentRecord, Status, unix
from adaptor.text import duration, size

# The page has the newest incidents only; `ttp incidents` has all.
MOST_INCIDENTS = 20
# The uses of a job's time: by the colour, the name in `goodput` and the words.
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
# The page has the stacks of so many ranks, and so many bytes of each: thousands would stall a browser.
MOST_FILES = 8
MOST_BYTES = 16_384
# The largest expected difference between the clocks of a file server and a node.
_TOLERANCE_S = 5.0
_STACK_FILE = re.compile(r"rank(\d+)(?:\.native)?\.txt")
# The page has no more events of an incident: with thousands of ranks a browser would stall.
MOST_EVENTS = 500
# The event at time 0 of an incident, unless the caller knows the fault itself.
NOTICED = "the notice of the fault"
# The verdicts of incidents in words.
_VERDICTS = {
    "recovered": "recovered without a restart",
    "saved": "saved",
    "nothing": "nothing to save",
    "lost": "could not be saved",
}
# The kinds of a lane's spans, which are names of colours, and their words in the key.
_KINDS = {
    "gone": "no process",
    "silent": "does not answer",
    "stop": "stops",
    "write": "writes",
    "publish": "names the checkpoint",
    "start": "a new process starts",
    "regroup": "meets the others",
}
# The parts of a recovery, by their colours, in words.
_RECOVERY = {
    "write": "until the checkpoint has its name",
    "other": "until the verdict",
    "regroup": "new process, all meet again",
    "start": "restart of all processes",
    "load": "imports, model, data, checkpoint",
    "first": "first step",
}


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
        row=timeline.row,
        scale_of=timeline.scale,
        tick_labels=timeline.tick_labels,
    )
    return jinja_environment


class Pages:
    """Makes pages; the section of an incident is made again only after a change of its file."""

    def __init__(self) -> None:
        self._environment = environment()
        self._sections = job_reader.UnchangedFiles(self._section)
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
        silent_s = job_reader.silent_s(status)
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
            history=timeline.history_of(reader.changes(), unix(status.time)),
            index=reader.summaries(),
            sections=newest,
            refresh_s=refresh_s,
        )

    def _newest_sections(self, job: Path) -> list[Section]:
        """Return the sections of the newest incidents, the newest first."""
        # By their names, which begin with the time; incidents of the same second have no order.
        paths = sorted((job / records.INCIDENTS).glob("*.json"))[-2 * MOST_INCIDENTS :]
        sections = sorted(self._sections.of(paths), key=lambda section: section.order, reverse=True)
        return sections[:MOST_INCIDENTS]

    def _section(self, path: Path) -> Section:
        incident = job_reader.read(path, IncidentRecord)
        stacks = stacks_of(path.parents[2], incident)
        return section(self._environment, incident, stacks)


def _age(status: Status, at: float | None) -> str:
    """Return the time from `at`, in Unix seconds, to the status; "" for None."""
    return "" if at is None else duration(max(0.0, unix(status.time) - at))


class Stack(NamedTuple):
    """The content of a file of stacks: its path below the log folder, the rank, its first bytes as text."""

    path: str
    rank: int
    text: str


class Stacks(NamedTuple):
    """The stacks of an incident, of the ranks to blame first; `left_out` further files are in the folder."""

    shown: list[Stack]
    left_out: int


def stacks_of(log_path: Path, incident: IncidentRecord) -> Stacks:
    """Return the stacks written during the incident, none if unreadable: `stacks-*/rank<N>.txt` in the log
    folder.

    The file of an incident does not name the folder; the time of the files decides.
    """
    begin, end = unix(incident.began) - _TOLERANCE_S, unix(incident.ended) + _TOLERANCE_S
    stack_files: list[tuple[bool, int, Path]] = []
    suspects = {incident.blamed, *incident.failed, *incident.silent}
    try:
        for path in log_path.glob("stacks-*/rank*.txt"):
            name = _STACK_FILE.fullmatch(path.name)
            if name is not None and begin <= path.stat().st_mtime <= end:
                stack_files.append((int(name[1]) not in suspects, int(name[1]), path))
    except OSError:
        return Stacks([], 0)
    stack_files.sort()
    shown = [
        Stack(str(path.relative_to(log_path)), rank, _stack_text(path))
        for _, rank, path in stack_files[:MOST_FILES]
    ]
    return Stacks(shown, max(0, len(stack_files) - MOST_FILES))


def _stack_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            read = file.read(MOST_BYTES + 1)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    omission = "\n... the rest is in the file" if len(read) > MOST_BYTES else ""
    return read[:MOST_BYTES].decode(errors="replace") + omission


class Section(NamedTuple):
    """The part of a page about an incident, and its line in the list of incidents.

    Attributes:
        order: of incidents: the beginning and the number
        name: of the section in the page
    """

    order: tuple[str, int]
    name: str
    began: str
    cause: str
    verdict: str
    action: str
    again: str
    lost: str
    html: Markup


class LaneView(NamedTuple):
    """Lanes on one scale; `kinds` has the kinds of their spans with words for the key."""

    lanes: list[Lane]
    ticks: Sequence[float]
    kinds: dict[str, str]


def section(
    environment: jinja2.Environment,
    incident: IncidentRecord,
    stacks: Stacks,
    *,
    fault_at: float | None = None,
    origin: str = NOTICED,
    name: str = "",
) -> Section:
    """Return the section of an incident.

    Args:
        environment: of the page.
        incident: the incident.
        stacks: of the incident.
        fault_at: the time of the fault, in Unix seconds; by default of its notice.
        origin: the event at that time, in words.
        name: of the section in the page; by default the incident's id.
    """
    name = name or f"incident-{incident.id}"
    began = unix(incident.began)
    fault_at = began if fault_at is None else fault_at
    published = _published(incident, fault_at)
    verdict_s = max(0.0, unix(incident.ended) - fault_at)
    repeated_step = first_step_again(incident, fault_at)
    until = published if published is not None else verdict_s
    recovery = _recovery(incident, verdict_s, published)
    _, save_ticks = timeline.scale(until)
    _, recovery_ticks = timeline.scale(sum(recovery.values()))
    cause, further_sentence = _sentence(incident)
    lanes, left_out = timeline.lanes_of(incident, fault_at, verdict_s)
    recovery_lanes = [lane for lane in lanes if any(at > save_ticks[-1] for _, at in lane.words)]
    fields = {
        "one": incident,
        "name": name,
        "cause": cause,
        "more": further_sentence,
        "verdict": _VERDICTS.get(incident.verdict, incident.verdict),
        "detected": _detected(incident, fault_at),
        "published": published,
        "again": repeated_step,
        "origin": origin,
        "until": until,
        "save_view": _view(lanes, -math.inf, save_ticks),
        "left_out": left_out,
        "recovery": recovery,
        "recovery_view": _view(recovery_lanes, save_ticks[-1], recovery_ticks),
        "advice": _advice(incident),
        "recovery_words": _RECOVERY,
        "stacks": stacks,
        "most": MOST_EVENTS,
    }
    html = environment.get_template("incident.html.j2").render(
        **fields,
        figure=lambda seconds: "not known" if seconds is None else duration(seconds),
        after=_after,
        spans=_rects,
        seconds=lambda event: _since(event, fault_at),
        words=timeline.words_of,
    )
    mark = hashlib.sha256(html.encode(errors="replace")).hexdigest()[:16]  # compared by a live page
    return Section(
        order=(incident.began, incident.incident),
        name=name,
        began=incident.began[:19].replace("T", " "),
        cause=cause,
        verdict=incident.verdict,
        action=incident.next_action,
        again="" if repeated_step is None else duration(repeated_step),
        lost="not known" if incident.steps_lost is None else str(incident.steps_lost),
        html=Markup(html.replace('data-mark=""', f'data-mark="{mark}"', 1)),
    )


def _view(lanes: Sequence[Lane], begin: float, ticks: Sequence[float]) -> LaneView:
    """Return lanes as a chart with the scale of `ticks`.

    Args:
        lanes: of the incident.
        begin: events up to this time, in seconds, have no words.
        ticks: the scale; events behind its end have no words.
    """
    kinds = {span.kind for lane in lanes for span in lane.spans if span.begin <= ticks[-1]}
    shown = [
        lane._replace(words=[(word, at) for word, at in lane.words if begin < at <= ticks[-1]])
        for lane in lanes
    ]
    return LaneView(shown, ticks, {kind: word for kind, word in _KINDS.items() if kind in kinds})


def _advice(incident: IncidentRecord) -> str:
    """Return the section of the runbook on the cause of an incident, as text; "" without a section."""
    runbook = resources.files("adaptor.operations").joinpath("runbook.txt").read_text(encoding="utf-8")
    heading = incident.runbook.partition("#")[2]
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", runbook, re.MULTILINE | re.DOTALL)
    if section is None:
        return ""
    lines = re.sub(r"\n +|(?<!\n)\n(?!\n|- )", " ", section[1].strip())
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", lines).replace("`", "")


def _sentence(incident: IncidentRecord) -> tuple[str, str]:
    """Return the cause in one sentence, and the remaining sentences of the printed line."""
    cause, _, further_sentence = incident.reason.partition("; ")
    return _begin(cause) or "The cause is not known", _begin(further_sentence)


def _begin(sentence: str) -> str:
    """Return words with a capital first letter, except the name of a function and ttprun's."""
    sentence = sentence.strip().rstrip(".")
    return sentence if re.match(r"\S+ \(|ttprun\b", sentence) else sentence[:1].upper() + sentence[1:]


def _since(event: Event, fault_at: float) -> float:
    """Return the seconds from the fault; below 0 for an earlier time of another node's clock."""
    return unix(event.time) - fault_at


def _after(seconds: float) -> str:
    if abs(seconds) < 0.0005:
        return "0 ms"
    return duration(seconds) if seconds > 0 else f"-{duration(-seconds)}"


def _rects(spans: list[Span], until: float) -> list[timeline.Rect]:
    rects = (timeline.rect(span.kind, span.begin, span.end, until) for span in spans)
    return [rectangle for rectangle in rects if rectangle is not None]


def _detected(incident: IncidentRecord, fault_at: float) -> float | None:
    """Return the seconds until the first order; for a hang the seconds without any movement."""
    if incident.phases.detect is None or incident.cause.kind == "hang":
        return incident.phases.detect
    return max(0.0, unix(incident.began) - fault_at) + incident.phases.detect


def _published(incident: IncidentRecord, fault_at: float) -> float | None:
    """Return the seconds until the checkpoint had its name; None without a checkpoint."""
    at = [unix(event.time) for event in incident.events if event.type == "published"]
    return max(0.0, max(at) - fault_at) if at else None


def _recovery(incident: IncidentRecord, verdict_s: float, published: float | None) -> dict[str, float]:
    """Return the parts of the whole recovery, in their order."""
    phases = incident.phases
    saved = min(published or 0.0, verdict_s)
    return {
        "write": saved,
        "regroup" if incident.verdict == "recovered" else "other": verdict_s - saved,
        "start": phases.restart or 0.0,
        "load": phases.load or 0.0,
        "first": phases.first_step or 0.0,
    }

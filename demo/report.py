"""The demo's report: a page that stands alone, with the loss curves and the timelines of both incidents."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from adaptor.operations.records import unix
from demo.findings import ONLINE, Findings, Survival
from demo.records import Incident, Kill, Step
from demo.runs import RANKS
from demo.training import SETTING

PAGE = Path(__file__).with_name("report.html.in")
INK, FAINT, SAVING, KILL = "#1f2933", "#d3dae1", "#a9d8c3", "#c81e1e"
CURVES = (  # drawn in this order, each narrower than the one below it, so that equal curves all stay visible
    {"color": "#9cc3e6", "linewidth": 8.0, "solid_capstyle": "round"},
    {"color": "#1d6fb8", "linewidth": 4.5, "linestyle": (0, (3, 1.6))},
    {"color": "#8fd1a8", "linewidth": 2.6},
    {"color": "#e07b00", "linewidth": 1.0, "marker": "o", "markersize": 2.4},
)
EVENTS = {  # what happened to a rank: its mark and colour in the timeline
    "fault-noticed": ("X", KILL),
    "freeze": ("s", "#8a97a5"),
    "frozen": ("s", "#4b5b6b"),
    "through-the-door": ("^", "#7b4fb5"),
    "dump-ordered": (">", "#1d6fb8"),
    "prepare": ("<", "#1d6fb8"),
    "gathered": ("o", "#1d6fb8"),
    "written": ("D", "#0b8a5d"),
    "publish-ordered": (">", "#0b8a5d"),
    "published": ("*", "#0b8a5d"),
    "replace": ("<", "#7b4fb5"),
    "started": ("P", "#7b4fb5"),
    "regroup-ordered": (">", "#7b4fb5"),
    "joined": ("o", "#7b4fb5"),
    "recovered": ("*", "#0b8a5d"),
    "failed": ("v", KILL),
    "exit": ("4", INK),
    "verdict": ("P", INK),
}


@dataclass(frozen=True)
class Curve:
    title: str
    steps: list[Step]


def losses(steps: list[Step]) -> tuple[list[int], list[float]]:
    """The loss of each iteration, from the lowest rank that recorded it last."""
    kept: dict[int, Step] = {}
    for step in sorted(steps, key=lambda step: (step.restart, -step.rank)):
        kept[step.iteration] = step
    return sorted(kept), [kept[iteration].loss for iteration in sorted(kept)]


def loss_plot(curves: list[Curve], restart: Survival) -> str:
    """Draw the loss curves over each other, whole and around the kill; return an SVG data address."""
    kill, saved = restart.run.kill, restart.incident.saved_step
    assert kill is not None
    killed = kill.step(restart.run.steps)
    figure, (whole, near) = _figure(1, 2, size=(11.5, 4.3), width_ratios=[3, 2])
    for axes in (whole, near):
        for curve, style in zip(curves, CURVES, strict=True):
            axes.plot(*losses(curve.steps), label=curve.title, **style)
        axes.axvline(killed, color=KILL, linewidth=1.2, linestyle="--")
        axes.set_xlabel("iteration")
        axes.grid(color="#e9edf1")
    whole.set_ylabel("language-model loss")
    whole.set_title("The four runs, laid over each other", loc="left")
    whole.legend(frameon=False, loc="upper right")
    label = f"rank {kill.rank} killed in step {killed}"
    whole.annotate(
        label, (killed, 0.03), xycoords=("data", "axes fraction"), xytext=(-5, 0),
        textcoords="offset points", color=KILL, ha="right", fontsize=9,
    )  # fmt: skip
    _zoom(near, curves[0], killed)
    near.axvspan(saved + 0.5, killed + 8, color="#e07b00", alpha=0.07, linewidth=0)
    near.annotate(
        "after the recovery", (1, 0.03), xycoords="axes fraction", xytext=(-5, 0),
        textcoords="offset points", color="#b25e00", ha="right", fontsize=9,
    )  # fmt: skip
    near.set_title("Around the kill", loc="left")
    return _embed(figure)


def _zoom(axes: Any, curve: Curve, centre: int) -> None:
    iterations, values = losses(curve.steps)
    shown = [
        value for iteration, value in zip(iterations, values, strict=True) if abs(iteration - centre) <= 7
    ]
    margin = 0.12 * (max(shown) - min(shown) or 1.0)
    axes.set_xlim(centre - 7, centre + 7)
    axes.set_ylim(min(shown) - margin, max(shown) + margin)


def timeline_plot(incident: Incident, kill: Kill) -> str:
    """Draw what each rank did in the incident, in milliseconds from the kill; return an SVG data address."""
    figure, axes = _figure(1, 1, size=(11.5, 0.62 * (RANKS + 1) + 1.7))
    lanes: dict[int | None, int] = {None: 0} | {rank: rank + 1 for rank in range(RANKS)}
    moments = [
        (_milliseconds(unix(event["time"]), kill), lanes[event["rank"]], event["type"])
        for event in incident.events
    ]
    end = max((at for at, _, _ in moments), default=1.0)
    for rank, lane in lanes.items():
        at = {what: moment for moment, place, what in moments if place == lane}
        until = 0.0 if rank == kill.rank else at.get("exit", end)
        _bar(axes, lane, -0.06 * end, until, FAINT)
        if "started" in at:  # the process that took its place
            _bar(axes, lane, at["started"], end, FAINT)
        if "dump-ordered" in at:
            _bar(axes, lane, at["dump-ordered"], at.get("written", at.get("gathered", until)), SAVING)
    axes.plot(
        0, lanes[kill.rank], marker="X", color=KILL, markersize=12, linestyle="", label="SIGKILL", zorder=4
    )
    for what in dict.fromkeys(what for _, _, what in moments):
        mark, colour = EVENTS.get(what, (".", INK))
        axes.plot(
            [at for at, _, kind in moments if kind == what],
            [lane for _, lane, kind in moments if kind == what],
            linestyle="", marker=mark, color=colour, markersize=8, label=what, zorder=3,
        )  # fmt: skip
    axes.axvline(0, color=KILL, linewidth=1.0, linestyle="--", zorder=0)
    axes.set_yticks(list(lanes.values()), ["controller", *(f"rank {rank}" for rank in range(RANKS))])
    axes.invert_yaxis()
    axes.set_xlim(-0.06 * end, 1.03 * end)
    axes.set_ylim(RANKS + 0.6, -0.6)
    axes.set_xlabel("milliseconds from the kill")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e9edf1")
    axes.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(-0.01, 1.0), handletextpad=0.2)
    return _embed(figure)


def _bar(axes: Any, lane: int, begin: float, end: float, colour: str) -> None:
    axes.plot([begin, end], [lane, lane], color=colour, linewidth=8, solid_capstyle="butt", zorder=1)


def write_page(path: Path, found: Findings, curves: list[Curve], survivals: list[Survival]) -> None:
    """Write the page. It shows the table and the sentences that the demo also prints.

    Args:
        path: the file.
        found: what the demo found out.
        curves: of all runs.
        survivals: the killed runs; the last one has been started again.
    """
    text = Template(PAGE.read_text(encoding="utf-8")).substitute(
        headline="A killed process, and nothing lost"
        if found.kept
        else "A killed process, and something lost",
        setting=html.escape(SETTING),
        sentences="\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in found.sentences),
        rows=_table_rows(found.rows),
        losses=loss_plot(curves, survivals[-1]),
        incidents="\n".join(map(_incident, survivals)),
    )
    path.write_text(text, encoding="utf-8")


def _incident(one: Survival) -> str:
    """Return the part of the page that shows the incident of one run."""
    incident, kill = one.incident, one.run.kill
    assert kill is not None
    way = "Online recovery" if incident.verdict == ONLINE else "Save and restart"
    verdict = f"{incident.verdict}: {incident.reason}" if incident.reason else incident.verdict
    rows = _table_rows([_event_cells(event, kill) for event in incident.events])
    return f"""<h2>{way}, rank by rank</h2>
<p>{html.escape(verdict)}</p>
<img alt="Timeline of the incident" src="{timeline_plot(incident, kill)}">
<details><summary>Every event</summary>
<table class="events">
{rows}
</table>
</details>"""


def _event_cells(event: dict[str, Any], kill: Kill) -> tuple[str, ...]:
    who = "controller" if event["rank"] is None else f"rank {event['rank']}"
    about = f"step {event['step']}" if event["step"] is not None else event["data"].get("detail", "")
    return f"{_milliseconds(unix(event['time']), kill):+,.1f} ms", who, event["type"], about


def _milliseconds(moment: float, kill: Kill) -> float:
    return (moment - kill.time) * 1000.0


def _table_rows(rows: list[Any]) -> str:
    return "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )


def _figure(rows: int, columns: int, size: tuple[float, float], **grid: Any) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10.5,
        "font.size": 9.5,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns, gridspec_kw=grid)


def _embed(figure: Any) -> str:
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(image.getvalue()).decode()

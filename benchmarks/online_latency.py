"""Time from a fault to the next finished step: `python benchmarks/online_latency.py`.

Six ways take turns: an online recovery with a waiting spare process, and with a cold process; an exception
that replaces no process; and for each fault last words and a restart of all, with workers that are forks of a
spare process, or that import by themselves. The faulty process itself notes the time, right before its death
or exception; a step is finished when every rank has finished. A second table has the parts of each online
recovery, from the incident's timeline.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import Benchmark, argument_parser, spread, table
from _job import RANKS, Job, JobError, new_folder, run

from adaptor.protocol.records import unix
from tests.faults.fault import ONCE, Fault

PHASES = ("data", "forward", "backward", "reduction", "norm", "door-before", "update", "gather")
# An exception inside the update leaves a state of no step, and replaces the rank.
RAISES_IN = PHASES[:5]
GAP = 4
_START_S = 200.0


@dataclass(frozen=True)
class Way:
    """A kind of fault, and the way of the recovery.

    target_s  of the median; None: the way is the reference
    """

    kind: str
    options: tuple[str, ...]
    target_s: float | None

    @property
    def is_online(self) -> bool:
        return "--ttp-online" in self.options


WAYS: Mapping[str, Way] = {
    "SIGKILL, a spare waits": Way("sigkill-beside-a-spare", ("--ttp-online", "60", "--ttp-spares", "1"), 0.4),
    "SIGKILL, cold process": Way("sigkill", ("--ttp-online", "60", "--ttp-spares", "0"), 2.5),
    "SIGKILL, restart of all, a spare waits": Way("sigkill-beside-a-spare", ("--ttp-spares", "1"), 3.0),
    "SIGKILL, restart of all": Way("sigkill", ("--ttp-spares", "0"), None),
    "exception, step made again": Way("exception", ("--ttp-online", "60", "--ttp-spares", "0"), 0.3),
    "exception, restart of all": Way("exception", ("--ttp-spares", "0"), None),
}


# The parts of an online recovery: what has happened (to all ranks) when a part is over.
PARTS = {
    "noticed": ("fault-noticed",),
    "survivors asked": ("frozen",),
    "process gone": ("died",),
    "process in its place": ("started",),
    "all joined": ("joined",),
    "all told to go on": ("recovered",),
}


def schedule(way: Way, count: int, source: random.Random) -> list[Fault]:
    """Draw a fault for each recovery: every rank makes some steps before the next."""
    phases = RAISES_IN if way.kind == "exception" else PHASES
    return [
        Fault(
            source.randrange(RANKS),
            source.choice(phases),
            way.kind,
            step=GAP * (number + 1),
            restart=ONCE if way.is_online else number,
        )
        for number in range(count)
    ]


def measure(folder: Path, way: Way, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Run a job; return the seconds from each fault to the next finished step."""
    job = Job(
        folder,
        adaptor=True,
        train_iters=GAP * (len(faults) + 1),
        launcher=[*way.options, "--max-restarts", str(len(faults))],
        faults=faults,
        # Keep the indices of data sets, as the framework does for real data sets, but not for mock data.
        extra=["--data-cache-path", str(folder / "cache")],
    )
    with job:
        code = job.wait(_START_S * (len(faults) + 1))
    struck, incidents = job.struck(), job.incidents()
    verdicts = {incident["verdict"] for incident in incidents}
    if code != 0 or not len(struck) == len(incidents) == len(faults):
        raise JobError(f"{len(struck)} faults, {len(incidents)} incidents, exit code {code}: see {job.log}")
    if verdicts != {"recovered" if way.is_online else "saved"}:
        raise JobError(f"the verdicts are {', '.join(sorted(verdicts))}: see {job.log}")
    recoveries = []
    for stamp, incident in zip(struck, incidents, strict=True):
        decided = max(unix(event["time"]) for event in incident["events"])
        finished = max(
            min(line["time"] for line in lines if line["time"] > decided) for lines in job.records().values()
        )
        recoveries.append(
            {
                "rank": stamp["rank"],
                "phase": stamp["phase"],
                "decided": decided - stamp["time"],
                "finished": finished - stamp["time"],
                "parts": parts(incident, stamp["rank"], stamp["time"]) if way.is_online else {},
            }
        )
    return recoveries


def parts(incident: Mapping[str, Any], rank: int, struck: float) -> dict[str, float]:
    """Return the seconds from the fault to the end of each part of this recovery."""
    seconds = {}
    for name, kinds in PARTS.items():
        # Survivors raise when their collectives break, which counts as noticed as well.
        is_of_rank = name in ("noticed", "process gone")
        moments = [
            unix(event["time"])
            for event in incident["events"]
            if event["type"] in kinds and (event["rank"] == rank or not is_of_rank)
        ]
        if moments:
            seconds[name] = max(moments) - struck
    survivors = [
        unix(event["time"])
        for event in incident["events"]
        if event["type"] == "joined" and event["rank"] != rank
    ]
    if survivors and "process in its place" in seconds:
        seconds["survivors joined"] = max(survivors) - struck
    return seconds


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each way, in turns")
    parser.add_argument("--faults", type=int, default=5, help="in each job")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seed", type=int, default=1, help="of ranks and phases")
    options = parser.parse_args()
    benchmark = Benchmark("online_latency", {"rounds": options.rounds, "faults": options.faults})
    source = random.Random(options.seed)
    folder = new_folder("online_latency")
    lines_by_way: dict[str, list[dict[str, Any]]] = {name: [] for name in options.ways}
    for number in range(options.rounds):
        for name in options.ways:
            print(f"round {number + 1} of {options.rounds}: {name}", flush=True)
            place = folder / f"{number}-{len(list(folder.iterdir()))}"
            lines_by_way[name] += measure(place, WAYS[name], schedule(WAYS[name], options.faults, source))
    shutil.rmtree(folder)

    rows, findings = [], {}
    for name, lines in lines_by_way.items():
        times = {moment: spread([line[moment] for line in lines]) for moment in ("decided", "finished")}
        median, target = times["finished"]["median"], WAYS[name].target_s
        rows.append(
            [
                name,
                *(f"{t['median']:.2f} ({t['min']:.2f} to {t['max']:.2f})" for t in times.values()),
                int(times["finished"]["n"]),
                "–" if target is None else f"≤ {target:g}: {'reached' if median <= target else 'MISSED'}",
            ]
        )
        findings[name] = {"times": times, "incidents": lines}
    head = ["seconds after the fault, median (range)", "decided", "next step finished", "faults", "target"]
    tables = [table(head, rows), _table_of_parts(lines_by_way)]
    benchmark.finish("\n\n".join(tables), {"ways": findings})


def _table_of_parts(lines_by_way: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    names = [name for name in lines_by_way if WAYS[name].is_online]
    rows = []
    for part in (*list(PARTS)[:4], "survivors joined", *list(PARTS)[4:], "next step finished"):
        cells = []
        for name in names:
            times = [
                line["finished"] if part == "next step finished" else line["parts"].get(part)
                for line in lines_by_way[name]
            ]
            known_times = [time for time in times if time is not None]
            median = spread(known_times)["median"] if known_times else None
            cells.append("–" if median is None else f"{median * 1000:.0f}")
        rows.append([part, *cells])
    return table(["milliseconds after the fault, median", *names], rows)


if __name__ == "__main__":
    run(main)

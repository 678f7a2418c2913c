"""Time from a fault until the survivors begin to save: `python benchmarks/latency.py`.

A job per kind of fault, with a fault in every generation of its workers, each in another phase of the step.
The faulty process itself notes the time, right before its death or exception. `ordered` is the time of the
first order to save; `saving` is the time at which the last survivor begins to send or write, measured in the
survivors: the figure of this benchmark.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _bench import Benchmark, argument_parser, spread, table
from _job import RANKS, Job, JobError, first, last, new_folder, run

from tests.faults.fault import Fault

TARGET_S = 0.2
# kind: how the injector calls it, and the ranks that it may take
KINDS = {
    "SIGKILL": ("sigkill", range(1, RANKS)),
    "exception": ("exception", range(RANKS)),
    "SIGKILL of rank 0": ("sigkill", range(1)),
}
PHASES = ("data", "forward", "backward", "reduction", "norm", "door-before", "update", "gather")
STAGES = ("noticed", "frozen", "ordered", "saving", "published")
_START_S = 120.0


def schedule(kind: str, repeats: int, source: random.Random) -> list[Fault]:
    """Return a fault for each start of the workers, at least two steps after the start."""
    name, ranks = KINDS[kind]
    phases = [PHASES[number % len(PHASES)] for number in range(repeats)]
    source.shuffle(phases)
    return [
        Fault(rank=source.choice(ranks), phase=phase, kind=name, step=3 * number + 3, restart=number)
        for number, phase in enumerate(phases)
    ]


def stages(
    stamp: Mapping[str, Any], incident: Mapping[str, Any], watched: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Seconds from a fault to each stage of its incident."""
    published = first(incident, "published")
    saving_times = [
        line["began"]
        for line in watched
        if line["what"] == "dump" and stamp["time"] < line["began"] < published
    ]
    times = {
        "noticed": first(incident, "fault-noticed"),
        "frozen": last(incident, "frozen"),
        "ordered": first(incident, "dump-ordered"),
        "saving": max(saving_times),
        "published": published,
    }
    return {stage: moment - stamp["time"] for stage, moment in times.items()}


def measure(folder: Path, kind: str, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Run the job of one kind; a line per incident."""
    job = Job(
        folder,
        adaptor=True,
        train_iters=3 * len(faults) + 2,
        launcher=["--max-restarts", str(len(faults))],
        watch=True,
        faults=faults,
    )
    with job:
        code = job.wait(_START_S * (len(faults) + 1))
    struck, incidents, watched = job.struck(), job.incidents(), job.watched()
    if code != 0 or not len(struck) == len(incidents) == len(faults):
        raise JobError(
            f"{len(struck)} faults, {len(incidents)} incidents of {len(faults)}, exit code {code}: "
            f"see {job.log}"
        )
    for incident in incidents:
        if incident["verdict"] != "saved":
            raise JobError(f"incident {incident['incident']}: {incident['reason']}: see {job.log}")
    return [
        {"rank": stamp["rank"], "phase": stamp["phase"], **stages(stamp, incident, watched)}
        for stamp, incident in zip(struck, incidents, strict=True)
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=1, help="of ranks and phases")
    options = parser.parse_args()
    benchmark = Benchmark("latency", {"repeats": options.repeats, "seed": options.seed})
    source = random.Random(options.seed)
    folder = new_folder("latency")
    figures = {}
    for number, kind in enumerate(options.kinds):
        print(f"{kind}: {options.repeats} faults", flush=True)
        figures[kind] = measure(folder / str(number), kind, schedule(kind, options.repeats, source))
    shutil.rmtree(folder)

    rows, findings = [], {}
    for kind, incidents in figures.items():
        times = {stage: spread([line[stage] for line in incidents]) for stage in STAGES}
        median = times["saving"]["median"]
        verdict = "reached" if median <= TARGET_S else "MISSED"
        rows.append(
            [
                kind,
                *(f"{1000 * times[s]['median']:.0f} / {1000 * times[s]['max']:.0f}" for s in STAGES),
                verdict,
            ]
        )
        findings[kind] = {"stages": times, "incidents": incidents, "reached": median <= TARGET_S}
    benchmark.finish(
        table(["ms after the fault (median / max)", *STAGES, f"saving ≤ {1000 * TARGET_S:g} ms"], rows),
        {"kinds": findings, "target_s": TARGET_S},
    )


if __name__ == "__main__":
    run(main)

"""Fault to published checkpoint, against the framework's own save of the same state: `python
benchmarks/save_cost.py`.

One job per model. Every generation of its workers makes two steps, saves with the framework's own
`save_checkpoint` (its unpatched body, to another folder), and loses a rank to SIGKILL in the next step: last
words then have the same state as that save, and both times are of the same minute. `durable` is the
framework's save with a `sync`: the framework leaves the writing to the kernel, last words are on disk when
they are published. `dd` is the limit of the disk: `dd conv=fsync` writes as many bytes, by as many processes
as hold the state.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _bench import Benchmark, argument_parser, spread, table
from _job import RANKS, Job, JobError, first, last, model, new_folder, run

from adaptor.checkpoint.tracker import tracked_step
from tests.faults.fault import Fault

TARGET = 1.5
# name: layers, hidden size, sequence
MODELS = {"small": (2, 64, 32), "large": (6, 1024, 32)}
_START_S = 180.0
# Of a dump on the rank that writes.
PARTS = ("connect", "gather", "cast", "rebuild", "write", "fsync")


def saved_steps(phase: str) -> int:
    """Return the steps of last words among the three steps of each start."""
    return 3 if phase.startswith("door") else 2  # the survivors finish the step whose update they wait for


def faults(repeats: int, phase: str) -> list[Fault]:
    """Return a fault for each start of the workers, in the third step of the start; the ranks take turns."""
    return [
        Fault(
            rank=number % RANKS,
            phase=phase,
            kind="sigkill",
            step=saved_steps(phase) * number + 3,
            restart=number,
        )
        for number in range(repeats)
    ]


def keep_the_newest(save: Path) -> None:
    """Remove older checkpoints: the large model's are a gigabyte each."""
    newest = tracked_step(save)
    for folder in save.glob("iter_*"):
        if newest is not None and folder.name[5:].isdigit() and int(folder.name[5:]) < newest:
            shutil.rmtree(folder, ignore_errors=True)


def timeline(
    stamp: Mapping[str, Any], incident: Mapping[str, Any], watched: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the seconds of each part of one incident, in the order of the parts."""
    noticed, frozen = first(incident, "fault-noticed"), last(incident, "frozen")
    ordered, written = first(incident, "dump-ordered"), last(incident, "written")
    published = first(incident, "published")
    (writer,) = {event["rank"] for event in incident["events"] if event["type"] == "written"}
    parts = {
        part: sum(
            line["seconds"]
            for line in watched
            if line["what"] == part and line["rank"] == writer and ordered <= line["time"] <= published
        )
        for part in PARTS
    }
    stages = {
        "notice": noticed - stamp["time"],
        "freeze": frozen - noticed,
        "plan, folder": ordered - frozen,
        **parts,
        "rest of the dump": written - ordered - sum(parts.values()),
        "publish": published - written,
    }
    return {**stages, "fault to published": published - stamp["time"]}


def measure(folder: Path, name: str, repeats: int, phase: str, checkpoint_format: str) -> dict[str, Any]:
    """Run the job of one model."""
    layers, hidden, sequence = MODELS[name]
    job = Job(
        folder,
        adaptor=True,
        train_iters=saved_steps(phase) * repeats + 1,
        extra=[
            *model(layers, hidden, sequence),
            *("--ckpt-format", checkpoint_format),
            *("--distributed-timeout-minutes", "5"),
        ],
        launcher=["--max-restarts", str(repeats)],
        watch=True,
        native=True,
        faults=faults(repeats, phase),
        # An incident of the large model writes a gigabyte on a disk that may be slow.
        environment={"TTP_OT": "300"},
    )
    reported = 0

    def tick() -> None:
        nonlocal reported
        keep_the_newest(job.save)
        incidents = len(list(job.logs.glob("*/incidents/*.json")))
        if incidents > reported:
            reported = incidents
            print(f"  {name}: incident {reported} of {repeats}", flush=True)

    with job:
        code = job.wait(_START_S * (repeats + 2), tick)
    if code != 0:
        raise JobError(f"the job ended with exit code {code}: see {job.log}")
    struck, incidents, watched = job.struck(), job.incidents(), job.watched()
    if not len(struck) == len(incidents) == repeats:
        raise JobError(f"{len(struck)} faults, {len(incidents)} incidents of {repeats}: see {job.log}")
    for incident in incidents:
        if incident["verdict"] != "saved":
            raise JobError(f"incident {incident['incident']}: {incident['reason']}: see {job.log}")
    lines = [timeline(*pair, watched) for pair in zip(struck, incidents, strict=True)]
    reference_lines = {
        kind: {line["restart"]: line for line in watched if line["what"] == kind}
        for kind in ("native", "durable", "dd")
    }
    return {
        "lines": lines,
        "native": [reference_lines["native"][number]["seconds"] for number in range(repeats)],
        "durable": [reference_lines["durable"][number]["seconds"] for number in range(repeats)],
        "dd": [reference_lines["dd"][number]["seconds"] for number in range(repeats)],
        "bytes": reference_lines["native"][0]["bytes"],
        "extra": sorted(line["extra"] for line in watched if line["what"] == "dump"),
        "above_step": sorted(line["above_step"] for line in watched if line["what"] == "dump"),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=8, help="incidents of each model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--phase",
        default="backward",
        help="of the faults; with door-before the main threads wait, and use no memory beside the dump",
    )
    parser.add_argument("--format", choices=("torch", "torch_dist"), default="torch")
    options = parser.parse_args()
    settings = {"repeats": options.repeats, "phase": options.phase, "format": options.format}
    benchmark = Benchmark("save_cost", {**settings, **{m: MODELS[m] for m in options.models}})
    folder = new_folder("save_cost")
    measured_models = {
        name: measure(folder / name, name, options.repeats, options.phase, options.format)
        for name in options.models
    }
    shutil.rmtree(folder)

    rows, text, findings = [], [], {}
    for name, figures in measured_models.items():
        published = [line["fault to published"] for line in figures["lines"]]
        ratio, durable, of_dd = (
            statistics.median(w / o for w, o in zip(published, figures[kind], strict=True))
            for kind in ("native", "durable", "dd")
        )
        measured = (figures["native"], figures["durable"], figures["dd"], published)
        times = [f"{statistics.median(values):.3f}" for values in measured]
        size = f"{figures['bytes'] / 2**20:.1f}"
        verdict = "reached" if ratio <= TARGET else "MISSED"
        rows.append([name, size, *times, f"{ratio:.2f}", f"{durable:.2f}", f"{of_dd:.2f}", verdict])
        findings[name] = {
            **figures,
            "ratio": ratio,
            "ratio_durable": durable,
            "ratio_dd": of_dd,
            "dd_spread": spread(figures["dd"]),
            "fault_to_published": spread(published),
            "reached": ratio <= TARGET,
        }
    head = ["median, s", "MiB", "native", "durable", "dd", "fault to published"]
    head += ["/ native", "/ durable", "/ dd"]
    text.append(table([*head, f"≤ {TARGET:g} × native"], rows))
    stages = list(next(iter(measured_models.values()))["lines"][0])
    text.append(
        table(
            ["median, ms", *measured_models],
            [
                [
                    stage,
                    *(
                        f"{1000 * statistics.median(line[stage] for line in figures['lines']):.1f}"
                        for figures in measured_models.values()
                    ),
                ]
                for stage in stages
            ],
        )
    )
    text += [
        f"{name}: dd took {min(job['dd']):.2f} to {max(job['dd']):.2f} s; the peak of a process in a dump was"
        f" {statistics.median(job['extra']) / 2**20:.0f} MiB over what it had before,"
        f" {job['extra'][-1] / 2**20:.0f} MiB at most (its main thread may be in the backward pass), and"
        f" {job['above_step'][-1] / 2**20:.0f} MiB at most over the peak of the last step before the fault"
        for name, job in measured_models.items()
    ]
    benchmark.finish("\n\n".join(text), {"models": findings, "target": TARGET})


if __name__ == "__main__":
    run(main)

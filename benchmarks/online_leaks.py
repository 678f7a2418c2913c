"""What online recoveries leave behind: `python benchmarks/online_leaks.py`.

One job is struck by eleven faults, some steps apart: ten are recovered online, the eleventh ends in last
words and a restart, because a process may exchange the backends of its groups ten times. Rank 0 survives all
of them. After 0, 1, 2, 5 and 10 recoveries it writes down what it holds, and so does `ttprun`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _holdings
from _bench import Benchmark, table
from _job import Job, JobError, new_folder, run

from adaptor.online.groups import MOST_EXCHANGES
from tests.faults.fault import ONCE, Fault

GAP = 8
# Steps after a fault: time for the spare to be ready, and for what is let go of to be gone.
SETTLED = 6
SHOWN = (0, 1, 2, 5, MOST_EXCHANGES)
COLUMNS = ("MiB", "tensors", "tensors_MiB", "threads", "descriptors", "sockets")
_LIMIT_S = 1200.0
WAYS = {
    "SIGKILL": ("sigkill", (1, 2, 3)),
    "exception": ("exception", (0, 1, 2, 3)),
}


def faults(kind: str, ranks: Sequence[int]) -> list[Fault]:
    """One more than are recovered online, each on the next of `ranks`."""
    return [
        Fault(ranks[number % len(ranks)], "backward", kind, step=GAP * (number + 1), restart=ONCE)
        for number in range(MOST_EXCHANGES + 1)
    ]


def measure(folder: Path, kind: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Run a job; return what rank 0 and ttprun held, by the number of recoveries before."""
    drawn = faults(kind, ranks)
    job = Job(
        folder,
        adaptor=True,
        train_iters=GAP * (len(drawn) + 1),
        launcher=["--ttp-online", "60", "--ttp-spares", "1", "--max-restarts", "1"],
        faults=drawn,
        holds=f"{GAP},{SETTLED}",
    )
    agent: dict[int, dict[str, float]] = {}
    with job:
        code = job.wait(_LIMIT_S, _watcher(job, agent))
    incidents = job.incidents()
    verdicts = [incident["verdict"] for incident in incidents]
    if code != 0 or verdicts != ["recovered"] * MOST_EXCHANGES + ["saved"]:
        raise JobError(f"exit code {code}, the verdicts are {', '.join(verdicts)}: see {job.log}")
    said = incidents[-1]["reason"]
    if f"{MOST_EXCHANGES} faults were recovered online" not in said:
        raise JobError(f"the last incident says {said!r}: see {job.log}")
    worker = {
        line["step"] // GAP: line
        for line in job.watched()
        if line["what"] == "holds" and line["rank"] == 0 and line["restart"] == 0
    }
    return {"worker": worker, "agent": agent, "last": said}


def _watcher(job: Job, held: dict[int, dict[str, float]]) -> Callable[[], None]:
    """What is called while the job runs: the newest sample of rank 0 says how many recoveries there were."""

    def look() -> None:
        done = sum(line["rank"] == 0 and line["restart"] == 0 for line in job.watched())
        if done and done - 1 not in held and job.returncode is None:
            shared = sum(1 for _ in Path("/dev/shm").iterdir())
            held[done - 1] = {**_holdings.of_process(job.launcher), "shm": shared}

    return look


def rows(found: dict[str, Any], who: str, columns: Sequence[str]) -> list[list[str]]:
    """Return a row for each of the numbers of recoveries that are shown."""
    return [
        [str(count), *(f"{found[who][count][name]:.4g}" for name in columns)]
        for count in SHOWN
        if count in found[who]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    benchmark = Benchmark("online_leaks", {"recoveries": MOST_EXCHANGES})
    folder = new_folder("online_leaks")
    found = {name: measure(folder / str(number), *WAYS[name]) for number, name in enumerate(given.ways)}
    shutil.rmtree(folder)
    parts = []
    for name, one in found.items():
        parts += [
            f"{name}, a worker that survives all",
            table(["recoveries", *COLUMNS], rows(one, "worker", COLUMNS)),
            f"{name}, ttprun (shm: entries of /dev/shm)",
            table(
                ["recoveries", *COLUMNS[:1], *COLUMNS[3:], "shm"],
                rows(one, "agent", ("MiB", *COLUMNS[3:], "shm")),
            ),
        ]
    benchmark.finish("\n\n".join(parts), {"ways": found})


if __name__ == "__main__":
    run(main)

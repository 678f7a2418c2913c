"""Resources left behind by online recoveries: `python benchmarks/online_leaks.py`.

One job gets many faults, some steps apart, and rank 0 survives all of them. Every loss and grad norm is
compared bit for bit with an undisturbed run of the unmodified framework. After some of the recoveries rank 0
and `ttprun` record their resources.

Before torch 2.14 a process may exchange the backends of its groups ten times: the eleventh fault ends in last
words and a restart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _holdings
from _bench import Benchmark, argument_parser, table
from _job import Job, JobError, new_folder, run
from _online import differences
from torch.distributed import ProcessGroupGloo

from adaptor.online.groups import MOST_EXCHANGES
from tests.faults.fault import ONCE, Fault

GAP = 8
# Steps after a fault: time for the spare to be ready, and for what is let go of to be gone.
SETTLED = 6
SHOWN = (0, 1, 2, 5, 10, 20, 50, 100)
COLUMNS = ("MiB", "tensors", "tensors_MiB", "threads", "descriptors", "sockets")
_LIMIT_S = 1200.0
# By the name of a fault: its kind, and the first of the ranks that it strikes.
WAYS = {"SIGKILL": ("sigkill", 1), "exception": ("exception", 0)}
UNLIMITED = hasattr(ProcessGroupGloo, "get_reconfigure_handle")


def faults(kind: str, ranks: Sequence[int], count: int) -> list[Fault]:
    """`count` faults, each on the next of `ranks`."""
    return [
        Fault(ranks[number % len(ranks)], "backward", kind, step=GAP * (number + 1), restart=ONCE)
        for number in range(count)
    ]


def measure(folder: Path, kind: str, ranks: range, recoveries: int) -> dict[str, Any]:
    """Run a job; return what rank 0 and ttprun held, by the number of recoveries before."""
    drawn = faults(kind, ranks, recoveries if UNLIMITED else recoveries + 1)
    settings: dict[str, Any] = {"ranks": ranks.stop, "train_iters": GAP * (len(drawn) + 1), "warm": True}
    undisturbed = Job(folder / "undisturbed", adaptor=False, **settings)
    with undisturbed:
        if undisturbed.wait(_LIMIT_S) != 0:
            raise JobError(f"the undisturbed run failed: see {undisturbed.log}")
    job = Job(
        folder / "job",
        adaptor=True,
        launcher=["--ttp-online", "60", "--ttp-spares", "1", "--max-restarts", "1"],
        faults=drawn,
        holds=f"{GAP},{SETTLED}",
        **settings,
    )
    agent: dict[int, dict[str, float]] = {}
    with job:
        code = job.wait(_LIMIT_S, _watcher(job, agent))
    incidents = job.incidents()
    verdicts = [incident["verdict"] for incident in incidents]
    if code != 0 or verdicts != ["recovered"] * recoveries + ["saved"] * (len(drawn) - recoveries):
        raise JobError(f"exit code {code}, the verdicts are {', '.join(verdicts)}: see {job.log}")
    reason = incidents[-1]["reason"]
    if not UNLIMITED and f"{MOST_EXCHANGES} faults were recovered online" not in reason:
        raise JobError(f"the last incident says {reason!r}: see {job.log}")
    steps = [GAP * (number + 1) for number in range(len(drawn))]
    # A rank that is struck in a step may have recorded neither this step nor the one before.
    if problems := differences(undisturbed, job, {step - back for step in steps for back in (0, 1)}):
        raise JobError(f"{len(problems)} records differ, the first: {problems[0]}; see {job.log}")
    worker = {
        line["step"] // GAP: line
        for line in job.watched()
        if line["what"] == "holds" and line["rank"] == 0 and line["restart"] == 0
    }
    records = sum(map(len, job.records().values()))
    return {"worker": worker, "agent": agent, "last": reason, "records": records}


def _watcher(job: Job, samples: dict[int, dict[str, float]]) -> Callable[[], None]:
    """Return a function to call while the job runs: the newest sample of rank 0 has the number of
    recoveries.
    """

    def look() -> None:
        recoveries = sum(line["rank"] == 0 and line["restart"] == 0 for line in job.watched())
        if recoveries and recoveries - 1 not in samples and job.returncode is None:
            shared = sum(1 for _ in Path("/dev/shm").iterdir())
            samples[recoveries - 1] = {**_holdings.of_process(job.launcher), "shm": shared}

    return look


def rows(result: dict[str, Any], process: str, columns: Sequence[str]) -> list[list[str]]:
    """Return a row for each of the numbers of recoveries that are shown."""
    return [
        [str(count), *(f"{result[process][count][name]:.4g}" for name in columns)]
        for count in SHOWN
        if count in result[process]
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--recoveries", type=int, default=100, help="with torch before 2.14: ten")
    options = parser.parse_args()
    recoveries = options.recoveries if UNLIMITED else MOST_EXCHANGES
    benchmark = Benchmark("online_leaks", {"recoveries": recoveries, "ranks": options.ranks})
    folder = new_folder("online_leaks")
    results = {
        name: measure(folder / name, kind, range(first, options.ranks), recoveries)
        for name, (kind, first) in ((name, WAYS[name]) for name in options.ways)
    }
    shutil.rmtree(folder)
    parts = []
    for name, result in results.items():
        parts += [
            f"{name}, a worker that survives all; {result['records']} records as in the undisturbed run",
            table(["recoveries", *COLUMNS], rows(result, "worker", COLUMNS)),
            f"{name}, ttprun (shm: entries of /dev/shm)",
            table(
                ["recoveries", *COLUMNS[:1], *COLUMNS[3:], "shm"],
                rows(result, "agent", ("MiB", *COLUMNS[3:], "shm")),
            ),
        ]
    benchmark.finish("\n\n".join(parts), {"ways": results})


if __name__ == "__main__":
    run(main)

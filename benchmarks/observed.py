"""The cost of observation: `python benchmarks/observed.py`.

"On" is a job that serves its page and metrics to a scrape per second, and that sends notices; "off" is the
same job without. Two figures: the step time of two jobs that take turns as in step_cost.py (scraped in its
own turns only); and the seconds from a SIGKILL until the checkpoint of the newest finished step is published,
in jobs that take turns and recover online, with a spare process. Every notice must arrive.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from _bench import Benchmark, argument_parser, bootstrap, spread, table
from _job import RANKS, Job, JobError, first, free_port, model, new_folder, run
from online_latency import GAP, WAYS, schedule
from step_cost import ARMS, Race, interval, one_start

WAY = WAYS["SIGKILL, a spare waits"]
STEP_TARGET, PUBLISHED_TARGET = 1.001, 1.02
EVERY_S = 1.0
_START_S = 60.0


class Observer:
    """Scrapes a job each second, and lets the job write its notices to a file.

    Args:
        folder: the new folder of the notices.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._notices = folder / "notices"
        self._port = free_port()
        self._end = threading.Event()
        self._turn = threading.Event()
        self._thread = threading.Thread(target=self._scrape)
        self.scrapes = 0

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the settings of the job that is observed."""
        add = f"exec:sh -c 'cat >> {self._notices}; echo >> {self._notices}'"  # one at a time
        return {"TTP_SERVE": str(self._port), "TTP_NOTIFY": add}

    @property
    def notices(self) -> int:
        """Return how many notices have come."""
        lines = self._notices.read_text().splitlines() if self._notices.exists() else []
        return sum(bool(line.strip()) for line in lines)

    @contextlib.contextmanager
    def scraping(self) -> Iterator[None]:
        """Scrape until the block is left, while there is a turn."""
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._turn.set()
            self._thread.join()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The job may be scraped until the block is left."""
        self._turn.set()
        try:
            yield
        finally:
            self._turn.clear()

    def _scrape(self) -> None:
        while not self._end.is_set():
            self._turn.wait()
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                url = f"http://127.0.0.1:{self._port}/metrics"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    self.scrapes += bool(answer.read())
            self._end.wait(EVERY_S)


def step_ratios(folder: Path, starts: int, pairs: int, source: random.Random) -> tuple[list[float], int]:
    """Return on over off of each pair of blocks, and how often the job was scraped."""
    ratios, scrapes = [], 0
    for number in range(starts):
        print(f"step time: start {number + 1} of {starts}", flush=True)
        observer = Observer(folder / f"observer-{number}")
        race = Race(
            pairs,
            8,
            2,
            True,
            [*model(4, 128, 64), "--global-batch-size", "8"],
            {"TTP_REPLICA": "split", **observer.environment},
            {"TTP_REPLICA": "split"},
        )

        def beside(arm: str, observer: Observer = observer) -> contextlib.AbstractContextManager[None]:
            return observer.turn() if arm == "on" else contextlib.nullcontext()

        with observer.scraping():
            measured = one_start(folder / str(number), race, source, beside)
        if not observer.scrapes:
            raise JobError("the job was never scraped")
        scrapes += observer.scrapes
        ratios += [on / off for off, on in zip(measured["off"], measured["on"], strict=True)]
    return ratios, scrapes


def published(folder: Path, count: int, source: random.Random, *, observed: bool) -> list[float]:
    """Run a job with `count` faults; return the seconds from each to the published checkpoint."""
    faults = schedule(WAY, count, source)
    observer = Observer(folder / "observer")
    job = Job(
        folder / "job",
        adaptor=True,
        train_iters=GAP * (count + 1),
        launcher=[*WAY.options, "--max-restarts", str(count)],
        faults=faults,
        environment=observer.environment if observed else None,
    )
    with observer.scraping() if observed else contextlib.nullcontext(), job, observer.turn():
        code = job.wait(_START_S * (count + 2))
    struck, incidents = job.struck(), job.incidents()
    if code != 0 or not len(struck) == len(incidents) == count:
        raise JobError(f"{len(struck)} faults, {len(incidents)} incidents, exit code {code}: see {job.log}")
    # One of each incident, one when training goes on after it, one of the end.
    if observed and not (observer.scrapes and observer.notices == 2 * count + 1):
        raise JobError(f"{observer.scrapes} scrapes, {observer.notices} notices of {2 * count + 1}")
    return [
        first(incident, "published") - stamp["time"]
        for stamp, incident in zip(struck, incidents, strict=True)
    ]


def ratio_of_medians(times: Mapping[str, Sequence[float]], seed: int) -> tuple[float, float, float]:
    """Return on over off, and its 95 % interval (bootstrap over incidents)."""

    def draw(source: random.Random) -> float:
        on, off = (statistics.median(source.choices(times[arm], k=len(times[arm]))) for arm in ("on", "off"))
        return on / off

    ratio = statistics.median(times["on"]) / statistics.median(times["off"])
    return ratio, *bootstrap(draw, seed)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="jobs with faults, of each kind")
    parser.add_argument("--faults", type=int, default=5, help="in each of them")
    parser.add_argument("--starts", type=int, default=4, help="of the jobs whose steps are timed")
    parser.add_argument("--pairs", type=int, default=30, help="of blocks, after each start")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    benchmark = Benchmark("observed", {**vars(options), "ranks": RANKS})
    source = random.Random(options.seed)
    folder = new_folder("observed")
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds):
        print(f"faults: round {number + 1} of {options.rounds}", flush=True)
        drawn = source.random()
        for arm in source.sample(ARMS, k=2):  # both get the same faults
            place = folder / f"{arm}-{number}"
            times[arm] += published(place, options.faults, random.Random(drawn), observed=arm == "on")
    ratios, scrapes = step_ratios(folder, options.starts, options.pairs, source)
    shutil.rmtree(folder)

    step = (statistics.median(ratios), *interval(ratios, options.seed))
    wait = ratio_of_medians(times, options.seed)
    rows = [
        ["step time", "", "", *(f"{value:.4f}" for value in step), f"≤ {STEP_TARGET:g}"],
        [
            "SIGKILL to published, ms",
            *(f"{1000 * statistics.median(times[arm]):.1f}" for arm in ARMS),
            *(f"{value:.3f}" for value in wait),
            f"≤ {PUBLISHED_TARGET:g}",
        ],
    ]
    benchmark.finish(
        table(["median", "off", "on", "on / off", "95 % from", "to", "target"], rows)
        + f"\n\n{len(ratios)} pairs of blocks, {scrapes} scrapes in them; {len(times['on'])} faults of each",
        {
            "step": {"ratio": step[0], "interval": step[1:], "ratios": ratios},
            "published": {
                "ratio": wait[0],
                "interval": wait[1:],
                "seconds": {arm: spread(times[arm]) for arm in ARMS},
                "all": times,
            },
        },
    )


if __name__ == "__main__":
    run(main)

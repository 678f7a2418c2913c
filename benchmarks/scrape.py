"""The cost of a scrape of a large job: `python benchmarks/scrape.py`.

A job of 1,000 agents with 8,000 ranks has had 100 incidents; each has 1,000 events in its file and in
events.jsonl. `ttp serve` serves the job's folder; between two requests the job writes, as ttprun does: its
status, a further event, and sometimes a further incident. The first request reads everything; the others are
those of a server that runs beside the job.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec
from _bench import Benchmark, table

from adaptor.protocol.records import (
    EVENTS_FILE,
    INCIDENTS,
    STATUS_FILE,
    Cause,
    Event,
    IncidentRecord,
    Phases,
    Status,
    Versions,
    utc,
)

AGENTS, PER_AGENT, EVENTS, INCIDENTS_OF_THE_JOB, TIMES = 1000, 8, 100_000, 100, 50
PATHS = ("/metrics", "/", "/readyz", "/api/v1/status", "/api/v1/incidents", "/api/v1/events?limit=100")
GOAL_MS = 50.0
BEGAN = 1_700_000_000.0
HEAD = ["path", "first, ms", "then: median, ms", "95 %, ms", "most, ms", "CPU of each, ms", "kB"]
GAP_S = 3600.0  # between two incidents


class Folder:
    """The folder of a job, as written by ttprun.

    Args:
        path: the new folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / INCIDENTS).mkdir(parents=True)
        self._count = 0
        self.write_status()
        self._append(Event(time=utc(BEGAN), job="gpt", generation=1, incident=None, type="generation"))
        trains = Event(time=utc(BEGAN + 60), job="gpt", generation=1, incident=None, type="training", step=0)
        self._append(trains)
        for _ in range(INCIDENTS_OF_THE_JOB):
            self.write_incident()

    def write_status(self) -> None:
        ranks = AGENTS * PER_AGENT
        status = Status(
            time=utc(time.time()),
            job="gpt",
            state="training",
            generation=self._count + 1,
            node=0,
            host="n0",
            pid=1,
            term=0,
            restarts=self._count,
            max_restarts=1000,
            nodes=AGENTS,
            nodes_lost=0,
            ranks=ranks,
            ranks_training=ranks,
            ranks_ended=0,
            step=1000 * self._count,
            step_time=utc(time.time()),
            protected=True,
            why_not="",
            incidents=self._count,
            last_incident=None,
            save="",
        )
        scratch = self.path / "scratch"
        scratch.write_bytes(msgspec.json.encode(status))
        scratch.replace(self.path / STATUS_FILE)

    def write_event(self) -> None:
        """Append an event that changes nothing."""
        time_now = utc(time.time())
        self._append(Event(time=time_now, job="gpt", generation=1, incident=None, type="next-action"))

    def write_incident(self) -> None:
        """Append the events of a further incident, and write its file."""
        self._count = number = self._count + 1
        at = BEGAN + number * GAP_S
        types = ["fault-noticed", *["written"] * (EVENTS // INCIDENTS_OF_THE_JOB - 3), "verdict", "training"]
        events = [
            Event(
                time=utc(at + place * 1e-3),
                job="gpt",
                generation=number,
                incident=number,
                type=event_type,
                node=place % AGENTS,
                host=f"n{place % AGENTS}",
                rank=place * PER_AGENT % (AGENTS * PER_AGENT),
                pid=4711 + place,
                step=1000 * number,
                data={"detail": "group 7 of the distributed optimizer, 8 shards"},
            )
            for place, event_type in enumerate(types)
        ]
        self._append(*events)
        incident = IncidentRecord(
            id=f"{utc(at)[:19]}-{number}",
            job="gpt",
            generation=number,
            incident=number,
            began=utc(at),
            ended=utc(at + 1),
            cause=Cause(kind="signal", signal="SIGKILL"),
            reason="rank 1 was ended by SIGKILL; a step is saved, no finished step is lost",
            blamed=1,
            node=0,
            host="n0",
            pid=7,
            failed=[1],
            silent=[],
            verdict="saved",
            step=1000 * number,
            newest_step=1000 * number,
            steps_lost=0,
            phases=Phases(detect=0.01, freeze=0.02, write=9.0, publish=0.5, restart=20.0, load=60.0),
            checkpoint="/save/iter",
            bytes=1 << 40,
            exit_code=None,
            next_action="restart",
            not_started_again="",
            runbook="docs/runbook.md#signal",
            versions=Versions(adaptor="0", torch="0", python="0"),
            ranks=list(range(AGENTS * PER_AGENT)),
            events=events,
        )
        (self.path / INCIDENTS / f"{incident.id}.json").write_bytes(msgspec.json.encode(incident))

    def _append(self, *events: Event) -> None:
        with (self.path / EVENTS_FILE).open("ab") as file:
            file.write(b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def ask(url: str) -> tuple[float, int]:
    """Return how long an answer takes, in ms, and its bytes."""
    begin = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        size = len(answer.read())
    return 1e3 * (time.perf_counter() - begin), size


def cpu_ms(pid: int) -> float:
    """Return the CPU time of a process, in ms; on a busy machine it says more than the time of an answer."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Folder, times: int) -> list[list[str]]:
    """Return a row for each path: its first answer, the later answers, the server's CPU time, and the
    bytes.
    """
    rows = []
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "serve", str(folder.path), "--port", "0"]
    for path in PATHS:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().split()[1].removesuffix("/metrics") + path
            first, size = ask(url)
            took = []
            cpu_before = cpu_ms(server.pid)
            for number in range(times):
                folder.write_status()
                folder.write_event()
                if number % 10 == 9:
                    folder.write_incident()
                took.append(ask(url)[0])
            cpu = (cpu_ms(server.pid) - cpu_before) / times
            server.terminate()
        took.sort()
        figures = (first, took[len(took) // 2], took[int(0.95 * len(took))], took[-1], cpu)
        rows.append([f"`{path}`", *(f"{ms:.1f}" for ms in figures), f"{size / 1e3:.0f}"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=TIMES, help="requests after the first one")
    times = parser.parse_args().times
    bench = Benchmark("scrape", {"agents": AGENTS, "events": EVENTS, "incidents": INCIDENTS_OF_THE_JOB})
    with tempfile.TemporaryDirectory() as temporary_directory:
        rows = measure(Folder(Path(temporary_directory) / "gpt"), times)
    met = float(rows[0][3]) <= GOAL_MS
    goal = f"95 % of the answers of {PATHS[0]} after the first within {GOAL_MS:g} ms"
    bench.finish(f"{table(HEAD, rows)}\n{goal}: {'met' if met else 'not met'}", {"rows": rows})
    return not met


if __name__ == "__main__":
    sys.exit(main())

"""An alert from a job through Debian's Prometheus and Alertmanager to a webhook.

python -m tests.integration.monitoring

Starts `ttprun --ttp-serve` with a training loop on two ranks, Prometheus with the rules of
examples/monitoring, and Alertmanager with one receiver, all on loopback. Kills rank 1 three times, queries
Prometheus, and waits until TTPRestartLoop reaches the receiver. Prints the observations; the exit code is 1
if a value is wrong, 2 if a program is missing.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from demo.runs import find_worker
from tests import waiting
from tests.frameworks import prepare
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "monitoring"
PROGRAMS = ("prometheus", "prometheus-alertmanager", "promtool")
KILLS = 3
# The values that Prometheus must have at the end.
EXPECTED = {
    'sum(ttp_incidents_total{cause="signal",verdict="saved"})': KILLS,
    'sum(ttp_incident_phase_seconds_count{phase="publish"})': KILLS,
    "ttp_restarts_total": KILLS,
    "ttp_steps_lost_total": 0,
    "ttp_protected": 1,
}
# Three restarts, each with imports and a load, on a machine that does much else.
LIMIT_S = 600.0
_PAUSE_S = 0.2


def why_absent() -> str:
    """Return a line that names the missing programs, '' if all are installed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)}: not there (Debian: prometheus, prometheus-alertmanager)" if missing else ""


@dataclass
class Observations:
    """The observations from outside of the job.

    alert      as Alertmanager sent it metrics    by expression: the value in Prometheus at the end panels
    the same for each expression of the Grafana dashboard seconds    from the third kill until Prometheus had
    counted the restart, and until the alert arrived scrape_s   the longest scrape samples    of one scrape
    """

    alert: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    panels: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    scrape_s: float = 0.0
    samples: int = 0


@contextlib.contextmanager
def _started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _receiver(port: int) -> Iterator[queue.Queue[dict[str, Any]]]:
    """Take what Alertmanager posts, as the last station of an alert."""
    came: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield came
        finally:
            server.shutdown()
            thread.join()


def _configure(folder: Path, job: int, alertmanager: int, receiver: int) -> None:
    """Write the configurations of the example with the ports and the pace of this run."""
    shutil.copy(EXAMPLE / "alerts.yml", folder)
    scraped = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())
    scraped["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    scraped["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{job}"]}]
    scraped["alerting"] = {
        "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(scraped))
    routes = yaml.safe_load((EXAMPLE / "alertmanager.yml").read_text())
    routes["route"]["group_wait"] = "0s"
    routes["receivers"][0]["webhook_configs"][0]["url"] = f"http://127.0.0.1:{receiver}/"
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(routes))


class _Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def value(self, expression: str) -> float | None:
        """Return the value of an expression; None while there is none, or nobody answers."""
        try:
            with urllib.request.urlopen(self._url + urllib.parse.urlencode({"query": expression})) as answer:
                series = json.load(answer)["data"]["result"]
        except OSError:
            return None
        return float(series[0]["value"][1]) if series else None

    def comes_to(self, expression: str, least: float) -> None:
        def reached() -> bool:
            value = self.value(expression)
            return value is not None and value >= least

        waiting.until(reached, f"{expression} >= {least}", pause_s=_PAUSE_S, within_s=LIMIT_S)

    def soon(self, expression: str) -> float:
        """Wait for the value of an expression; some series appear a scrape after others."""
        waiting.until(
            lambda: self.value(expression) is not None,
            f"{expression} has a value",
            pause_s=_PAUSE_S,
            within_s=LIMIT_S,
        )
        return self.value(expression) or 0.0


def _job(folder: Path, port: int) -> list[str]:
    script = ROOT / "examples" / "megatron_core" / "pretrain.py"
    return [
        *(str(Path(sys.executable).with_name("ttprun")), "--standalone", "--nproc-per-node", "2"),
        *(
            "--max-restarts",
            "9",
            "--ttp-online",
            "0",
            "--ttp-device",
            "cpu",
            "--ttp-log-path",
            str(folder / "logs"),
        ),
        *("--ttp-serve", str(port), str(script), "--save", str(folder / "save"), "--iters", "1000000"),
    ]


def _of_the_dashboard() -> list[str]:
    """Return the expressions of the dashboard's panels, for all jobs."""
    panels = json.loads((EXAMPLE / "grafana.json").read_text())["panels"]
    return [target["expr"].replace("$instance", ".*") for panel in panels for target in panel["targets"]]


def observe(folder: Path) -> Observations:
    """Run all of it in `folder`. Raises AssertionError where something does not come."""
    job, prometheus, alertmanager, cluster, receiver = free_ports(5)
    _configure(folder, job, alertmanager, receiver)
    observations = Observations()
    with contextlib.ExitStack() as stack:
        came = stack.enter_context(_receiver(receiver))
        stack.enter_context(
            _started(
                [
                    *("prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml"),
                    *(
                        f"--storage.path={folder}/alertmanager",
                        f"--web.listen-address=127.0.0.1:{alertmanager}",
                    ),
                    f"--cluster.listen-address=127.0.0.1:{cluster}",
                ],
                folder / "alertmanager.log",
            )
        )
        stack.enter_context(
            _started(
                [
                    *("prometheus", f"--config.file={folder}/prometheus.yml"),
                    *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{prometheus}"),
                ],
                folder / "prometheus.log",
            )
        )
        ttprun = stack.enter_context(
            _started(
                _job(folder, job),
                folder / "job.log",
                PYTHONPATH=str(prepare.megatron_core()),
                OMP_NUM_THREADS="1",
            )
        )
        database = _Prometheus(prometheus)
        for kill in range(KILLS):
            database.comes_to("ttp_protected", 1)
            # That of this start of the workers, in Prometheus as in the job.
            database.comes_to("ttp_generation", kill + 1)
            database.comes_to('ttp_ranks{state="training"}', 2)
            # A step of this start, so that there is something to save.
            database.comes_to("ttp_finished_step", (database.value("ttp_finished_step") or 0) + 1)
            victim = find_worker(psutil.Process(ttprun.pid), 1)
            assert victim is not None
            began = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            database.comes_to("ttp_restarts_total", kill + 1)
            observations.seconds["restart counted"] = time.monotonic() - began
        posted = came.get(timeout=LIMIT_S)
        observations.seconds["alert at the receiver"] = time.monotonic() - began
        (observations.alert,) = posted["alerts"]
        database.comes_to("ttp_generation", KILLS + 1)
        database.comes_to("ttp_protected", 1)
        for expression in EXPECTED:
            observations.metrics[expression] = database.value(expression) or 0.0
        for expression in _of_the_dashboard():
            observations.panels[expression] = database.soon(expression)
        observations.scrape_s = database.value('max_over_time(scrape_duration_seconds{job="ttp"}[1h])') or 0.0
        observations.samples = int(database.value('scrape_samples_scraped{job="ttp"}') or 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{job}/metrics") as answer:
            (folder / "metrics.txt").write_bytes(answer.read())
    return observations


def check_metrics(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Have `promtool check metrics` read the last scrape."""
    with (folder / "metrics.txt").open("rb") as text:
        return subprocess.run(["promtool", "check", "metrics"], stdin=text, capture_output=True, check=False)


def wrong(observations: Observations) -> list[str]:
    """Return the wrong values: no step may be lost, and each event must be counted once."""
    deviations = [
        f"{expression} is {observations.metrics[expression]:g}, not {expected}"
        for expression, expected in EXPECTED.items()
        if observations.metrics[expression] != expected
    ]
    name = observations.alert["labels"]["alertname"]
    if (name, observations.alert["status"]) != ("TTPRestartLoop", "firing"):
        deviations.append(f"{name} came to the receiver, not TTPRestartLoop")
    runbook = observations.alert["annotations"]["runbook_url"]
    if not (ROOT / runbook).is_file():
        deviations.append(f"{runbook}: there is no such page")
    return deviations


def main() -> int:
    absent = why_absent()
    if absent:
        print(absent, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ttp-monitoring-") as temporary_directory:
        folder = Path(temporary_directory)
        try:
            observations = observe(folder)
        except AssertionError as error:
            print(f"{error}\n{(folder / 'job.log').read_text(errors='replace')[-2000:]}", file=sys.stderr)
            return 1
        checked = check_metrics(folder)
    alert = observations.alert
    labels = ", ".join(f"{name} {value}" for name, value in sorted(alert["labels"].items()))
    annotations = alert["annotations"]
    print(f"the alert, {alert['status']}: {labels}")
    print(f"  {annotations['summary']}: {annotations['description']}")
    print(f"  {annotations['runbook_url']}")
    for expression, value in observations.metrics.items():
        print(f"{expression} = {value:g}")
    print(f"the dashboard: each of its {len(observations.panels)} expressions has a value")
    for event, seconds in observations.seconds.items():
        print(f"from the third kill: {event} after {seconds:.1f} s")
    print(f"a scrape: {observations.samples} samples, {1000 * observations.scrape_s:.0f} ms at most")
    print(f"promtool check metrics: exit code {checked.returncode}")
    print((checked.stdout + checked.stderr).decode(), end="")
    deviations = wrong(observations)
    for line in deviations:
        print(f"PROBLEM: {line}", file=sys.stderr)
    return 1 if deviations or checked.returncode else 0


if __name__ == "__main__":
    sys.exit(main())

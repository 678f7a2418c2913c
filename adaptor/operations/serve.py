"""`ttp serve` and `ttprun --ttp-serve`: metrics and files of a job over HTTP, in a separate process.

At each request the server reads the new parts of the files that ttprun writes. It never communicates with the
job, so training continues whatever happens to the server.

/                   a page for people
/metrics            for Prometheus
/healthz            200 as long as this process answers
/readyz             200 if the job trains and is protected, 503 and the reason if not
/api/v1/status      status.json
/incidents/ID/trace an incident as a trace for ui.perfetto.dev
/api/v1/incidents   the incidents, each without its events; /api/v1/incidents/ID: one with its events
/api/v1/events      the newest events, at most `?limit=` of them

The metrics are made from the new parts of the files; docs/operations.md has the table. No metric has a label
for each rank: a job of thousands would be thousands of series.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs, urlsplit

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from adaptor.operations import job_reader, page
from adaptor.operations.access import Clients
from adaptor.operations.job_reader import (
    CheckpointSummary,
    JobFolderError,
    JobReader,
    NewestCheckpoint,
    newest_events,
)
from adaptor.operations.settings import HostPort
from adaptor.operations.timeline import chrome_trace
from adaptor.protocol import records
from adaptor.protocol.records import IncidentRecord, IncidentSummary, Phases, Status, StepTimes, unix

# The time limit of a client: a scrape takes 10 s at most.
_CLIENT_S = 10.0
_MOST_EVENTS = 1000
# Clients that are answered at the same time, each by a thread.
MOST_CLIENTS = 32
_REFRESH_S = 5
_INCIDENT_ID = re.compile(r"[\w.-]+")
# socketserver's type of a request; here always a socket.
Request = socket.socket | tuple[bytes, socket.socket]
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_ALLOWED = {"Allow": "GET, HEAD"}
_NO_INCIDENT = HTTPStatus.NOT_FOUND, _TEXT, b"there is no such incident\n"
# The buckets of histograms in seconds: a death is noticed in milliseconds, a large job restarts in minutes.
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
# The states of ranks that are counted.
_RANKS = ("starting", "training", "ended")


class Server(ThreadingHTTPServer):
    """Serves a log folder: its newest job, or the job whose folder it is.

    Args:
        folder: the folder.
        listening: the socket, closed with the server.
        clients: the access rules.
        come_round: called again and again by `serve_forever`, which its exception ends.
    """

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        listening: socket.socket,
        clients: Clients,
        come_round: Callable[[], None] = lambda: None,
    ) -> None:
        self.where = folder
        self._come_round = come_round
        self.token = clients.token
        self._job: Path | None = None
        self._clients = threading.BoundedSemaphore(MOST_CLIENTS)
        self._reader: JobReader | None = None
        self.pages = page.Pages()
        self.newest = NewestCheckpoint(lambda: job_reader.status(self.job()).save)
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()  # made by the base class
        self.socket = listening
        self._certificate = clients.tls

    def job(self) -> Path:
        """Return the folder of the served job: a running job, until it has ended or is silent.

        Two jobs may write to one log folder, and each is the newest job once in a second.

        Raises:
            JobFolderError: the folder has no job.
        """
        current_job = self._job
        if current_job is None or not job_reader.goes_on(current_job):
            current_job = self._job = job_reader.find(self.where)
        return current_job

    def reader(self) -> JobReader:
        """Return the reader of the served job. Raises JobFolderError."""
        job, reader = self.job(), self._reader
        if reader is None or reader.job != job:
            reader = self._reader = JobReader(job)
        return reader

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a client; its thread makes the handshake."""
        request, address = self.socket.accept()
        if self._certificate is None:
            return request, address
        self._certificate.renew()
        context = self._certificate.context
        return context.wrap_socket(request, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Request, client_address: object) -> None:
        """Answer in a thread, unless too many clients are being answered."""
        if not self._clients.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # No thread can be started. After Ctrl-C there may be one: it releases.
            self._clients.release()
            raise

    def process_request_thread(self, request: Request, client_address: object) -> None:
        """Answer a client, which is dropped after its time limit."""
        ends = threading.Timer(_CLIENT_S, _drop, (request,))
        ends.daemon = True
        try:
            ends.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:  # no more threads for this process: nothing would drop this client
            self.shutdown_request(request)
        finally:
            ends.cancel()
            self._clients.release()

    def service_actions(self) -> None:
        self._come_round()

    def server_close(self) -> None:
        self.newest.close()
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients may leave at any time, or speak no TLS."""


def _drop(request: Request) -> None:
    with contextlib.suppress(OSError):
        if isinstance(request, socket.socket):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers a client. Only GET and HEAD have an answer, so nothing can be changed."""

    server: Server
    server_version = "ttp"
    sys_version = ""
    timeout = _CLIENT_S

    def do_GET(self) -> None:
        """Answer a request."""
        if not self.server.token and not _names_this_machine(self.headers.get("Host", "")):
            self._answer(
                HTTPStatus.MISDIRECTED_REQUEST, _TEXT, b"Host must be localhost or a loopback address\n"
            )
            return
        authorization = self.headers.get("Authorization", "")
        if self.server.token and not hmac.compare_digest(
            authorization.encode("latin-1", "replace"), f"Bearer {self.server.token}".encode()
        ):
            self._answer(HTTPStatus.UNAUTHORIZED, _TEXT, b"a token is needed\n")
            return
        try:
            address = urlsplit(self.path)
            status, kind, body = self._response(address.path, parse_qs(address.query))
        except JobFolderError as error:
            status, kind, body = HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{error}\n".encode(errors="replace")
        except (ValueError, OSError):  # no path, or too long for a file name
            status, kind, body = HTTPStatus.BAD_REQUEST, _TEXT, b"this is no path of ttp serve\n"
        self._answer(status, kind, body)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer 405: no request changes anything."""
        answer_text = b"nothing can be changed here; there are GET and HEAD\n"
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, answer_text, _ALLOWED)

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST

    def _response(self, path: str, query: dict[str, list[str]]) -> tuple[HTTPStatus, str, bytes]:
        server = self.server
        if path == "/":
            html = server.pages.page(server.reader(), server.newest.checkpoint, refresh_s=_REFRESH_S)
            return HTTPStatus.OK, "text/html; charset=utf-8", html.encode(errors="replace")
        if path == "/healthz":
            return HTTPStatus.OK, _TEXT, b"ok\n"
        if path == "/metrics":
            accept = self.headers.get("Accept", "")
            body, kind = exposition(server.reader(), server.newest.checkpoint, accept)
            return HTTPStatus.OK, kind, body
        if path == "/readyz":
            reason = _not_ready(server.job())
            status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
            return status, _TEXT, f"{reason or 'ok'}\n".encode(errors="replace")
        if path == "/api/v1/status":
            return _json(job_reader.status(server.job()))
        if path == "/api/v1/incidents":
            return _json(server.reader().summaries())
        if path.startswith("/api/v1/incidents/"):
            incident = _incident(server.job(), path.removeprefix("/api/v1/incidents/"))
            return _json(incident) if incident else _NO_INCIDENT
        if path.startswith("/incidents/") and path.endswith("/trace"):
            incident = _incident(server.job(), path.removeprefix("/incidents/").removesuffix("/trace"))
            return _json(chrome_trace(incident)) if incident else _NO_INCIDENT
        if path == "/api/v1/events":
            return _events(server.job(), query.get("limit", ["100"])[-1])
        return (
            HTTPStatus.NOT_FOUND,
            _TEXT,
            b"not found; there are /, /metrics, /healthz, /readyz, /incidents/ID/trace and /api/v1/\n",
        )

    def _answer(
        self,
        status: HTTPStatus,
        kind: str,
        body: bytes,
        further_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(status)
        for name, value in further_headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", f"{page.POLICY}; frame-ancestors 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log no request: regular scrapes would fill a disk."""


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header names a loopback address.

    Without a token only a loopback address is served. A page of another site may have its own name for the
    loopback address, and its scripts could read the answers.
    """
    try:
        return HostPort(urlsplit(f"//{host}").hostname or "", 0).is_loopback
    except ValueError:
        return False


def _json(body: object) -> tuple[HTTPStatus, str, bytes]:
    return HTTPStatus.OK, _JSON, msgspec.json.encode(body)


def _incident(job: Path, name: str) -> IncidentRecord | None:
    """Return the incident of this name; None without such an incident."""
    path = job / records.INCIDENTS / f"{name}.json"
    return job_reader.read(path, IncidentRecord) if _INCIDENT_ID.fullmatch(name) and path.is_file() else None


def _events(job: Path, limit: str) -> tuple[HTTPStatus, str, bytes]:
    if not re.fullmatch(r"[0-9]{1,4}", limit) or not 1 <= int(limit) <= _MOST_EVENTS:
        problem = f"limit is {limit[:20]!r}: it must be a number from 1 to {_MOST_EVENTS}\n"
        return HTTPStatus.BAD_REQUEST, _TEXT, problem.encode(errors="replace")
    return _json(newest_events(job, int(limit)))


def _not_ready(job: Path) -> str:
    """Return why the job does not train as it should, '' if it does."""
    status = job_reader.status(job)
    if status.state == "ended":
        return "the job has ended"
    silent_s = job_reader.silent_s(status)
    if silent_s:
        return f"no status was written for {silent_s:.0f} s"
    if status.state != "training":
        return f"the job is not training: {status.state}"
    if status.protected is False:
        return f"not protected: {status.why_not}"
    return "" if status.protected else "not yet protected"


def exposition(reader: JobReader, newest: CheckpointSummary | None, accept: str) -> tuple[bytes, str]:
    """Return the metrics of a job, and their content type.

    Args:
        reader: of the job, kept from one scrape to the next.
        newest: the newest checkpoint in its save folder, if known.
        accept: the header `Accept` of the scrape, which chooses OpenMetrics or the older text format.

    Raises:
        JobFolderError: the files of the job cannot be read.
    """
    registry = CollectorRegistry()
    registry.register(_Job(reader, newest))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Job(Collector):
    def __init__(self, reader: JobReader, newest: CheckpointSummary | None) -> None:
        self._newest = newest
        self._status = reader.status()
        self._incidents = reader.summaries()
        self._ratio = reader.spent().ratio
        self._counted = reader.counted()

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield InfoMetricFamily(
            "ttp_build",
            "the installed adaptor, and the job",
            value={"version": metadata.version("ttp-adaptor"), "job": status.job},
        )
        yield from _of_status(status)
        yield from _of_incidents(self._incidents)
        if self._newest is not None:
            yield from _of_checkpoint(self._newest)
        times = CounterMetricFamily(
            "ttp_time_seconds", "seconds that the job has spent in each state", labels=["state"]
        )
        for state, seconds in self._counted.items():
            times.add_metric([state], seconds)
        yield times
        if self._ratio is not None:
            yield _gauge("ttp_goodput_ratio", "productive seconds over all seconds of the job", self._ratio)


def _of_status(status: Status) -> Iterator[Metric]:
    yield _gauge("ttp_status_timestamp_seconds", "when ttprun has written the status last", unix(status.time))
    yield _gauge("ttp_running", "1 until ttprun has ended", status.state != "ended")
    if status.protected is not None:
        yield _gauge("ttp_protected", "1 if all ranks train what can be saved", status.protected)
    if status.step is not None and status.step_time is not None:
        yield _gauge("ttp_finished_step", "the newest finished step", status.step)
        yield _gauge("ttp_last_step_timestamp_seconds", "when it was finished", unix(status.step_time))
    if status.step_times is not None:
        yield _of_steps(status.step_times)
    if status.shard_holders is not None:
        yield _gauge(
            "ttp_shard_holders_min",
            "ranks that hold that shard of the state which the fewest hold",
            status.shard_holders,
        )
    if status.host_copy_step is not None and status.host_copy_time is not None:
        yield _gauge("ttp_host_copy_step", "the newest step in host memory", status.host_copy_step)
        yield _gauge("ttp_host_copy_timestamp_seconds", "when it was there", unix(status.host_copy_time))
    if status.drill_step is not None and status.drill_time is not None:
        is_recoverable = not status.drill_problem
        yield _gauge("ttp_drill_recoverable", "1 if the newest drill has found no problem", is_recoverable)
        yield _gauge("ttp_drill_step", "the step of the newest drill", status.drill_step)
        yield _gauge("ttp_drill_timestamp_seconds", "when it was held", unix(status.drill_time))
    if status.slow_rank is not None and status.slow_score is not None:
        yield _gauge("ttp_slow_rank", "the rank that computes longest", status.slow_rank)
        yield _gauge("ttp_slow_score", "its computing time ÷ that of its peers", status.slow_score)
    yield _gauge("ttp_failed_saves", "saves that have failed one after the other", status.failed_saves)
    yield _gauge("ttp_generation", "starts of the workers, from 1 on", status.generation)
    ranks = GaugeMetricFamily("ttp_ranks", "ranks in each state", labels=["state"])
    starting = max(0, status.ranks - status.ranks_training - status.ranks_ended)
    for state, count in zip(_RANKS, (starting, status.ranks_training, status.ranks_ended), strict=True):
        ranks.add_metric([state], count)
    yield ranks
    nodes = GaugeMetricFamily("ttp_nodes", "nodes by whether their agents are there", labels=["state"])
    nodes.add_metric(["up"], status.nodes - status.nodes_lost)
    nodes.add_metric(["lost"], status.nodes_lost)
    yield nodes
    agents = GaugeMetricFamily("ttp_agent_up", "1 while the agent of a node is there", labels=["node"])
    lost = set(status.lost_nodes)
    for node in range(status.nodes):
        agents.add_metric([str(node)], float(node not in lost))
    yield agents
    yield _gauge(
        "ttp_incident_open", "1 while a fault is handled", status.state in ("incident", "restarting")
    )
    yield CounterMetricFamily("ttp_restarts", "restarts of all workers", value=status.restarts)
    yield _gauge(
        "ttp_restarts_remaining", "restarts that are left", max(0, status.max_restarts - status.restarts)
    )
    yield _gauge(
        "ttp_controller_term", "0 for the first controller, else the node that took over", status.term
    )


def _of_steps(times: StepTimes) -> Metric:
    limits = [*map(str, times.limits), "+Inf"]
    counts = [float(count) for count in accumulate(times.counts)]
    histogram = HistogramMetricFamily("ttp_step_duration_seconds", "how long steps took")
    histogram.add_metric([], buckets=list(zip(limits, counts, strict=True)), sum_value=times.sum)
    return histogram


def _of_incidents(incidents: Sequence[IncidentSummary]) -> Iterator[Metric]:
    counter = CounterMetricFamily("ttp_incidents", "incidents that have ended", labels=["cause", "verdict"])
    for (cause, verdict), count in Counter(
        (incident.cause.kind, incident.verdict) for incident in incidents
    ).items():
        counter.add_metric([cause, verdict], count)
    yield counter
    lost = [incident.steps_lost for incident in incidents if incident.steps_lost is not None]
    if lost or not incidents:  # else unknown, not 0
        yield CounterMetricFamily(
            "ttp_steps_lost", "finished steps that had to be trained again, or would have to", value=sum(lost)
        )
    unknown = len(incidents) - len(lost)
    yield _gauge("ttp_incidents_of_unknown_loss", "incidents whose lost steps nobody knows", unknown)
    parts = HistogramMetricFamily(
        "ttp_incident_phase_seconds", "how long each part of an incident took", labels=["phase"]
    )
    for name in Phases.__struct_fields__:
        took = [seconds for incident in incidents if (seconds := getattr(incident.phases, name)) is not None]
        counts = [(str(limit), float(sum(seconds <= limit for seconds in took))) for limit in BUCKETS_S]
        parts.add_metric([name], buckets=[*counts, ("+Inf", float(len(took)))], sum_value=sum(took))
    yield parts


def _of_checkpoint(newest: CheckpointSummary) -> Iterator[Metric]:
    yield _gauge("ttp_checkpoint_step", "the step of the newest checkpoint", newest.step)
    yield _gauge("ttp_checkpoint_timestamp_seconds", "when it was written", newest.at)
    yield _gauge("ttp_checkpoint_bytes", "the bytes of its files", newest.size)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=float(value))

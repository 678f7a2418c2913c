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
"""

from __future__ import annotations

import contextlib
import hmac
import re
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs, urlsplit

import msgspec

from adaptor.operations import job_folder, metrics, page
from adaptor.operations.access import Clients
from adaptor.operations.job_folder import JobFolderError
from adaptor.operations.job_reader import JobReader, NewestCheckpoint, newest_events
from adaptor.operations.settings import HostPort
from adaptor.operations.trace import chrome_trace
from adaptor.protocol import records
from adaptor.protocol.records import Incident

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
        self.newest = NewestCheckpoint(lambda: job_folder.status(self.job()).save)
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
        if current_job is None or not job_folder.goes_on(current_job):
            current_job = self._job = job_folder.find(self.where)
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
            body, kind = metrics.exposition(server.reader(), server.newest.checkpoint, accept)
            return HTTPStatus.OK, kind, body
        if path == "/readyz":
            reason = _not_ready(server.job())
            status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
            return status, _TEXT, f"{reason or 'ok'}\n".encode(errors="replace")
        if path == "/api/v1/status":
            return _json(job_folder.status(server.job()))
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


def _incident(job: Path, name: str) -> Incident | None:
    """Return the incident of this name; None without such an incident."""
    path = job / records.INCIDENTS / f"{name}.json"
    return job_folder.read(path, Incident) if _INCIDENT_ID.fullmatch(name) and path.is_file() else None


def _events(job: Path, limit: str) -> tuple[HTTPStatus, str, bytes]:
    if not re.fullmatch(r"[0-9]{1,4}", limit) or not 1 <= int(limit) <= _MOST_EVENTS:
        problem = f"limit is {limit[:20]!r}: it must be a number from 1 to {_MOST_EVENTS}\n"
        return HTTPStatus.BAD_REQUEST, _TEXT, problem.encode(errors="replace")
    return _json(newest_events(job, int(limit)))


def _not_ready(job: Path) -> str:
    """Return why the job does not train as it should, '' if it does."""
    status = job_folder.status(job)
    if status.state == "ended":
        return "the job has ended"
    silent_s = job_folder.silent_s(status)
    if silent_s:
        return f"no status was written for {silent_s:.0f} s"
    if status.state != "training":
        return f"the job is not training: {status.state}"
    if status.protected is False:
        return f"not protected: {status.why_not}"
    return "" if status.protected else "not yet protected"

"""An HTTP proxy before an object store; it lets chosen requests fail or holds them until released."""

from __future__ import annotations

import contextlib
import http.client
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import pytest

from tests.unit import object_store

# The last is none, but another spelling of some stores.
Fault = Literal[
    "", "hold before", "hold after", "cut before", "cut after", "403", "404", "503", "corrupt", "bare etags"
]
# What is told of a request: its number from 0, its method, its path.
Chooses = Callable[[int, str, str], Fault]
_CODES = {"403": "AccessDenied", "404": "NoSuchUpload", "503": "SlowDown"}
_BUCKET = "bucket"
_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}
_QUOTE = rb'(?:"|&quot;|&#34;)'
_QUOTED = re.compile(b"<ETag>" + _QUOTE + b"([^<]*?)" + _QUOTE + b"</ETag>")


@dataclass
class FaultProxy:
    """The state of the proxy: `fault` chooses the fault of a request; `held` is set while a request is held.

    Attributes:
        parts: the numbers and bytes of the received parts of uploads, failed parts included
        keys: the access keys with which requests were signed
    """

    url: str = ""
    fault: Chooses = lambda number, method, path: ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, fault: Chooses = lambda number, method, path: "") -> None:
        """Count requests from 0 again, with this fault."""
        with self.lock:
            self.requests.clear()
            self.parts.clear()
            self.keys.clear()
            self.held.clear()
            self.release = threading.Event()
            self.fault = fault


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of an object store with one bucket."""
    with object_store.server() as url:
        object_store.request(url, "PUT", f"/{_BUCKET}")
        yield url


@pytest.fixture
def faults(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before it; the environment has the credentials."""
    for name, value in object_store.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with proxy(server) as state:
        yield state


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A prefix of the test's own in it."""
    return f"s3://{_BUCKET}/{request.node.name.partition('[')[0]}"


@contextmanager
def proxy(server: str) -> Iterator[FaultProxy]:
    """Run a proxy before `server`, a URL."""
    state = FaultProxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            with contextlib.suppress(OSError):
                _forward(self, state, server)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    assert issubclass(Server, socketserver.TCPServer)
    with Server(("127.0.0.1", 0), Handler) as listening:
        state.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield state
        finally:
            state.release.set()
            listening.shutdown()
            thread.join()


def _forward(handler: BaseHTTPRequestHandler, state: FaultProxy, server: str) -> None:
    size = int(handler.headers.get("Content-Length") or 0)
    body = handler.rfile.read(size)
    if len(body) < size:  # who has sent it is dead
        handler.close_connection = True
        return
    with state.lock:
        fault = state.fault(len(state.requests), handler.command, handler.path)
        state.requests.append((handler.command, handler.path))
        part = re.search(r"[?&]partNumber=(\d+)", handler.path)
        if part:
            state.parts.append((int(part[1]), len(body)))
        signed = re.search(r"Credential=([^/]*)/", handler.headers.get("Authorization", ""))
        state.keys.add(signed[1] if signed else "")
        release = state.release
    if fault == "hold before":
        state.held.set()
        release.wait()
        handler.close_connection = True
        return
    if fault == "cut before":
        handler.close_connection = True
        return
    if fault in _CODES:
        _answer(handler, int(fault), {}, f"<Error><Code>{_CODES[fault]}</Code></Error>".encode())
        return
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request(handler.command, handler.path, body, dict(handler.headers))
        answer = connection.getresponse()
        content = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        length = answer.getheader("Content-Length") or "0"
    if fault == "hold after":
        state.held.set()
        release.wait()
    if fault in ("hold after", "cut after"):
        handler.close_connection = True
        return
    if fault == "corrupt":
        content = bytes([content[0] ^ 1]) + content[1:]
    if fault == "bare etags":
        content = _QUOTED.sub(rb"<ETag>\1</ETag>", content)
    _answer(handler, answer.status, headers, content, length if handler.command == "HEAD" else None)


def _answer(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str],
    content: bytes,
    length: str | None = None,
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", length or str(len(content)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)

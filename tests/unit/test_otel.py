"""`ttp otel`, against a receiver of OTLP over HTTP on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from adaptor.launchers.cli import ttp
from adaptor.protocol.records import IncidentRecord, Phases
from tests.unit.test_serve import BEGAN, incident, job, status  # noqa: F401
from tests.unit.threads import LONG_S


class Receiver(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = 200
        self.headers: list[str | None] = []
        self.got: list[ExportTraceServiceRequest] = []
        self.came = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces" and self.server.answer == 200:
            self.server.headers.append(self.headers.get("X-Key"))
            self.server.got.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.server.came.release()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=7")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def test_an_incident_is_one_trace(
    job: Path,  # noqa: F811
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a")
    (path,) = (job / "incidents").iterdir()
    record = msgspec.structs.replace(incident(), phases=Phases(restart=2.0, load=3.0, first_step=0.5))
    path.write_bytes(msgspec.json.encode(record))
    assert ttp.main(["otel", str(job)]) == 0
    assert capsys.readouterr().out.endswith("1 of 1 incidents sent\n")
    assert ttp.main(["otel", str(job.parent), "--json"]) == 0  # the same trace is sent again
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"incident": record.id, "sent": True}
    ]
    first, second = receiver.got
    assert first == second
    assert receiver.headers == ["7", "7"]
    (of_resource,) = first.resource_spans
    resource = {attribute.key: attribute.value.string_value for attribute in of_resource.resource.attributes}
    assert (resource["service.name"], resource["team"]) == ("ttp", "a")
    root, *children = of_resource.scope_spans[0].spans
    assert (root.name, root.parent_span_id, root.status.message) == ("incident", b"", record.reason)
    assert {attribute.key for attribute in root.attributes} >= {
        "ttp.cause",
        "ttp.verdict",
        "ttp.rank",
        "ttp.job",
    }
    assert [mark.name for mark in root.events] == ["fault-noticed"]
    assert {child.trace_id for child in children} == {root.trace_id}
    assert {child.parent_span_id for child in children} == {root.span_id}
    assert len({child.span_id for child in (root, *children)}) == 4
    took = {
        child.name: (child.start_time_unix_nano / 1e9 - BEGAN, child.end_time_unix_nano / 1e9 - BEGAN)
        for child in children
    }
    assert took == {
        "restart": pytest.approx((51, 53), abs=1e-3),
        "load": pytest.approx((53, 56), abs=1e-3),
        "first_step": pytest.approx((56, 56.5), abs=1e-3),
    }
    assert root.end_time_unix_nano == children[-1].end_time_unix_nano


def test_incidents_are_followed_until_the_job_has_ended(job: Path, receiver: Receiver) -> None:  # noqa: F811
    (path,) = (job / "incidents").iterdir()
    with subprocess.Popen(
        [sys.executable, "-m", "adaptor.launchers.cli.ttp", "otel", str(job), "--follow"],
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        record = msgspec.structs.replace(incident(), phases=Phases(first_step=0.5))
        _replace(path, msgspec.json.encode(record))  # until then the incident is not complete
        _keep_on(job, receiver.came)
        _replace(job / "incidents" / f"{incident(2).id}.json", msgspec.json.encode(incident(2)))
        _replace(job / "status.json", msgspec.json.encode(status(state="ended")))
        stdout, _ = command.communicate(timeout=LONG_S)
    assert (command.returncode, stdout.splitlines()[-1]) == (0, "2 of 2 incidents sent")
    names = [[span.name for span in got.resource_spans[0].scope_spans[0].spans] for got in receiver.got]
    assert names == [["incident", "first_step"], ["incident"]]


def _keep_on(job: Path, came: threading.Semaphore) -> None:  # noqa: F811
    """Write the status of a running job, as ttprun does, until the receiver got a request."""
    for _ in range(int(LONG_S)):
        _replace(job / "status.json", msgspec.json.encode(status()))
        if came.acquire(timeout=1.0):
            return
    raise AssertionError("nothing was sent")


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_bytes(data)
    scratch.replace(path)


def test_a_collector_that_refuses(
    job: Path,  # noqa: F811
    receiver: Receiver,
    capfd: pytest.CaptureFixture[str],
) -> None:
    receiver.answer = 403
    assert ttp.main(["otel", str(job)]) == 1
    output = capfd.readouterr()
    assert "NOT TAKEN by the collector" in output.out
    assert output.out.endswith("0 of 1 incidents sent\n")
    assert "Traceback" not in output.err
    msgspec.json.decode(next((job / "incidents").iterdir()).read_bytes(), type=IncidentRecord)  # as it was


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "it must be a URL, such as http://collector:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[", "it must be a URL"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "ttp otel speaks http/protobuf alone"),
    ],
)
def test_variables_that_make_no_sense(
    name: str,
    value: str,
    message: str,
    job: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert ttp.main(["otel", str(job)]) == 2
    assert f"ttp: error: {name} is {value}: {message}" in capsys.readouterr().err

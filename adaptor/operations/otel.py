"""`ttp otel`: sends the incidents of a job to an OpenTelemetry collector, each as one trace.

The command reads the files that ttprun writes, in a separate process. OpenTelemetry's variables
OTEL_EXPORTER_OTLP_* (OTLP over HTTP), OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES configure the collector.
The ids of a trace are made from the incident's id: an incident that is sent twice has the same trace.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event as Mark
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from adaptor.operations import job_reader
from adaptor.operations.job_reader import JobFolderError, Summaries
from adaptor.operations.timeline import parts
from adaptor.protocol import records
from adaptor.protocol.records import IncidentRecord, unix
from adaptor.terminal import FINDING, OK, CtrlC
from adaptor.text import shown

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_SERVICE = "ttp"
# Seconds between two looks at the files of a running job; ttprun replaces its status as often.
_LOOK_S = 1.0
# Marks of a span: an incident of thousands of ranks has more, and collectors refuse large spans.
_MOST_MARKS = 1000
_SCOPE = InstrumentationScope("ttp-adaptor")


def check_variables() -> None:
    """Refuse values that the exporter would fail at or misread.

    Raises:
        JobFolderError: a variable names no URL, or a protocol other than OTLP over HTTP.
    """
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        try:
            parsed = urlsplit(value)
            good = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
        except ValueError:
            good = False
        if value and not good:
            raise JobFolderError(f"{name} is {shown(value)}: it must be a URL, such as http://collector:4318")
    for name in _PROTOCOLS:
        value = os.environ.get(name, "")
        if value not in ("", _HTTP):
            raise JobFolderError(f"{name} is {shown(value)}: ttp otel speaks {_HTTP} alone")


def send(job: Path, *, follow: bool, as_json: bool) -> int:
    """Send the incidents of a job; return the exit code: 1 if the collector refused one.

    Args:
        job: its folder.
        follow: wait for further incidents until the job has ended, and send each when it is completely known.
        as_json: print a line of JSON for each incident, in place of words.

    Raises:
        JobFolderError: the files of the job cannot be read.
    """
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # failures are reported below
    exporter = OTLPSpanExporter()
    shut_down: Callable[[], None] = exporter.shutdown  # which has no types
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # no variable has named it
        resource = resource.merge(Resource({SERVICE_NAME: _SERVICE}))
    summaries, sent_ids, refused = Summaries(), set[str](), 0
    try:
        with CtrlC() as ctrl_c:
            while True:
                is_last = not follow or not job_reader.goes_on(job)
                incident_summaries = summaries.of(job)
                for place, summary in enumerate(incident_summaries):
                    is_complete = summary.phases.first_step is not None or place + 1 < len(incident_summaries)
                    if summary.id in sent_ids or not (is_last or is_complete):
                        continue
                    sent_ids.add(summary.id)
                    incident = job_reader.read(job / records.INCIDENTS / f"{summary.id}.json", IncidentRecord)
                    taken = exporter.export(spans(incident, resource)) is SpanExportResult.SUCCESS
                    refused += not taken
                    if as_json:
                        print(json.dumps({"incident": summary.id, "sent": taken}), flush=True)
                    else:
                        result_text = "sent" if taken else "NOT TAKEN by the collector"
                        print(f"[ttp] incident {shown(summary.id)}: {result_text}", flush=True)
                if is_last:
                    break
                ctrl_c.raise_again()
                time.sleep(_LOOK_S)
    finally:
        shut_down()
    if not as_json:
        print(f"{len(sent_ids) - refused} of {len(sent_ids)} incidents sent")
    return FINDING if refused else OK


def spans(incident: IncidentRecord, resource: Resource) -> list[ReadableSpan]:
    """Return the trace of an incident: a span for the incident, and a child span for each known part.

    Args:
        incident: from its file.
        resource: the resource of the spans.
    """
    span_parts = list(parts(incident))
    began = min((unix(incident.began), *(since for _, since, _ in span_parts)))
    end_time = max((unix(incident.ended), *(since + took for _, since, took in span_parts)))
    root = _context(incident, "")
    marks = [
        Mark(
            event.type,
            {
                **event.data,
                **{
                    f"ttp.{name}": value
                    for name in ("node", "rank", "step")
                    if (value := getattr(event, name)) is not None
                },
            },
            _ns(unix(event.time)),
        )
        for event in incident.events[:_MOST_MARKS]
    ]
    about: dict[str, str | int | None] = {
        "ttp.job": incident.job,
        "ttp.incident": incident.id,
        "ttp.generation": incident.generation,
        "ttp.cause": incident.cause.kind,
        "ttp.verdict": incident.verdict,
        "ttp.rank": incident.blamed,
        "ttp.node": incident.node,
        "host.name": incident.host,
        "process.pid": incident.pid,
        "ttp.step": incident.step,
        "ttp.steps_lost": incident.steps_lost,
        "ttp.bytes": incident.bytes,
        "ttp.checkpoint": incident.checkpoint,
        "ttp.next_action": incident.next_action,
    }
    return [
        ReadableSpan(
            "incident",
            root,
            resource=resource,
            attributes={name: value for name, value in about.items() if value is not None},
            events=marks,
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, incident.reason),
            start_time=_ns(began),
            end_time=_ns(end_time),
            instrumentation_scope=_SCOPE,
        ),
        *(
            ReadableSpan(
                name,
                _context(incident, name),
                parent=root,
                resource=resource,
                kind=SpanKind.INTERNAL,
                start_time=_ns(since),
                end_time=_ns(since + took),
                instrumentation_scope=_SCOPE,
            )
            for name, since, took in span_parts
        ),
    ]


def _context(incident: IncidentRecord, part: str) -> SpanContext:
    trace, span = (
        hashlib.sha256("\0".join(("ttp", incident.job, incident.id, *name_parts)).encode()).digest()
        for name_parts in ((), ("span", part))
    )
    return SpanContext(
        int.from_bytes(trace[:16], "big"),
        int.from_bytes(span[:8], "big"),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _ns(at: float) -> int:
    return int(at * 1e9)

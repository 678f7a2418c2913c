"""Makes a trace of an incident in Chrome's format, for ui.perfetto.dev and chrome://tracing.

The trace has a row for the parts of the incident and, by nodes, a row for each rank: its orders, their
durations, and its events.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaptor.protocol.records import Event, Incident, unix

Entry = dict[str, object]

# The row of the job, and of an agent.
_JOB = 0
# By the order to a rank: the events that complete the order.
_TASKS = {
    "freeze": ("frozen",),
    "dump-ordered": ("written", "failed"),
    "regroup-ordered": ("joined", "failed"),
}
# By the part of an incident: the orders that begin the part.
_BEGIN = {
    "freeze": ("freeze",),
    "write": ("dump-ordered",),
    "regroup": ("replace", "regroup-ordered"),
}


def chrome_trace(incident: Incident) -> dict[str, object]:
    """Return the trace of an incident; its times are microseconds from its first event."""
    times = [unix(incident.began), *(unix(event.time) for event in incident.events)]
    began = min(times)
    entries = [*_names(incident), *_phases(incident), *_tasks(incident), *map(_instant, incident.events)]
    for entry in entries:
        if isinstance(at := entry.get("ts"), float):
            entry["ts"] = round(1e6 * (at - began), 3)
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"job": incident.job, "incident": incident.id, "reason": incident.reason},
    }


def _place(event: Event) -> Entry:
    """Return the row of an event: the process is the node, the thread the rank."""
    return {
        "pid": _JOB if event.node is None else event.node + 1,
        "tid": _JOB if event.rank is None else event.rank + 1,
    }


def _names(incident: Incident) -> Iterator[Entry]:
    yield {"ph": "M", "name": "process_name", "pid": _JOB, "args": {"name": f"job {incident.job}"}}
    yield {"ph": "M", "name": "thread_name", "pid": _JOB, "tid": _JOB, "args": {"name": "parts"}}
    hosts = {event.node: event.host or "" for event in incident.events if event.node is not None}
    for node, host in sorted(hosts.items()):
        name = f"node {node} {host}".rstrip()
        yield {"ph": "M", "name": "process_name", "pid": node + 1, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_name", "pid": node + 1, "tid": _JOB, "args": {"name": "agent"}}
    ranks = {(event.node, event.rank) for event in incident.events if event.rank is not None}
    for on, rank in sorted(((-1 if on is None else on), rank or 0) for on, rank in ranks):
        blamed = ", blamed" if rank == incident.blamed else ""
        name = f"rank {rank}{blamed}"
        yield {"ph": "M", "name": "thread_name", "pid": on + 1, "tid": rank + 1, "args": {"name": name}}


def parts(incident: Incident) -> Iterator[tuple[str, float, float]]:
    """Yield the known parts of an incident: the field of `Phases`, its begin (Unix), its seconds."""
    phases = incident.phases
    frozen = _first(incident, ("freeze",))
    begin = {name: _first(incident, orders) for name, orders in _BEGIN.items()}
    begin["publish"] = max(
        (unix(event.time) for event in incident.events if event.type == "publish-ordered"), default=None
    )
    begin["detect"] = None if frozen is None or phases.detect is None else frozen - phases.detect
    at = unix(incident.ended)
    for name in ("restart", "load", "first_step"):
        begin[name] = at
        at += getattr(phases, name) or 0.0
    for name, since in begin.items():
        took = getattr(phases, name)
        if since is not None and took is not None:
            yield name, since, took


def _phases(incident: Incident) -> Iterator[Entry]:
    for name, since, took in parts(incident):
        yield _span(name.replace("_", " "), since, took, {"pid": _JOB, "tid": _JOB})


def _first(incident: Incident, types: tuple[str, ...]) -> float | None:
    return min((unix(event.time) for event in incident.events if event.type in types), default=None)


def _tasks(incident: Incident) -> Iterator[Entry]:
    """Yield the time of each rank from an order to its answer."""
    begun_events: dict[tuple[int, str], Event] = {}
    for event in sorted(incident.events, key=lambda event: unix(event.time)):
        if event.rank is None:
            continue
        if event.type in _TASKS:
            begun_events[event.rank, event.type] = event
            continue
        for order, answers in _TASKS.items():
            if event.type in answers and (begin := begun_events.pop((event.rank, order), None)) is not None:
                since = unix(begin.time)
                yield _span(order, since, unix(event.time) - since, _place(event))


def _span(name: str, since: float, took: float, place: Entry) -> Entry:
    return {"ph": "X", "name": name, "ts": since, "dur": round(1e6 * took, 3), **place}


def _instant(event: Event) -> Entry:
    about = {**event.data, **({"step": event.step} if event.step is not None else {})}
    return {"ph": "i", "s": "t", "name": event.type, "ts": unix(event.time), **_place(event), "args": about}

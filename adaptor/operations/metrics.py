"""The metrics of a job for Prometheus, from the new parts of its files at each scrape.

docs/operations.md has the table.

No metric has a label for each rank: a job of thousands would be thousands of series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from adaptor.operations.job_reader import CheckpointSummary, JobReader
from adaptor.protocol.records import IncidentSummary, Phases, Status, StepTimes, unix

# From the milliseconds of the notice of a death to the minutes of a restart of a large job.
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_RANKS = ("starting", "training", "ended")


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

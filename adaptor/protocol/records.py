"""The files of a job that are for operators, and their schemas.

Below TTP_LOG_PATH/<job>/, written by the `ttprun` of the node with the controller:

status.json          the state of the job; replaced each second
events.jsonl         a line for each event, appended
incidents/<id>.json  a file for each incident that has ended

Times are RFC 3339 in UTC, durations seconds. None means unknown or not applicable. A field is never removed
and never changes its meaning under one name of a schema; fields may be added.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
INCIDENTS = "incidents"
# A status is replaced each second. An older status means that ttprun is gone, hangs or cannot write; a loaded
# machine and a slow file system take some seconds.
STALE_S = 15.0
# Characters that are replaced in names of folders.
_UNUSUAL = re.compile(r"[^\w.@+=,-]+")

# In the data of an event `training`.
LOAD = "load"
# In the data of an event `fault-noticed` of a hang.
STILL = "still"


class Event(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """An event: a line of events.jsonl, and an element of an incident's `events`.

    Attributes:
        time: when, as far as the process knew that noticed the event
        job: the name of the job's folder
        generation: from 1 on: how often workers were started
        incident: the number of the open incident; None between incidents
        type: a word such as `fault-noticed`, `freeze`, `published`, `restart`
        node, host, rank, pid: where
        step: the step of the event
        data: further data; `detail` in words; of type `training`, `load`: seconds of loading a checkpoint
            before; of type `fault-noticed`, of a hang, `still`: seconds without any movement
    """

    time: str
    job: str
    generation: int
    incident: int | None
    type: str
    node: int | None = None
    host: str | None = None
    rank: int | None = None
    pid: int | None = None
    step: int | None = None
    data: dict[str, str] = {}


CauseKind = Literal[
    "signal",
    "exit",
    "exception",
    "hang",
    "told-to-end",
    "node-lost",
    "nodes-join",
    "corruption",
    "error",
    "unknown",
]


class Cause(msgspec.Struct, kw_only=True, frozen=True):
    """The first failure.

    Attributes:
        kind: signal: a signal ended a process; exit: a process exited; exception: its script raised; hang:
            nothing moved; told-to-end: by a signal to ttprun or a worker; node-lost: the agent of a node is
            gone; nodes-join: no failure, more nodes have come; corruption: the holders of the state differ;
            error: of ttprun itself
        signal: its name, for kind signal and told-to-end
        exit_code: of the process, for kind exit
        exception: type and place, for kind exception
        out_of_memory: for kind signal, if the kernel has ended the process for want of memory: the limit of
            its control group and the peak, as far as known
    """

    kind: CauseKind
    signal: str | None = None
    exit_code: int | None = None
    exception: str | None = None
    out_of_memory: str | None = None


class Phases(msgspec.Struct, kw_only=True):
    """The durations of the parts of an incident, in seconds.

    Attributes:
        detect: from the notice of a node's agent to the controller's first order; for a hang, the seconds
            without any movement
        freeze: from the first order to stop to the last answer
        write: from the first order to write to the last file written
        publish: from the order to publish to the checkpoint under its final name
        regroup: of an online recovery: from the first order to replace or regroup to its end
        restart: from the verdict until every worker had been started again
        load: from the restart until training continued: imports, model, data, checkpoint
        first_step: from then to the first finished step
    """

    detect: float | None = None
    freeze: float | None = None
    write: float | None = None
    publish: float | None = None
    regroup: float | None = None
    restart: float | None = None
    load: float | None = None
    first_step: float | None = None


class Versions(msgspec.Struct, kw_only=True, frozen=True):
    """The versions on the node that wrote the file."""

    adaptor: str
    torch: str
    python: str


class IncidentRecord(msgspec.Struct, kw_only=True):
    """The file of an incident: written with the verdict, and again when the job has continued.

    Attributes:
        id: of the file
        incident: its number in this job
        began, ended: the notice of the fault, and the verdict
        cause, reason: the first failure; the printed line
        blamed: the rank to blame, with its node, host and pid; without a rank, host and pid are those of a
            ttprun that was told to end
        failed: ranks that failed by themselves, the first one first
        silent: ranks that did not answer the order to stop
        verdict: saved: a checkpoint of `step` was written; recovered: training continued, no restart;
            nothing: no finished step to save; lost: the state could not be saved
        newest_step: the newest finished step of a rank
        steps_lost: how many of the finished steps must be trained again: since the saved step or, if the
            state is lost, since the newest checkpoint, or all without a checkpoint; since the step from which
            the job has continued, once known. None: unknown, for instance if the disk with the checkpoints
            hangs
        checkpoint: the written folder, and `bytes` in its files
        exit_code: of ttprun, if the job ends
        next_action: the next action, in words
        not_started_again: why remaining restarts are not used
        runbook: the section of docs/runbook.md
        ranks: the ranks in `events`
        collectives: of a hang: which rank misses which collective, if torch has recorded it
    """

    schema: Literal["ttp.incident/1"] = "ttp.incident/1"
    id: str
    job: str
    generation: int
    incident: int
    began: str
    ended: str
    cause: Cause
    reason: str
    blamed: int | None
    node: int | None
    host: str | None
    pid: int | None
    failed: list[int]
    silent: list[int]
    verdict: Literal["saved", "recovered", "nothing", "lost"]
    step: int | None
    newest_step: int | None
    steps_lost: int | None
    phases: Phases
    checkpoint: str | None
    bytes: int | None
    exit_code: int | None
    next_action: str
    not_started_again: str
    runbook: str
    versions: Versions
    ranks: list[int]
    events: list[Event]
    collectives: list[str] = []


class IncidentSummary(msgspec.Struct, kw_only=True, frozen=True):
    """The counted fields of an incident: with many ranks its events are hundreds of megabytes."""

    id: str
    incident: int
    began: str
    ended: str
    cause: Cause
    verdict: str
    step: int | None
    steps_lost: int | None
    phases: Phases
    checkpoint: str | None
    bytes: int | None


class StepTimes(msgspec.Struct, kw_only=True):
    """The durations of steps since this ttprun has had the controller, as a histogram.

    A step lasts from the end of the step before: evaluations, saves and waiting for data are included. A step
    with an incident, and the first step after a start of the workers, are not counted.

    Attributes:
        limits: upper limits of the buckets, in seconds
        counts: steps in each bucket alone; one more than limits: the last has the steps above all limits
        sum: seconds of all of them
    """

    limits: list[float]
    counts: list[int]
    sum: float


class Status(msgspec.Struct, kw_only=True):
    """The file status.json.

    Attributes:
        time: when it was written; if older than some seconds the job has ended, hangs, or cannot write
        state: starting: workers run, not all ranks train yet; training; incident: a fault is being handled;
            restarting: after the verdict; ended: ttprun has ended
        node, host, pid: of the ttprun with the controller
        term: of the controller; 0 for the first one
        restarts: the number of restarts; `max_restarts` is their limit
        nodes_lost: the number of nodes whose agents are gone; `lost_nodes` are their numbers
        ranks: in the job; `ranks_training` have begun to train, `ranks_ended` have ended
        step: the newest step that ranks of this node have finished, at `step_time`
        protected: whether all ranks train state that can be saved; None before training
        why_not: why the job is not protected
        incidents: the number of ended incidents; `last_incident` is the id of the newest file
        open_incident: the words about the incident that is being handled (state: incident); '' before they
            are known
        save: the folder of checkpoints
        script: the script or module of the training, as the command names it
        shard_holders: the smallest number of ranks that hold a shard of the state; None while not all ranks
            train
        step_times: durations of steps
        spare_nodes: nodes that wait, beyond `nodes`, to take the place of a lost node
        spent: the uses of time of the first rank of this node, in seconds, in the whole job: productive
            (steps made for the first time), wasted (steps made again), data (waiting for a batch),
            evaluation, save, other (logs, phases of other names)
        host_copy_step: with TTP_HOST_COPY the newest step of which each rank of this node has a copy in host
            memory, and the next node, too, if any, at `host_copy_time`; None: no copy
        failed_saves: successive failed saves of the framework; `failed_save` is the newest, with its reason
        drill_step: the step of the newest drill (TTP_DRILL_EVERY), at `drill_time`; `drill_problem`: why the
            step could not have been saved without one rank, "" if it could; None: no drill
        slow_rank: the rank whose forward and backward passes take longest, if much longer than those of ranks
            with the same part of the model; `slow_score` is the ratio
    """

    schema: Literal["ttp.status/1"] = "ttp.status/1"
    time: str
    job: str
    state: Literal["starting", "training", "incident", "restarting", "ended"]
    generation: int
    node: int
    host: str
    pid: int
    term: int
    restarts: int
    max_restarts: int
    nodes: int
    nodes_lost: int
    ranks: int
    ranks_training: int
    ranks_ended: int
    step: int | None
    step_time: str | None
    protected: bool | None
    why_not: str
    incidents: int
    last_incident: str | None
    save: str
    script: str = ""
    lost_nodes: list[int] = []
    shard_holders: int | None = None
    step_times: StepTimes | None = None
    spare_nodes: int = 0
    spent: dict[str, float] = {}
    host_copy_step: int | None = None
    host_copy_time: str | None = None
    failed_saves: int = 0
    failed_save: str = ""
    drill_step: int | None = None
    drill_time: str | None = None
    drill_problem: str = ""
    slow_rank: int | None = None
    slow_score: float | None = None
    open_incident: str = ""


class Notice(msgspec.Struct, kw_only=True, frozen=True):
    """The notice to a target of TTP_NOTIFY.

    Attributes:
        type: incident: with the verdict; resumed: the first step afterwards is finished; save: saves begin to
            fail, or succeed again; ended: ttprun has ended
        time: when
        job: the name of the job's folder
        text: one line for people
        incident: from its file, without `events` and `ranks`; None for `save` and `ended`
    """

    schema: Literal["ttp.notice/1"] = "ttp.notice/1"
    type: Literal["incident", "resumed", "save", "ended"]
    time: str
    job: str
    text: str
    incident: IncidentRecord | None


SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "incident": IncidentRecord,
    "status": Status,
    "event": Event,
    "notice": Notice,
}


def name_of(job: str) -> str:
    """Return the name of the folder of a job, from the user's id of the job."""
    return _UNUSUAL.sub("_", job).strip(".") or "_"


def schema(name: str) -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a file: `incident`, `status`, or `event` for a line of events."""
    schema_body: dict[str, object] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema_body.update(msgspec.json.schema(SCHEMAS[name]))
    return schema_body


def utc(at: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, to the microsecond."""
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc).isoformat(timespec="microseconds")


def unix(time: str) -> float:
    """Return the Unix seconds of a text of `utc`."""
    return datetime.datetime.fromisoformat(time).timestamp()


@dataclass(frozen=True)
class Replicas:
    """The costs and gains of one kind of replicas.

    Args:
        kind: `split`, `mirror`, `whole` (every rank has all) or `none`.
        chosen: whether the job would have it.
        memory: bytes more on each rank; None where the size of the model is not known.
        local_copy: bytes more on each rank with TTP_LOCAL_COPY.
        host_copy: bytes of host memory for each rank with TTP_HOST_COPY.
        sent: bytes that each rank sends more in a step.
        survives: what may be lost, in words.
        any_rack: whether any 1 rack may be lost; None where the racks are not known.
        better: if not: nodes in an order in which it may be; None where none was found.
    """

    kind: str
    chosen: bool
    memory: float | None
    local_copy: float | None
    host_copy: float | None
    sent: float | None
    survives: str
    any_rack: bool | None = None
    better: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ProtectionPlan:
    """The costs and gains of protection.

    Args:
        ranks, nodes: of the job.
        parameters: of the rank that has most; None where the size of the model is not known, and so below.
        training: bytes of weights, gradients and optimizer state on that rank without the adaptor.
        replicas: each kind that the layout allows.
        save: bytes that a save writes, by all ranks together.
        writer: bytes of host memory of a rank that gathers the state of its group for a save.
        remedy: the setting with which a death would cost less, in words; empty: none is needed.
        makes_copies: whether ranks copy their state to host memory.
    """

    ranks: int
    nodes: int
    parameters: float | None
    training: float | None
    replicas: tuple[Replicas, ...]
    save: float | None
    writer: float | None
    remedy: str = ""
    makes_copies: bool = False


class DrillRequest(msgspec.Struct):
    """The request of `ttp drill` to end `rank` of the job with the folder `job`; None: a random rank."""

    job: str
    rank: int | None = None


class DrillAnswer(msgspec.Struct):
    """The answer to `ttp drill`: `rank` is ended, or `refusal` says why not."""

    rank: int
    refusal: str = ""


def drill_address(pid: int) -> str:
    """Return the name of the socket on which a `ttprun` answers `ttp drill`."""
    return f"\0ttp-drill-{pid}"

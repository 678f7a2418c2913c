"""The files of a job that are for operators, and their schemas.

Below TTP_LOG_PATH/<job>/, written by the `ttprun` of the node that has the controller:

status.json          what the job does now; replaced each second
events.jsonl         one line for each thing that happened, appended
incidents/<id>.json  one file for each incident that has ended

`Plan` is a part of the report of `python -m adaptor report --json`, which `ttp plan` reads.

Times are RFC 3339 in UTC, durations seconds. None stands for what is not known, or does not apply. A field is
never removed and never changes its meaning under one name of a schema; new fields may come.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Literal

import msgspec

# In the data of an event `training`.
LOAD = "load"
# In the data of an event `fault-noticed` of a hang.
STILL = "still"


class Event(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Something that happened: a line of events.jsonl, and an element of an incident's `events`.

    Attributes:
        time: when, as far as the process knew that noticed it
        job: the name of the job's folder
        generation: from 1 on: how often workers were started
        incident: the number of the incident that was open; None between incidents
        type: what: a word such as `fault-noticed`, `freeze`, `published`, `restart`
        node, host, rank, pid: where
        step: the step that it is about
        data: what else is known; `detail` in words; of type `training`, `load`: seconds in which a checkpoint
            was loaded before; of type `fault-noticed`, of a hang, `still`: seconds in which nothing moved
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
    "signal", "exit", "exception", "hang", "told-to-end", "node-lost", "nodes-join", "error", "unknown"
]


class Cause(msgspec.Struct, kw_only=True, frozen=True):
    """The first failure.

    Attributes:
        kind: signal: a process was ended by one; exit: it exited; exception: its script raised; hang: nothing
            moved; told-to-end: by a signal to ttprun or a worker; node-lost: its agent is gone;
            nodes-join: nobody has failed, more nodes are there; error: of ttprun itself
        signal: its name, for kind signal and told-to-end
        exit_code: of the process, for kind exit
        exception: type and place, for kind exception
    """

    kind: CauseKind
    signal: str | None = None
    exit_code: int | None = None
    exception: str | None = None


class Phases(msgspec.Struct, kw_only=True):
    """The durations of the parts of an incident, in seconds.

    Attributes:
        detect: from when a node's agent noticed the fault to the controller's first order; for a hang, the
            seconds in which nothing had moved
        freeze: from the first order to stop to the last answer
        write: from the first order to write to the last file written
        publish: from the order to publish to the checkpoint under its final name
        regroup: of an online recovery: from the first order to replace or regroup to its end
        restart: from the verdict until every worker had been started again
        load: from then until training went on: imports, model, data, checkpoint
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


class Incident(msgspec.Struct, kw_only=True):
    """The file of an incident: written with the verdict, and again when the job has gone on.

    Attributes:
        id: of the file
        incident: its number in this job
        began, ended: when the fault was noticed, and when the verdict was given
        cause, reason: the first failure; the line that was printed
        blamed: the rank to blame, with its node, host and pid; where there is none, host and pid are those of
            a ttprun that was told to end
        failed: ranks that failed by themselves, the first one first
        silent: ranks that did not answer the order to stop
        verdict: saved: a checkpoint of `step` was written; recovered: training went on, no restart; nothing:
            no finished step to save; lost: the state could not be saved
        newest_step: the newest step that a rank had finished
        steps_lost: how many of them must be trained again: since the step that is saved or, where the state
            is lost, since the newest checkpoint, or all where there is none; since the step that the job has
            gone on from, as soon as it has. None: nobody knows, as where the disk with the checkpoints hangs
        checkpoint: the folder that was written, and `bytes` in its files
        exit_code: that ttprun ends with, if the job ends
        next_action: what happens now, in words
        not_started_again: why restarts that were left are not used
        runbook: the section of docs/runbook.md about it
        ranks: that `events` names
        collectives: of a hang: which rank misses which collective, where torch has recorded it
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
    """The fields of an incident that are counted: with many ranks its events are hundreds of megabytes."""

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

    A step lasts from the end of the one before it: evaluations, saves and waiting for data are in it. The one
    in which an incident was, and the first one after a start of the workers, are not counted.

    Attributes:
        limits: upper limits of the buckets, in seconds
        counts: steps in each bucket alone; one more than limits: the last one has the steps above all limits
        sum: seconds of all of them
    """

    limits: list[float]
    counts: list[int]
    sum: float


class Status(msgspec.Struct, kw_only=True):
    """The file status.json.

    Attributes:
        time: when it was written; if it is older than some seconds the job has ended, hangs, or cannot write
        state: starting: workers run, and not all train yet; training; incident: a fault is being handled;
            restarting: there is a verdict; ended: ttprun has ended
        node, host, pid: of the ttprun that has the controller
        term: of the controller; 0 for the first one
        restarts: that were made, and `max_restarts` that may be made
        nodes_lost: nodes whose agents are gone; `lost_nodes` are their numbers
        ranks: in the job; `ranks_training` have begun to train, `ranks_ended` have ended
        step: the newest step that ranks of this node have finished, at `step_time`
        protected: whether all ranks train what can be saved; None before training
        why_not: why the job is not protected
        incidents: that have ended in this job; `last_incident` is the id of the newest one's file
        open_incident: the words about the incident that is being handled (state: incident); '' before they
            are known
        save: the folder of checkpoints
        script: the script or module that is trained, as the command names it
        shard_holders: how many ranks hold that shard of the state which the fewest hold; None while not all
            ranks train
        step_times: durations of steps
        spare_nodes: nodes that wait, beyond `nodes`, to take the place of one that is lost
        spent: what the first rank of this node has spent its time on, in seconds, in the whole job:
            productive (steps that were made for the first time), wasted (steps that were made again), data
            (it waited for a batch), evaluation, save, other (logs, phases of other names)
        host_copy_step: with TTP_HOST_COPY the newest step of which each rank of this node has a copy in host
            memory, and the next node, too, where there is one, at `host_copy_time`; None: there is none
        failed_saves: saves of the framework that have failed one after the other; `failed_save` is the newest
            one, with its reason
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
    open_incident: str = ""


class Notice(msgspec.Struct, kw_only=True, frozen=True):
    """The notice that a target of TTP_NOTIFY gets.

    Attributes:
        type: incident: with the verdict; resumed: the first step after it is finished; save: saves begin to
            fail, or succeed again; ended: ttprun has
        time: when
        job: the name of the job's folder
        text: one line for people
        incident: as its file has it, without `events` and `ranks`; None for `save` and `ended`
    """

    schema: Literal["ttp.notice/1"] = "ttp.notice/1"
    type: Literal["incident", "resumed", "save", "ended"]
    time: str
    job: str
    text: str
    incident: Incident | None


SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "incident": Incident,
    "status": Status,
    "event": Event,
    "notice": Notice,
}


def schema(name: str) -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a file: `incident`, `status`, or `event` for a line of events."""
    schema_body: dict[str, object] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema_body.update(msgspec.json.schema(SCHEMAS[name]))
    return schema_body


def utc(at: float) -> str:
    """Return a time as RFC 3339 in UTC, to the microsecond.

    Args:
        at: Unix seconds.
    """
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc).isoformat(timespec="microseconds")


def unix(time: str) -> float:
    """Return the Unix seconds of what `utc` has made."""
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
class Plan:
    """The costs and gains of protection.

    Args:
        ranks, nodes: of the job.
        parameters: of the rank that has most; None where the size of the model is not known, and so below.
        training: bytes of weights, gradients and optimizer state on that rank without the adaptor.
        replicas: each kind that the layout allows.
        save: bytes that a save writes, by all ranks together.
        writer: bytes of host memory of a rank that gathers the state of its group for a save.
        remedy: the setting with which a death would cost less, in words; empty: none is needed.
    """

    ranks: int
    nodes: int
    parameters: float | None
    training: float | None
    replicas: tuple[Replicas, ...]
    save: float | None
    writer: float | None
    remedy: str = ""

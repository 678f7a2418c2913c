"""Volcano jobs with the plug-ins `env` and `svc`: one `ttprun` in each pod.

`env` sets VC_TASK_INDEX, the number of a pod in its task; `svc` sets VC_<TASK>_HOSTS for each task of the
job. Nothing tells a pod the name of its task. With one task there is no question; with `master` and `worker`,
the tasks of the plug-in `pytorch`, the pod's own name does, which is the first part of its host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from adaptor.launchers.platforms.machine import Machine
from adaptor.launchers.platforms.reading import (
    PlatformError,
    Reading,
    Value,
    hosts,
    number,
    rank,
    require_different,
    shown,
)

NAME = "volcano"
TITLE = "Volcano"
_INDEX = "VC_TASK_INDEX"
_HOSTS = re.compile(r"VC_[A-Z0-9_]+_HOSTS", re.ASCII)
_OF_PYTORCH = ["VC_MASTER_HOSTS", "VC_WORKER_HOSTS"]


def is_here(environ: Mapping[str, str]) -> bool:
    """Return whether Volcano has made this environment, and not ModelArts, which has Volcano below it."""
    return _INDEX in environ and bool(_tasks(environ)) and "MA_NUM_HOSTS" not in environ


def read(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return what Volcano tells. Raises PlatformError for values that are wrong or disagree."""
    tasks = _tasks(environ)
    if not tasks:
        raise PlatformError("no variable VC_<TASK>_HOSTS is set: it comes from the job's plug-in svc")
    for name in tasks:
        _require_count(environ, name)
    index = number(environ, _INDEX)
    if len(tasks) == 1:
        host_names = hosts(environ, tasks[0])
        nodes = Value(len(host_names), tasks[0])
        node_rank = rank(environ, _INDEX, nodes)
    elif tasks == _OF_PYTORCH:
        host_names = [name for task in tasks for name in hosts(environ, task)]
        require_different(host_names, " and ".join(tasks))
        nodes = Value(len(host_names), " and ".join(tasks))
        node_rank = Value(_own(host_names, nodes.source, machine), f"{nodes.source}, by the name of this pod")
        _require_index(environ, index, node_rank.value)
    else:
        raise PlatformError(
            f"{', '.join(tasks)} are set: which tasks train is known for one task, or for master and worker"
        )
    return Reading(
        NAME, nodes, node_rank, address=Value(host_names[0], f"the first of {tasks[0]}"), may_come=True
    )


def _tasks(environ: Mapping[str, str]) -> list[str]:
    return sorted(name for name in environ if _HOSTS.fullmatch(name))


def _require_count(environ: Mapping[str, str], name: str) -> None:
    """Compare the list of hosts with the number beside it (VC_<TASK>_NUM)."""
    count = name.removesuffix("HOSTS") + "NUM"
    if count not in environ:
        return
    stated_count, listed = number(environ, count).value, len(hosts(environ, name))
    if stated_count != listed:
        raise PlatformError(f"{count} is {stated_count}, but {name} has {listed} hosts")


def _own(host_names: list[str], source: str, machine: Machine) -> int:
    """Return which of the hosts this pod is."""
    own_name = machine.hostname.partition(".")[0]
    places = [n for n, name in enumerate(host_names) if name.partition(".")[0] == own_name]
    if len(places) != 1:
        raise PlatformError(f"{source} do not have this pod, {shown(own_name)}, once")
    return places[0]


def _require_index(environ: Mapping[str, str], index: Value[int], node_rank: int) -> None:
    masters = len(hosts(environ, _OF_PYTORCH[0]))
    place = node_rank - masters if node_rank >= masters else node_rank
    if index.value != place:
        raise PlatformError(
            f"{_INDEX} is {index.value}, but by its name this pod is number {place} of its task"
        )

"""Slurm: one `ttprun` on each node of a job step (`srun`), or in the batch script of a job on one node."""

from __future__ import annotations

from collections.abc import Mapping

from adaptor.launchers.platforms import hostlist
from adaptor.launchers.platforms.machine import Machine
from adaptor.launchers.platforms.reading import PlatformError, Reading, Value, host, number, rank, shown

NAME = "slurm"
TITLE = "Slurm"
_STEP = "SLURM_STEP_ID"
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_GPUS = "SLURM_GPUS_ON_NODE"
_PARTS = "SLURM_HET_SIZE"
# Of the step; then of the job, which are the same where a step has all of its nodes.
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def is_here(environ: Mapping[str, str]) -> bool:
    """Return whether this process is of a job of Slurm."""
    return "SLURM_JOB_ID" in environ


def read(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return what Slurm tells. Raises PlatformError for values that are wrong or disagree."""
    in_step = _STEP in environ
    if _PARTS in environ and number(environ, _PARTS).value > 1:
        raise PlatformError(f"this is a heterogeneous job ({_PARTS}): each component counts its own nodes")
    nodes = number(environ, _first(environ, _NODES[0 if in_step else 1 :]), least=1)
    gpus = number(environ, _GPUS) if _GPUS in environ else None
    per_node = gpus if gpus is not None and gpus.value else None
    if not in_step and nodes.value > 1:
        raise PlatformError(
            f"this job has {nodes.value} nodes ({nodes.source}), and this process is in no step of it: start"
            " ttprun with srun, as srun --ntasks-per-node=1 ttprun ..."
        )
    if in_step:
        _require_one_task(environ)
    if nodes.value == 1:
        return Reading(NAME, nodes, Value(0, nodes.source), per_node)
    name = _first(environ, _HOSTS)
    host_names = hostlist.expand(environ[name], name)
    if len(host_names) != nodes.value:
        raise PlatformError(f"{nodes.source} is {nodes.value}, but {name} has {len(host_names)} hosts")
    first = Value(host(host_names[0], name), f"the first of {name}")
    return Reading(NAME, nodes, rank(environ, "SLURM_NODEID", nodes), per_node, first)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if name in environ:
            return name
    raise PlatformError(f"{names[0]} is not set")


def _require_one_task(environ: Mapping[str, str]) -> None:
    """Refuse a step with several tasks on a node; `1(x4)` is one on each of four."""
    tasks = environ.get(_TASKS, "1")
    if any(task_count.partition("(")[0].strip() != "1" for task_count in tasks.split(",")):
        raise PlatformError(
            f"{_TASKS} is {shown(tasks)}: ttprun is started once on each node, with srun --ntasks-per-node=1"
        )

"""The schedulers that start `ttprun` (Slurm, Open MPI, Volcano, Kubernetes operators), and their variables.

Each reader returns a `Reading` and raises PlatformError for values that are wrong or disagree.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from adaptor.launchers.platforms.reading import (
    Machine,
    PlatformError,
    Reading,
    Value,
    host,
    hosts,
    number,
    port,
    rank,
    require_different,
    shown,
)

# Slurm's own limit for one range (MAX_RANGE in its hostlist.c).
MAX_HOSTS = 65536
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)

_MASTER_ADDRESS = "MASTER_ADDR"
_MASTER_PORT = "MASTER_PORT"

_ASCEND_CARDS = "LOCAL_WORLD_SIZE"
_ASCEND_WORLD_SIZE = "WORLD_SIZE"

_MODELARTS_NODES = "MA_NUM_HOSTS"
_MODELARTS_HOSTS = "VC_WORKER_HOSTS"
_MODELARTS_CARDS = "MA_NUM_GPUS"

_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
_MPI_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"

_SLURM_STEP = "SLURM_STEP_ID"
_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_SLURM_GPUS = "SLURM_GPUS_ON_NODE"
_SLURM_COMPONENTS = "SLURM_HET_SIZE"
# The variable of the step first; those of the job are the same where a step has all nodes of the job.
_SLURM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_SLURM_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

_TASK_INDEX = "VC_TASK_INDEX"
_VOLCANO_HOSTS = re.compile(r"VC_[A-Z0-9_]+_HOSTS", re.ASCII)
_PYTORCH_TASKS = ["VC_MASTER_HOSTS", "VC_WORKER_HOSTS"]


def is_ascend_operator(environ: Mapping[str, str]) -> bool:
    """Return whether the Ascend operator has made this environment, for PyTorch."""
    return "MINDX_TASK_ID" in environ and _ASCEND_CARDS in environ


def read_ascend_operator(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return the reading of the Ascend operator of MindCluster (AscendJob): one `ttprun` in each pod.

    The operator sets RANK to the number of the pod and WORLD_SIZE to the number of cards of all pods.
    PyTorchJob and Volcano's plug-in set WORLD_SIZE to the number of pods, but set no LOCAL_WORLD_SIZE.
    """
    per_node = number(environ, _ASCEND_CARDS, least=1)
    everything = number(environ, _ASCEND_WORLD_SIZE, least=1)
    if everything.value % per_node.value:
        raise PlatformError(
            f"{_ASCEND_WORLD_SIZE} is {everything.value} and {_ASCEND_CARDS} {per_node.value}:"
            " all nodes must have as many cards"
        )
    nodes = Value(everything.value // per_node.value, f"{_ASCEND_WORLD_SIZE} / {_ASCEND_CARDS}")
    node_rank = rank(environ, "RANK", nodes)
    if nodes.value == 1:
        return Reading("ascend", nodes, node_rank, per_node)
    if _MASTER_ADDRESS not in environ:
        raise PlatformError(f"{_MASTER_ADDRESS} is not set")
    return Reading(
        "ascend",
        nodes,
        node_rank,
        per_node,
        Value(host(environ[_MASTER_ADDRESS], _MASTER_ADDRESS), _MASTER_ADDRESS),
        port(environ, _MASTER_PORT) if _MASTER_PORT in environ else None,
        may_come=True,
    )


def is_modelarts(environ: Mapping[str, str]) -> bool:
    """Return whether ModelArts has made this environment."""
    return _MODELARTS_NODES in environ


def read_modelarts(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return the reading of ModelArts (and AICC): one `ttprun` in each container.

    Source: "Managing Environment Variables of a Training Container" in the documentation of ModelArts.
    """
    nodes = number(environ, _MODELARTS_NODES, least=1)
    cards = number(environ, _MODELARTS_CARDS) if _MODELARTS_CARDS in environ else None
    # Containers without accelerators have 0.
    per_node = cards if cards is not None and cards.value > 0 else None
    if nodes.value == 1:  # the documentation gives VC_TASK_INDEX no meaning for one node
        return Reading("modelarts", nodes, Value(0, _MODELARTS_NODES), per_node)
    host_names = hosts(environ, _MODELARTS_HOSTS)
    if len(host_names) != nodes.value:
        raise PlatformError(
            f"{_MODELARTS_NODES} is {nodes.value}, but {_MODELARTS_HOSTS} has {len(host_names)} hosts"
        )
    return Reading(
        "modelarts",
        nodes,
        rank(environ, _TASK_INDEX, nodes),
        per_node,
        Value(host_names[0], f"the first of {_MODELARTS_HOSTS}"),
        may_come=True,
    )


def is_openmpi(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun of Open MPI has started this process."""
    return _MPI_SIZE in environ


def read_openmpi(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return the reading of Open MPI (mpirun, the MPI operator of Kubeflow): one `ttprun` on each node.

    The documented variables of Open MPI have sizes and ranks, and no address.
    """
    nodes = number(environ, _MPI_SIZE, least=1)
    local_size = number(environ, _MPI_LOCAL_SIZE, least=1)
    if local_size.value != 1:
        raise PlatformError(
            f"mpirun starts {local_size.value} processes on this node ({_MPI_LOCAL_SIZE}): start ttprun once"
            " on each node, as with mpirun --map-by ppr:1:node"
        )
    address = None
    if _MASTER_ADDRESS in environ:
        address = Value(host(environ[_MASTER_ADDRESS], _MASTER_ADDRESS), _MASTER_ADDRESS)
    return Reading("openmpi", nodes, rank(environ, "OMPI_COMM_WORLD_RANK", nodes), address=address)


def is_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in environ


def read_slurm(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return the reading of Slurm: one `ttprun` per node of a step (`srun`), or in the script of one node."""
    in_step = _SLURM_STEP in environ
    if _SLURM_COMPONENTS in environ and number(environ, _SLURM_COMPONENTS).value > 1:
        raise PlatformError(
            f"this is a heterogeneous job ({_SLURM_COMPONENTS}): each component counts its own nodes"
        )
    nodes = number(environ, _first_set(environ, _SLURM_NODES[0 if in_step else 1 :]), least=1)
    gpus = number(environ, _SLURM_GPUS) if _SLURM_GPUS in environ else None
    per_node = gpus if gpus is not None and gpus.value else None
    if not in_step and nodes.value > 1:
        raise PlatformError(
            f"this job has {nodes.value} nodes ({nodes.source}), and this process is in no step of it: start"
            " ttprun with srun, as srun --ntasks-per-node=1 ttprun ..."
        )
    if in_step:
        _require_one_task(environ)
    if nodes.value == 1:
        return Reading("slurm", nodes, Value(0, nodes.source), per_node)
    name = _first_set(environ, _SLURM_HOSTS)
    host_names = expand_host_list(environ[name], name)
    if len(host_names) != nodes.value:
        raise PlatformError(f"{nodes.source} is {nodes.value}, but {name} has {len(host_names)} hosts")
    first = Value(host(host_names[0], name), f"the first of {name}")
    return Reading("slurm", nodes, rank(environ, "SLURM_NODEID", nodes), per_node, first)


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if name in environ:
            return name
    raise PlatformError(f"{names[0]} is not set")


def _require_one_task(environ: Mapping[str, str]) -> None:
    """Refuse a step with several tasks on a node; `1(x4)` means one task on each of four nodes."""
    tasks = environ.get(_SLURM_TASKS, "1")
    if any(task_count.partition("(")[0].strip() != "1" for task_count in tasks.split(",")):
        raise PlatformError(
            f"{_SLURM_TASKS} is {shown(tasks)}: ttprun is started once on each node, with srun"
            " --ntasks-per-node=1"
        )


def expand_host_list(host_list: str, source: str) -> list[str]:
    """Return the hosts of a Slurm list (`n[01-03,07],rack[1-2]n[1-4]`), as `scontrol show hostnames` does.

    Numbers keep their leading zeros. Several pairs of brackets are several dimensions: the last dimension
    runs fastest. Slurm orders three and more dimensions differently; the first host is the same, and only
    the number of the other hosts is used.

    Args:
        source: the variable with the list, for errors.

    Raises:
        PlatformError: the list is malformed, or names more than 65,536 hosts.
    """
    host_names: list[str] = []
    for entry in _entries(host_list, source):
        dimensions = [_names(match, host_list, source) for match in _PART.finditer(entry)]
        count = 1
        for names in dimensions:
            count *= len(names)
        if len(host_names) + count > MAX_HOSTS:
            raise PlatformError(f"{source} is {shown(host_list)}: these are more than {MAX_HOSTS} hosts")
        host_names += map("".join, itertools.product(*dimensions))
    if not host_names:
        raise PlatformError(f"{source} is {shown(host_list)}: it names no host")
    return host_names


def _entries(host_list: str, source: str) -> list[str]:
    """Split the list at the commas outside of brackets."""
    entries = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],\s])+", host_list)
    # The remaining characters are separators, or a bracket without its other half.
    if re.sub(r"[,\s]", "", host_list) != re.sub(r"[,\s]", "", "".join(entries)):
        raise PlatformError(f"{source} is {shown(host_list)}: a bracket has no other half")
    return entries


def _names(match: re.Match[str], host_list: str, source: str) -> list[str]:
    if match[2] is not None:
        return [match[2]]
    names: list[str] = []
    for text in match[1].split(","):
        ends = _RANGE.fullmatch(text.strip())
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if ends is None or low > high:
            raise PlatformError(f"{source} is {shown(host_list)}: {shown(text)} is no range of numbers")
        if len(names) + high - low >= MAX_HOSTS:
            raise PlatformError(f"{source} is {shown(host_list)}: these are more than {MAX_HOSTS} hosts")
        names += [str(value).zfill(len(ends[1])) for value in range(low, high + 1)]
    return names


def is_volcano(environ: Mapping[str, str]) -> bool:
    """Return whether Volcano has made this environment, and not ModelArts, which runs on Volcano."""
    return _TASK_INDEX in environ and bool(_tasks(environ)) and not is_modelarts(environ)


def read_volcano(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return the reading of a Volcano job with the plug-ins `env` and `svc`: one `ttprun` in each pod.

    `env` sets VC_TASK_INDEX, the number of a pod in its task; `svc` sets VC_<TASK>_HOSTS for each task of
    the job. No variable tells a pod the name of its task. With several tasks, only `master` and `worker`
    (the tasks of the plug-in `pytorch`) are known: the pod's own host name tells its task.
    """
    tasks = _tasks(environ)
    if not tasks:
        raise PlatformError("no variable VC_<TASK>_HOSTS is set: it comes from the job's plug-in svc")
    for name in tasks:
        _require_host_count(environ, name)
    index = number(environ, _TASK_INDEX)
    if len(tasks) == 1:
        host_names = hosts(environ, tasks[0])
        nodes = Value(len(host_names), tasks[0])
        node_rank = rank(environ, _TASK_INDEX, nodes)
    elif tasks == _PYTORCH_TASKS:
        host_names = [name for task in tasks for name in hosts(environ, task)]
        require_different(host_names, " and ".join(tasks))
        nodes = Value(len(host_names), " and ".join(tasks))
        own_index = _own_index(host_names, nodes.source, machine)
        node_rank = Value(own_index, f"{nodes.source}, by the name of this pod")
        _require_task_index(environ, index, node_rank.value)
    else:
        raise PlatformError(
            f"{', '.join(tasks)} are set: which tasks train is known for one task, or for master and worker"
        )
    address = Value(host_names[0], f"the first of {tasks[0]}")
    return Reading("volcano", nodes, node_rank, address=address, may_come=True)


def _tasks(environ: Mapping[str, str]) -> list[str]:
    return sorted(name for name in environ if _VOLCANO_HOSTS.fullmatch(name))


def _require_host_count(environ: Mapping[str, str], name: str) -> None:
    """Compare a list of hosts with the number beside the list (VC_<TASK>_NUM)."""
    count = name.removesuffix("HOSTS") + "NUM"
    if count not in environ:
        return
    stated_count, listed = number(environ, count).value, len(hosts(environ, name))
    if stated_count != listed:
        raise PlatformError(f"{count} is {stated_count}, but {name} has {listed} hosts")


def _own_index(host_names: list[str], source: str, machine: Machine) -> int:
    """Return the index of this pod among the hosts."""
    own_name = machine.hostname.partition(".")[0]
    indices = [n for n, name in enumerate(host_names) if name.partition(".")[0] == own_name]
    if len(indices) != 1:
        raise PlatformError(f"{source} do not have this pod, {shown(own_name)}, once")
    return indices[0]


def _require_task_index(environ: Mapping[str, str], index: Value[int], node_rank: int) -> None:
    masters = len(hosts(environ, _PYTORCH_TASKS[0]))
    place = node_rank - masters if node_rank >= masters else node_rank
    if index.value != place:
        raise PlatformError(
            f"{_TASK_INDEX} is {index.value}, but by its name this pod is number {place} of its task"
        )

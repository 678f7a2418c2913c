"""Platforms: from environments and files to a layout or one clear line."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptor import config
from adaptor.errors import ConfigError
from adaptor.launchers.cli import flags
from adaptor.launchers.platforms import ascend_cards, detect, schedulers
from adaptor.launchers.platforms.reading import LIMIT_S, Card, Machine, PlatformError, this_machine
from tests.unit.threads import LONG_S

MODELARTS = {
    "MA_NUM_HOSTS": "2",
    "MA_NUM_GPUS": "8",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
}
ASCEND = {
    "MINDX_TASK_ID": "4f2a",
    "LOCAL_WORLD_SIZE": "8",
    "WORLD_SIZE": "32",
    "RANK": "3",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "2222",
}
VOLCANO = {"VC_TASK_INDEX": "2", "VC_TRAIN_HOSTS": "j-train-0.j,j-train-1.j,j-train-2.j", "VC_TRAIN_NUM": "3"}
OF_PYTORCH = {
    "VC_TASK_INDEX": "1",
    "VC_MASTER_HOSTS": "j-master-0.j",
    "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "j-worker-0.j,j-worker-1.j",
    "VC_WORKER_NUM": "2",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "n[08-11]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "4",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "MASTER_ADDR": "node-a",
}


class Clock:
    """A clock that advances by pauses only; `at` runs a function at a given time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.at: dict[float, Callable[[], object]] = {}
        self.told: list[str] = []

    def pause(self, seconds: float) -> None:
        self.seconds += seconds
        for due in [due for due in self.at if due <= self.seconds]:
            self.at.pop(due)()


def machine(
    clock: Clock | None = None,
    hostname: str = "here",
    owns: tuple[str, ...] = (),
    unknown: tuple[str, ...] = (),
) -> Machine:
    clock = clock or Clock()
    return Machine(
        hostname,
        lambda address: address in owns,
        lambda host: host not in unknown,
        lambda: clock.seconds,
        clock.pause,
        clock.told.append,
    )


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in config.settings():
        monkeypatch.setenv(setting.variable, "")
        monkeypatch.delenv(setting.variable)


def fill(
    environ: dict[str, str],
    *arguments: str,
    platform: str = "auto",
    on: Machine | None = None,
    monkeypatch: pytest.MonkeyPatch | None = None,
) -> tuple[argparse.Namespace, detect.Filled | None]:
    if monkeypatch is not None:  # torch's parser reads PET_* from the environment
        for name in environ:
            monkeypatch.setenv(name, environ[name])
    argv = [*arguments, "script.py"]
    parsed = flags.parse(argv)
    return parsed, detect.fill(parsed, flags.given_names(argv), environ, platform, on or machine())


def layout(parsed: argparse.Namespace) -> tuple[str, int, str, str, int]:
    # None is torch's default, later 29500.
    port = parsed.master_port or 29500
    return (parsed.nnodes, parsed.node_rank, parsed.nproc_per_node, parsed.master_addr, port)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (MODELARTS, ("2", 1, "8", "job-worker-0.job", 29500)),
        ({"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8"}, ("1", 0, "8", "127.0.0.1", 29500)),
        ({"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "0"}, ("1", 0, "1", "127.0.0.1", 29500)),
        (ASCEND, ("4", 3, "8", "10.0.0.9", 2222)),
        (VOLCANO, ("3", 2, "1", "j-train-0.j", 29500)),
        (SLURM, ("2", 1, "4", "n09", 29500)),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"},
            ("1", 0, "1", "127.0.0.1", 29500),
        ),
        (OPENMPI, ("2", 1, "1", "node-a", 29500)),
    ],
    ids=["modelarts", "one node", "no cards", "ascend", "volcano", "slurm", "batch", "openmpi"],
)
def test_a_platform_fills_in_everything(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    parsed, read = fill(environ)
    assert layout(parsed) == expected
    assert read is not None
    assert read.card is None


def test_the_line_names_the_values_and_their_variables() -> None:
    _, read = fill(SLURM, "--nproc-per-node", "2")
    assert read is not None
    assert read.line == (
        "[ttp] read from Slurm: 2 nodes (SLURM_STEP_NUM_NODES), this is node 1 (SLURM_NODEID), 2 processes on"
        " each (--nproc-per-node), they meet at n09 port 29500 (the first of SLURM_STEP_NODELIST)"
    )


def test_without_a_platform_nothing_changes() -> None:
    unrelated = {"WORLD_SIZE": "16", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "8"}
    parsed, read = fill(unrelated)
    assert read is None
    assert parsed == flags.parse(["script.py"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--standalone", "--nproc-per-node", "2"],
        ["--nnodes", "1", "--nproc-per-node", "2"],
        ["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2", "--master-addr", "a"],
        ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--nproc_per_node=2"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("environ", [SLURM, {"MA_NUM_HOSTS": "nonsense"}], ids=["sense", "nonsense"])
def test_flags_take_precedence_over_the_platform(environ: dict[str, str], arguments: list[str]) -> None:
    parsed, read = fill(environ, *arguments)
    assert read is None
    assert parsed == flags.parse([*arguments, "script.py"])


def test_none_and_a_worker_of_a_job_ask_no_platform() -> None:
    assert fill(SLURM, platform="none")[1] is None
    assert fill({**SLURM, "TORCHELASTIC_RUN_ID": "none"})[1] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nproc-per-node", "2"], ("2", 1, "2", "n09", 29500)),
        (["--nnodes", "1"], ("1", 0, "4", "127.0.0.1", 29500)),
        (["--nnodes", "3", "--node-rank", "2"], ("3", 2, "4", "n09", 29500)),
        (["--master-addr", "a", "--master-port", "7"], ("2", 1, "4", "a", 7)),
        (["--master-port", "7"], ("2", 1, "4", "n09", 7)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_win(arguments: list[str], expected: tuple[object, ...]) -> None:
    assert layout(fill(SLURM, *arguments)[0]) == expected


def test_c10d_gets_an_endpoint() -> None:
    parsed, _ = fill(SLURM, "--rdzv-backend", "c10d")
    assert (parsed.nnodes, parsed.node_rank, parsed.rdzv_endpoint) == ("2", 0, "n09:29400")
    parsed, _ = fill(ASCEND, "--rdzv-backend", "c10d")
    assert parsed.rdzv_endpoint == "10.0.0.9:2222"


def test_variables_of_torchrun_come_before_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**SLURM, "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "other", "PET_NNODES": "2"}
    parsed, _ = fill(environ, monkeypatch=monkeypatch)
    assert layout(parsed) == ("2", 1, "2", "other", 29500)


def test_a_spare_node_has_no_number() -> None:
    """Its number among the tasks of a Slurm step is no node's number."""
    argv = ["--nnodes", "2", "script.py"]
    parsed = flags.parse(argv)
    parsed.ttp_spare = True
    step = {
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "n[09-11]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    }
    environ = {**SLURM, **step, "SLURM_NODEID": "2"}
    filled = detect.fill(parsed, flags.given_names(argv), environ, "auto", machine())
    assert filled is not None
    assert ": 2 nodes (--nnodes), this is a spare node, " in filled.line
    assert parsed.node_rank == 0
    assert flags.rendezvous_of(parsed) == "n09:29500"


KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


def test_kubeflow_needs_no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow Trainer and PyTorchJob set torchrun's own variables."""
    parsed, read = fill({**KUBEFLOW, "WORLD_SIZE": "2"}, monkeypatch=monkeypatch)
    assert read is None
    assert layout(parsed) == ("2", 1, "8", "job-node-0-0.job", 29400)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {**SLURM, **OPENMPI, "OMPI_COMM_WORLD_SIZE": "3"},
            (
                "Slurm and Open MPI contradict each other: nodes 2 (SLURM_STEP_NUM_NODES) and 3"
                " (OMPI_COMM_WORLD_SIZE); else give --ttp-platform slurm, or --ttp-platform openmpi, or"
                " --ttp-platform none and torchrun's flags"
            ),
        ),
        (
            {**SLURM, **OPENMPI, "OMPI_COMM_WORLD_RANK": "0"},
            "contradict each other: node number 1 (SLURM_NODEID) and 0 (OMPI_COMM_WORLD_RANK)",
        ),
        (
            {**SLURM, "PET_NNODES": "4"},
            "Slurm and torchrun's variables contradict each other: nodes 2 (SLURM_STEP_NUM_NODES) and 4 (PE",
        ),
        (
            {**SLURM, "PET_NODE_RANK": "0"},
            "contradict each other: node number 1 (SLURM_NODEID) and 0 (PET_NODE_RANK)",
        ),
    ],
    ids=["nodes", "rank", "PET nodes", "PET rank"],
)
def test_contradicting_platforms_are_refused(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        fill(environ, monkeypatch=monkeypatch)
    assert message in str(refused.value)


def test_agreeing_platforms_are_joined_and_can_be_selected() -> None:
    parsed, read = fill({**SLURM, **OPENMPI})
    assert layout(parsed) == ("2", 1, "4", "n09", 29500)
    assert read is not None
    assert read.line.startswith("[ttp] read from Slurm and Open MPI: ")
    parsed, _ = fill({**SLURM, **OPENMPI, "OMPI_COMM_WORLD_SIZE": "3"}, platform="openmpi")
    assert layout(parsed) == ("3", 1, "1", "node-a", 29500)


@pytest.mark.parametrize(
    ("hostname", "index", "node"), [("j-master-0", "0", 0), ("j-worker-0", "0", 1), ("j-worker-1.j", "1", 2)]
)
def test_the_master_and_the_workers_of_volcano(hostname: str, index: str, node: int) -> None:
    parsed, _ = fill({**OF_PYTORCH, "VC_TASK_INDEX": index}, on=machine(hostname=hostname))
    assert layout(parsed) == ("3", node, "1", "j-master-0.j", 29500)


def _without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


BAD = {
    "no number": (
        {**MODELARTS, "MA_NUM_HOSTS": "two"},
        "MA_NUM_HOSTS is 'two': it must be a number from 1 on",
    ),
    "no nodes": ({**MODELARTS, "MA_NUM_HOSTS": "0"}, "MA_NUM_HOSTS is '0': it must be a number from 1 on"),
    "a huge number": (
        {**MODELARTS, "MA_NUM_HOSTS": "9" * 5000},
        "characters): it must be a number from 1 on",
    ),
    "other digits": ({**MODELARTS, "MA_NUM_HOSTS": "²"}, "MA_NUM_HOSTS is '²': it must be a number"),
    "negative": (
        {**MODELARTS, "VC_TASK_INDEX": "-1"},
        "VC_TASK_INDEX is '-1': it must be a number from 0 on",
    ),
    "hosts missing": (
        _without(MODELARTS, "VC_WORKER_HOSTS"),
        "VC_WORKER_HOSTS is not set: it must list the hosts",
    ),
    "hosts empty": (
        {**MODELARTS, "VC_WORKER_HOSTS": " "},
        "VC_WORKER_HOSTS is empty: it must list the hosts",
    ),
    "fewer hosts": ({**MODELARTS, "MA_NUM_HOSTS": "3"}, "MA_NUM_HOSTS is 3, but VC_WORKER_HOSTS has 2 hosts"),
    "a host twice": ({**MODELARTS, "VC_WORKER_HOSTS": "a,a"}, "VC_WORKER_HOSTS has the host a twice"),
    "no host": (
        {**MODELARTS, "VC_WORKER_HOSTS": "a,b c\n"},
        "VC_WORKER_HOSTS has 'b c' as a host: it must be a name",
    ),
    "rank too large": (
        {**MODELARTS, "VC_TASK_INDEX": "2"},
        "VC_TASK_INDEX is 2, but there are 2 nodes (MA_NUM_HOSTS), which count from 0",
    ),
    "uneven": (
        {**ASCEND, "WORLD_SIZE": "30"},
        "WORLD_SIZE is 30 and LOCAL_WORLD_SIZE 8: all nodes must have as many",
    ),
    "no address": (_without(ASCEND, "MASTER_ADDR"), "the Ascend operator: MASTER_ADDR is not set"),
    "no port": (
        {**ASCEND, "MASTER_PORT": "70000"},
        "MASTER_PORT is 70000: it must be a port from 1 to 65535",
    ),
    "counts": ({**VOLCANO, "VC_TRAIN_NUM": "4"}, "VC_TRAIN_NUM is 4, but VC_TRAIN_HOSTS has 3 hosts"),
    "other tasks": (
        {**VOLCANO, "VC_EVAL_HOSTS": "e"},
        "VC_EVAL_HOSTS, VC_TRAIN_HOSTS are set: which tasks train is known for one task, or for master and",
    ),
    "not this pod": (OF_PYTORCH, "VC_MASTER_HOSTS and VC_WORKER_HOSTS do not have this pod, 'here', once"),
    "no step": (
        _without(SLURM, "SLURM_STEP_ID"),
        "Slurm: this job has 4 nodes (SLURM_NNODES), and this process is in no step of it: start ttprun with",
    ),
    "several tasks": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
        "SLURM_STEP_TASKS_PER_NODE is '8(x2)': ttprun is started once on each node",
    ),
    "parts": ({**SLURM, "SLURM_HET_SIZE": "2"}, "this is a heterogeneous job (SLURM_HET_SIZE)"),
    "node list": (
        {**SLURM, "SLURM_STEP_NODELIST": "n[09-11]"},
        "SLURM_STEP_NUM_NODES is 2, but SLURM_STEP_NODELIST has 3 hosts",
    ),
    "no node list": (
        {key: value for key, value in SLURM.items() if "NODELIST" not in key},
        "Slurm: SLURM_STEP_NODELIST is not set",
    ),
    "processes": (
        {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
        "mpirun starts 8 processes on this node (OMPI_COMM_WORLD_LOCAL_SIZE): start ttprun once on each node",
    ),
    "nowhere": (
        _without(OPENMPI, "MASTER_ADDR"),
        "Open MPI: it does not tell an address of node 0: give --master-addr",
    ),
}


@pytest.mark.robustness(
    "B6",
    "a platform's variables: missing, no numbers, counts that disagree, hosts twice, several tasks on a node",
    "refused in one line, which names the variable and what else to give",
)
@pytest.mark.parametrize(("environ", "message"), BAD.values(), ids=BAD.keys())
def test_invalid_variables_are_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fill(environ)
    line = str(refused.value)
    assert message in line
    assert len(line.splitlines()) == 1
    assert line.endswith("--ttp-platform none and torchrun's flags")


def test_a_named_platform_must_be_present() -> None:
    with pytest.raises(ConfigError, match=r"^Slurm: SLURM_NNODES is not set; else give --ttp-platform none"):
        fill({}, platform="slurm")


def test_a_host_that_does_not_resolve() -> None:
    """Slurm's nodes resolve from the start; a pod's name resolves once the pod runs."""
    with pytest.raises(ConfigError, match=r"no address: the address of n09 .* does not resolve"):
        fill(SLURM, on=machine(unknown=("n09",)))
    clock = Clock()
    with pytest.raises(
        ConfigError, match=r"waited 600 s for the address of job-worker-0.job .* does not resolve"
    ):
        fill(MODELARTS, on=machine(clock, unknown=("job-worker-0.job",)))
    assert clock.told[0].startswith(
        "[ttp] waiting for the address of job-worker-0.job (the first of VC_WORKER_"
    )
    assert LIMIT_S <= clock.seconds < LIMIT_S + 1


# Slurm's lists of hosts


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1,3-4,007]", "n1 n3 n4 n007"),
        ("a1,b[1-2],c", "a1 b1 b2 c"),
        ("rack[1-2]n[3-4]", "rack1n3 rack1n4 rack2n3 rack2n4"),
        ("r[0-1]c[0-1]b[0-1]", "r0c0b0 r0c0b1 r0c1b0 r0c1b1 r1c0b0 r1c0b1 r1c1b0 r1c1b1"),
        ("n[1-2]-ib.example.org", "n1-ib.example.org n2-ib.example.org"),
        ("n[9-11]", "n9 n10 n11"),
        ("[1-2]", "1 2"),
    ],
)
def test_lists_of_hosts(listed: str, hosts: str) -> None:
    """`scontrol show hostnames` of Slurm 22.05 gives the same, except for the order of three dimensions."""
    assert schedulers.expand_host_list(listed, "LIST") == hosts.split()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("n[1-2", "a bracket has no other half"),
        ("n1-2]", "a bracket has no other half"),
        ("n[[1]]", "a bracket has no other half"),
        ("n[3-1]", "'3-1' is no range of numbers"),
        ("n[a-b]", "'a-b' is no range of numbers"),
        ("n[]", "'' is no range of numbers"),
        ("n[1-2-3]", "'1-2-3' is no range of numbers"),
        ("", "it names no host"),
        (" , ", "it names no host"),
        ("n[0-999999999]", "these are more than 65536 hosts"),
        ("n[" + ",".join(["0-60000"] * 2) + "]", "these are more than 65536 hosts"),
        ("n[0-999]r[0-999]", "these are more than 65536 hosts"),
    ],
)
def test_invalid_lists_of_hosts_are_refused(listed: str, message: str) -> None:
    with pytest.raises(PlatformError, match=r"^LIST is ") as refused:
        schedulers.expand_host_list(listed, "LIST")
    assert message in str(refused.value)


@given(st.text(st.sampled_from("n[]-,0129x \n")))
def test_any_text_is_a_list_of_hosts_or_refused(listed: str) -> None:
    try:
        hosts = schedulers.expand_host_list(listed, "LIST")
    except PlatformError:
        return
    assert hosts
    assert not any(set(host) & set("[], \n") for host in hosts)


# rank tables


def server(address: str, *ranks: int) -> dict[str, Any]:
    cards = [
        {"device_id": str(n), "device_ip": f"192.168.{n}.1", "rank_id": str(r)} for n, r in enumerate(ranks)
    ]
    return {"server_id": address, "container_ip": address, "host_ip": "10.1.1.1", "device": cards}


def servers(*nodes: dict[str, Any], **fields: object) -> dict[str, Any]:
    base = {
        "status": "completed",
        "version": "1.0",
        "server_count": str(len(nodes)),
        "server_list": list(nodes),
    }
    return {**base, **fields}


TWO = servers(server("10.0.0.1", 0, 1), server("10.0.0.2", 2, 3))
IN_A_SUPER_POD = {**TWO, "version": "1.2", "super_pod_list": [{"super_pod_id": "0", "server_list": []}]}
OF_CARDS = {
    "status": "completed",
    "version": "2.0",
    "rank_count": 4,
    "rank_list": [{"rank_id": r, "local_id": r % 2, "device_id": r % 2, "level_list": []} for r in range(4)],
}
GROUPS = {
    "status": "completed",
    "group_count": "1",
    "group_list": [
        {
            "group_name": "job-worker",
            "device_count": "4",
            "instance_count": "2",
            "instance_list": [
                {
                    "pod_name": f"job-worker-{n}",
                    "server_id": f"10.0.0.{n + 1}",
                    "devices": [{"device_id": str(d), "device_ip": "192.1.1.1"} for d in (4, 5)],
                }
                for n in range(2)
            ],
        }
    ],
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "hccl.json"


def with_table(table: Path, content: object, **variables: str) -> dict[str, str]:
    table.write_text(json.dumps(content))
    return {"RANK_TABLE_FILE": str(table), **variables}


@pytest.mark.parametrize("content", [TWO, IN_A_SUPER_POD, GROUPS], ids=["1.0", "1.2", "group_list"])
def test_the_own_node_by_its_address(content: object, table: Path) -> None:
    parsed, read = fill(with_table(table, content), on=machine(owns=("10.0.0.2",)))
    assert layout(parsed) == ("2", 1, "2", "10.0.0.1", 29500)
    assert read is not None
    assert read.card is None
    assert f"this is node 1 (own address in {table})" in read.line


def test_containers_have_their_ranks_by_the_numbers_of_their_names(table: Path) -> None:
    """ModelArts' davincirun sorts so, whatever the order of the list: 10 comes after 2."""
    content = json.loads(json.dumps(GROUPS))
    (group,) = content["group_list"]
    (first_pod, second_pod) = group["instance_list"]
    group["instance_list"] = [
        first_pod | {"pod_name": "job-worker-10"},
        second_pod | {"pod_name": "job-worker-2"},
    ]
    parsed, _ = fill(with_table(table, content), on=machine(owns=("10.0.0.1",)))
    assert layout(parsed) == ("2", 1, "2", "10.0.0.2", 29500)
    for instance in group["instance_list"]:
        del instance["pod_name"]
    parsed, _ = fill(with_table(table, content), on=machine(owns=("10.0.0.1",)))
    assert layout(parsed) == ("2", 0, "2", "10.0.0.1", 29500)


@pytest.mark.parametrize(
    "content", [TWO, IN_A_SUPER_POD, OF_CARDS, GROUPS], ids=["1.0", "1.2", "2.0", "groups"]
)
@pytest.mark.parametrize(("rank", "node", "index"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_a_process_for_each_card(content: object, rank: int, node: int, index: int, table: Path) -> None:
    environ = with_table(table, content, RANK_ID=str(rank), ASCEND_DEVICE_ID=str(index), RANK_SIZE="4")
    parsed, read = fill(environ, "--master-addr", "a")
    assert layout(parsed) == ("2", node, "2", "a", 29500)
    assert read is not None
    assert read.card is not None
    assert (read.card.index, read.card.count) == (index, 2)


def test_the_pod_by_its_name_and_a_folder(table: Path) -> None:
    environ = with_table(table, GROUPS)
    table.rename(table.with_name("jobstart_hccl.json"))
    environ["RANK_TABLE_FILE"] = str(table.parent)
    parsed, _ = fill(environ, on=machine(hostname="job-worker-1"))
    assert layout(parsed) == ("2", 1, "2", "10.0.0.1", 29500)
    parsed, _ = fill({**environ, "MA_CURRENT_IP": "10.0.0.1"})
    assert parsed.node_rank == 0


def test_servers_in_the_order_of_their_ranks(table: Path) -> None:
    content = servers(server("10.0.0.2", 2, 3), server("10.0.0.1", 0, 1))
    parsed, _ = fill(with_table(table, content), on=machine(owns=("10.0.0.2",)))
    assert layout(parsed) == ("2", 1, "2", "10.0.0.1", 29500)


def test_a_table_beside_another_platform(table: Path) -> None:
    """ModelArts gives the number of a node, a table of version 2.0 does not."""
    environ = {**with_table(table, OF_CARDS), **MODELARTS, "MA_NUM_GPUS": "2"}
    parsed, _ = fill(environ)
    assert layout(parsed) == ("2", 1, "2", "job-worker-0.job", 29500)
    with pytest.raises(
        ConfigError, match="ModelArts and the rank table contradict each other: processes on each"
    ):
        fill({**environ, "MA_NUM_GPUS": "8"})


def test_a_table_that_is_completed_later(table: Path) -> None:
    clock = Clock()
    environ = with_table(table, {"status": "initializing"})
    # The writer truncates the file first, then writes in parts.
    clock.at = {
        20: lambda: table.write_text(""),
        21: lambda: table.write_text(json.dumps(TWO)[:40]),
        22: lambda: table.write_text(json.dumps(TWO)),
    }
    parsed, _ = fill(environ, on=machine(clock, owns=("10.0.0.1",)))
    assert layout(parsed)[:3] == ("2", 0, "2")
    assert clock.told[0] == f"[ttp] waiting for the rank table {table}, whose status is initializing"
    assert len(clock.told) <= 3


def _changed(content: dict[str, Any], *path: str | int, to: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(content))
    place = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return copy  # type: ignore[no-any-return]


BAD_TABLES: dict[str, tuple[object, str]] = {
    "twice": (servers(server("a", 0, 1), server("b", 1, 2)), "has the rank 1 twice"),
    "missing": (servers(server("a", 0, 1), server("b", 3, 4)), "has no rank 2, but 4 ranks up to 4"),
    "uneven": (
        servers(server("a", 0, 1, 2), server("b", 3)),
        "has nodes with 1 and 3 cards: all must have as many",
    ),
    "mixed": (
        servers(server("a", 0, 2), server("b", 1, 3)),
        "gives a node the ranks 0, 2: torchrun gives each node",
    ),
    "servers": ({**TWO, "server_count": "3"}, "server_count is 3, but 2 are listed"),
    "ranks": ({**OF_CARDS, "rank_count": 5}, "rank_count is 5, but 4 are listed"),
    "instances": (
        _changed(GROUPS, "group_list", 0, "instance_count", to="3"),
        "instance_count is 3, but 2 are listed",
    ),
    "devices": (
        _changed(GROUPS, "group_list", 0, "device_count", to="8"),
        "device_count is 8, but 4 are listed",
    ),
    "same number": (
        _changed(GROUPS, "group_list", 0, "instance_list", 1, "pod_name", to="other-0"),
        "has containers with the pod_name 'job-worker-0', 'other-0': each must end in a number of its own",
    ),
    "one number": (
        _changed(GROUPS, "group_list", 0, "instance_list", 1, "pod_name", to="other"),
        "has containers with the pod_name 'job-worker-0', 'other': each must end in a number of its own",
    ),
    "groups": ({**GROUPS, "group_list": GROUPS["group_list"] * 2, "group_count": "2"}, "has 2 groups"),  # type: ignore[operator]
    "no number": (
        servers(server("a", 0), _changed(server("b", 1), "device", 0, "rank_id", to="x")),
        "rank_id is 'x'",
    ),
    "no rank": (servers(_changed(server("a", 0), "device", 0, to={})), "a card has no rank_id"),
    "no servers": (servers(), "server_list is []: it must be a list of objects, and not empty"),
    "no list": ({**TWO, "server_list": 4}, "server_list is 4: it must be a list of objects"),
    "no objects": ({**TWO, "server_list": ["a"]}, "server_list is ['a']: it must be a list of objects"),
    "version": ({**TWO, "version": "3.0"}, "has the version '3.0': 1.0, 1.2 and 2.0 are known"),
    "status": ({**TWO, "status": "lost"}, "has the status 'lost': it must be completed or initializing"),
    "a list": ([1], "is no rank table: it has no JSON object, but [1]"),
    "never": ({"status": "initializing"}, "waited 600 s for the rank table"),
    "not here": (TWO, "has an address of this machine (there are 10.0.0.1, 10.0.0.2)"),
    "no own number": (OF_CARDS, "it does not tell the number of this node: give --node-rank"),
}


@pytest.mark.robustness(
    "B6",
    "a rank table with ranks twice or missing, uneven nodes, counts that disagree, no own address; one that"
    " is too large, broken, or never completed",
    "refused in one line, which names the file; a table that is being written is waited for, 600 s",
)
@pytest.mark.parametrize(("content", "message"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_a_table_that_makes_no_sense(content: object, message: str, table: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        fill(with_table(table, content))
    line = str(refused.value)
    assert message in line
    assert line.startswith("the rank table: ")
    assert len(line.splitlines()) == 1


def test_files_that_are_no_table(table: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            fill({"RANK_TABLE_FILE": str(path)})
        return str(error.value)

    assert "the file cannot be read (No such file or directory)" in refused(table)
    table.write_text('{"status": ')
    assert f"waited 10 s for the rank table {table}, which is no JSON object yet" in refused(table)
    table.write_text("[" * 100_000)
    assert "which is no JSON object yet" in refused(table)
    os.truncate(table, ascend_cards.MAX_BYTES + 1)
    assert "the file has more than 64 MiB" in refused(table)
    table.unlink()
    os.mkfifo(table)
    assert "the file cannot be read (not a regular file)" in refused(table)
    table.unlink()
    assert "there is no jobstart_hccl.json or hccl.json in it" in refused(table.parent)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK_ID": "4"}, "RANK_ID is 4, but {table} has no such rank"),
        ({"RANK_ID": "x"}, "RANK_ID is 'x': it must be a number from 0 on"),
        ({"RANK_ID": "0", "ASCEND_DEVICE_ID": "npu0"}, "ASCEND_DEVICE_ID is 'npu0': it must be a number"),
        ({"RANK_ID": "0", "RANK_SIZE": "8"}, "RANK_SIZE is 8, but {table} has 4 ranks"),
    ],
    ids=["none", "no number", "device", "size"],
)
def test_ranks_that_the_table_does_not_have(variables: dict[str, str], message: str, table: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        fill(with_table(table, TWO, **variables))
    assert message.format(table=table) in str(refused.value)


def test_an_address_of_two_nodes(table: Path) -> None:
    with pytest.raises(ConfigError, match=r"more than one node of .* has an address of this machine"):
        fill(with_table(table, TWO), on=machine(owns=("10.1.1.1",)))


def test_the_addresses_of_this_machine() -> None:
    this_node = this_machine()
    assert this_node.owns("127.0.0.1")
    assert not any(map(this_node.owns, ("192.0.2.1", "0.0.0.0", "224.0.0.1", "::", "node_0", "")))
    assert this_node.resolves("127.0.0.1")
    assert not this_node.resolves("x" * 70)


# one process for each card


def test_the_code_of_the_first_reaches_all(table: Path) -> None:
    """Waiting processes may come before or after its end."""
    job = f"test-{os.getpid()}-{table.parent}"[-90:]
    codes: dict[int, int] = {}

    def wait(index: int) -> None:
        codes[index] = ascend_cards._code_of_first(ascend_cards._connect(Card(index, 3, job), this_machine()))

    waiting = [threading.Thread(target=wait, args=(index,)) for index in (1, 2)]
    waiting[0].start()
    with ascend_cards.First(Card(0, 3, job)) as first:
        with pytest.raises(PlatformError, match="is another one running"):
            ascend_cards.First(Card(0, 3, job))
        telling = threading.Thread(target=first.tell, args=(79,))
        telling.start()
        waiting[1].start()
        for thread in (telling, *waiting):
            thread.join(LONG_S)
    assert codes == {1: 79, 2: 79}


def test_a_first_process_that_never_comes() -> None:
    clock = Clock()
    with pytest.raises(PlatformError, match="waited 600 s for the process of card 0 of this node"):
        ascend_cards._connect(Card(1, 2, f"none-{os.getpid()}"), machine(clock))
    assert clock.told


def test_a_first_process_that_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    job = f"killed-{os.getpid()}"
    with ascend_cards.First(Card(0, 2, job)) as first:
        connection = ascend_cards._connect(Card(1, 2, job), this_machine())
        first._told = True  # as if it could not write its exit code
        with first._changed:
            first._changed.wait_for(lambda: first._connections, LONG_S)
        first._connections.pop().close()
    assert ascend_cards._code_of_first(connection) == 1
    assert "the process of card 0 was ended before it told its exit code" in capsys.readouterr().err

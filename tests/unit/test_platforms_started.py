"""`ttprun` started as a platform starts it: without flags for the number of nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import waiting
from tests.ports import free_ports
from tests.unit.launching import Launcher, launcher, zygote

__all__ = ["launcher", "zygote"]

SOON = ["--monitor-interval", "0.05"]
LOOK = """
import os
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK_ID", "ASCEND_DEVICE_ID")
seen = " ".join(os.environ.get(name, "-") for name in names)
Path("seen" + os.environ["RANK"]).write_text(seen)
"""


def test_two_nodes_by_the_variables_of_slurm(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    ports = [str(port) for port in free_ports(2)]
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    }
    nodes, started = [], []
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        arguments = [*SOON, "--master-port", ports[0], "--ttp-port", ports[1], node.script(LOOK)]
        started.append(node.start(*arguments, **step, SLURM_NODEID=str(number)))
    results = [node.wait(pid) for node, pid in zip(nodes, started, strict=True)]
    assert [result.code for result in results] == [0, 0], [result.log for result in results]
    for number, node in enumerate(nodes):
        assert (node.folder / f"seen{number}").read_text() == f"{number} 0 2 - -"
        assert node.log.startswith(
            f"[ttp] read from Slurm: 2 nodes (SLURM_STEP_NUM_NODES), this is node {number} (SLURM_NODEID), "
        )


def cards(folder: Path, count: int) -> list[dict[str, str]]:
    """Return the environments of the processes that a platform starts for the cards of one node."""
    # The content of the table distinguishes jobs, and tests, on one machine.
    devices = [{"device_id": str(n), "device_ip": str(folder), "rank_id": str(n)} for n in range(count)]
    table = {"status": "completed", "version": "1.0", "server_count": "1"}
    (folder / "table.json").write_text(
        json.dumps({**table, "server_list": [{"server_id": "127.0.0.1", "device": devices}]})
    )
    place = {"RANK_TABLE_FILE": str(folder / "table.json"), "RANK_SIZE": str(count)}
    return [{**place, "RANK_ID": str(n), "ASCEND_DEVICE_ID": str(n)} for n in range(count)]


@pytest.mark.parametrize(
    ("last", "code"), [("", 0), ("raise SystemExit(5)", 5)], ids=["to its end", "with a fault"]
)
def test_a_process_for_each_card(last: str, code: int, zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """The first process runs the job; the second waits and ends with the same code; workers see all cards."""
    processes, started = [], []
    for number, environment in enumerate(cards(tmp_path, 2)):
        (tmp_path / f"card{number}").mkdir()
        processes.append(process := Launcher(zygote, tmp_path / f"card{number}"))
        started.append(process.start(*SOON, process.script(f"{LOOK}\n{last}"), **environment))
    first, second = (process.wait(pid) for process, pid in zip(processes, started, strict=True))
    assert (first.code, second.code) == (code, code), first.log
    for rank in (0, 1):
        assert (processes[0].folder / f"seen{rank}").read_text() == f"{rank} {rank} 2 - -"
    # If the first process comes late, there is a line about it.
    lines = [line for line in second.log.splitlines() if not line.startswith("[ttp] waiting for ")]
    assert lines == ["[ttp] card 1 of 2 of this node: the process of card 0 runs ttprun"]


def test_sigterm_to_all_processes_of_a_node(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """A platform ends a job by a signal to every process; the waiting processes end after the save."""
    script = f"{LOOK}\nimport threading\nthreading.Event().wait()\n"
    processes, started = [], []
    for number, environment in enumerate(cards(tmp_path, 2)):
        (tmp_path / f"card{number}").mkdir()
        processes.append(process := Launcher(zygote, tmp_path / f"card{number}"))
        started.append(process.start(*SOON, process.script(script), **environment))
    waiting.exist(*(processes[0].folder / f"seen{rank}" for rank in (0, 1)))
    waiting.written(processes[1].folder, lambda: "runs ttprun" in processes[1].log, "the other waits")
    for pid in reversed(started):
        os.kill(pid, signal.SIGTERM)
    results = [process.wait(pid) for process, pid in zip(processes, started, strict=True)]
    assert [result.code for result in results] == [128 + signal.SIGTERM] * 2, results[0].log
    assert "ended by SIGTERM" in results[0].last_line or "told to end by SIGTERM" in results[0].last_line


def test_a_refusal_of_card_zero_reaches_the_others(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    processes, started = [], []
    for number, environment in enumerate(cards(tmp_path, 2)):
        (tmp_path / f"card{number}").mkdir()
        processes.append(process := Launcher(zygote, tmp_path / f"card{number}"))
        started.append(process.start("nowhere.py", **environment))
    results = [process.wait(pid) for process, pid in zip(processes, started, strict=True)]
    assert [result.code for result in results] == [2, 2]
    assert results[0].last_line.startswith("ttprun: error: the script nowhere.py cannot be run")


def test_wrong_variables_of_a_platform_are_one_line(launcher: Launcher) -> None:
    result = launcher.run(launcher.script("print('started')"), MA_NUM_HOSTS="two")
    line = (
        "ttprun: error: ModelArts: MA_NUM_HOSTS is 'two': it must be a number from 1 on; else give"
        " --ttp-platform none and torchrun's flags\n"
    )
    assert (result.code, result.log) == (2, line)
    result = launcher.run("--ttp-platform", "none", launcher.script("print('started')"), MA_NUM_HOSTS="two")
    assert (result.code, result.log) == (0, "started\n")

"""Real agents' control threads (`Node`) with real workers, without torch's elastic agent around them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from adaptor import config
from adaptor.checkpoint import publish
from adaptor.control.messages import Verdict
from adaptor.launchers import node as node_module
from adaptor.launchers.hub import Hub
from adaptor.launchers.node import Node
from tests.unit.threads import LONG_S

SCRIPT = Path(__file__).with_name("worker_script.py")
ROOT = Path(__file__).parents[2]


def wait_until(done: Callable[[], Any], what: str) -> None:
    """For what another process does to itself."""
    deadline = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < deadline, f"not so after {LONG_S:g} s: {what}"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Dead, whether or not somebody has asked for its status."""
    return state_of(pid) in ("", "Z")


def state_of(pid: int) -> str:
    """The kernel's letter for it, nothing when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def open_descriptors(pid: int) -> dict[str, str]:
    """What each of them is, by its number."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[path.name] = str(path.readlink())
        except FileNotFoundError:  # the one that reads the folder, or one that was closed meanwhile
            continue
    return found


def hub_of(node: Node) -> Hub:
    """Where a node has the controller."""
    assert node._way is not None
    assert node._way.hub is not None
    return node._way.hub


class Worker:
    """A child process with the script, started as torch elastic starts it."""

    def __init__(self, rank: int, save: Path, index: int, count: int) -> None:
        self.rank = rank
        command = [sys.executable, "-u", "-m", "adaptor.launchers.worker", str(SCRIPT), str(save)]
        self.process = subprocess.Popen(
            [*command, str(index), str(count)],
            env={**os.environ, "RANK": str(rank), "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hears(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=LONG_S)[1]
        return line.strip()

    def does(self, *lines: str) -> None:
        """Do what the lines say, and come back."""
        for line in lines:
            self.send(line)
            assert self.hears() == f"done {line}"

    def stands_at_the_door(self) -> None:
        self.send("door")
        assert self.hears() == "waiting"

    def status(self) -> int:
        return self.process.wait(LONG_S)


class Job:
    """Nodes and workers of one job, with the last two arguments of the script for each rank."""

    def __init__(self, folder: Path, shards: int) -> None:
        self.save, self.logs = folder / "save", folder / "logs"
        self.save.mkdir()
        self.logs.mkdir()
        self.shards = shards
        self.workers: dict[int, Worker] = {}
        self.nodes: list[Node] = []

    def node(self, **settings: str) -> Node:
        made = Node(config.load({"TTP_LOG_PATH": str(self.logs), **settings}))
        self.nodes.append(made)
        return made

    def begin(self, world_size: int, nodes: Sequence[Node] = ()) -> None:
        """A generation of workers, the same number on each node, which have all come to the start."""
        chosen = list(nodes) or self.nodes or [self.node()]
        store = dist.HashStore()
        each = world_size // len(chosen)
        for number, node in enumerate(chosen):
            ranks = range(number * each, (number + 1) * each)
            node.begin(ranks, number, len(chosen), world_size, store, "127.0.0.1")
            started = {r: Worker(r, self.save, r % self.shards, self.shards) for r in ranks}
            self.workers.update(started)
            node.watch({rank: worker.process for rank, worker in started.items()})
        for node in chosen:
            node.meet()
        for worker in self.workers.values():
            assert worker.hears() == "here"
        # Its hello may come later, and before it a worker is told nothing.
        heard = [node._workers._connections for node in chosen]
        wait_until(lambda: sum(map(len, heard)) == world_size, "the agents have heard of their workers")

    def train(self, *lines: str) -> None:
        """All of them."""
        for worker in self.workers.values():
            worker.does("begin", *lines)
        hub = hub_of(self.nodes[0])
        wait_until(lambda: len(hub.controller.roster.layouts) == len(self.workers), "the layouts are known")

    def verdict(self, node: int = 0) -> Verdict:
        """Once it is out and every worker has been seen off."""
        assert self.nodes[node].settled.wait(LONG_S), "there is no verdict"
        verdict = self.nodes[node].verdict
        assert verdict is not None
        return verdict

    def statuses(self) -> dict[int, int]:
        return {rank: worker.status() for rank, worker in self.workers.items()}

    def saved(self) -> dict[str, str]:
        """The files of the checkpoint that the tracker names, by name."""
        step = publish.tracked_step(self.save)
        if step is None:
            return {}
        assert publish.is_complete(self.save, step)
        folder = self.save / f"iter_{step:07d}"
        return {path.name: path.read_text().strip() for path in folder.glob("*.txt")}

    def end(self) -> None:
        """As torch's agent does before it starts the workers again."""
        for worker in self.workers.values():
            worker.process.kill()
            worker.process.communicate(timeout=LONG_S)
        self.workers = {}
        for node in self.nodes:
            node.end()

    def close(self) -> None:
        self.end()
        for node in self.nodes:
            node.close()


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job without nodes; ranks hold the one shard there is, unless `shards` says otherwise."""
    for name in [name for name in os.environ if name.startswith("TTP_")]:
        monkeypatch.delenv(name)
    for name in ("TTP_AGENT", "TTP_BOARD", "TTP_BOARD_RANKS", "TTP_GENERATION"):
        monkeypatch.setenv(name, "")  # restored in the end
    made = Job(tmp_path, getattr(request, "param", 1))
    monkeypatch.setenv("TTP_LOG_PATH", str(made.logs))  # for workers
    monkeypatch.setattr(node_module, "EXIT_GRACE_S", LONG_S)  # who goes by itself may do so slowly
    yield made
    made.close()

"""Replacement of one worker of a node while the others live: real processes, without a controller."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptor.launchers.agent import processes, worker_main
from adaptor.launchers.agent.processes import SPARE, WORKER
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.spares import spare_pool, worker_forks
from adaptor.launchers.spares.replacements import Replacements
from adaptor.launchers.spares.spare_pool import MOST_DEATHS, Spare
from adaptor.protocol import environment
from adaptor.protocol.environment import AGENT, BOARD, BOARD_RANKS, GENERATION, NEWCOMER, SCRATCH
from adaptor.protocol.messages import (
    BoardRecord,
    Died,
    Dying,
    Freeze,
    FromAgent,
    Hello,
    Layout,
    Modules,
    ModulesProbe,
    Phase,
    RegroupFailed,
    Replace,
)
from adaptor.protocol.wire import deadline
from adaptor.worker.runtime import UNDECIDED
from tests import waiting
from tests.unit.nodes import ROOT, is_awaited, is_gone, state_of
from tests.unit.threads import LONG_S

SCRIPT = """
import os, sys
from pathlib import Path
from adaptor.worker import runtime
from adaptor.protocol.messages import Share
from tests.unit.trainee import CountingTrainee, Loop
loop = Loop(runtime.get().session, CountingTrainee(sys.argv[1], (Share("g", 0, 1),)))
loop.begin(10)
loop.step(11)
note = Path(sys.argv[1], f"{os.environ['RANK']}-{os.getpid()}")
{more}
print("wrote", os.getpid(), flush=True)
unfinished = note.with_suffix(".part")
unfinished.write_text(os.environ.get("TTP_NEWCOMER", ""))
unfinished.rename(note.with_suffix(".done"))  # who waits for the file reads all of it
import threading
threading.Event().wait()
"""


# What a script does that starts a process and notes its number.
CHILD = (
    "import subprocess; pid = subprocess.Popen(['sleep', '600']).pid;"
    " note.with_suffix('.child').write_text(str(pid))"
)

# Speaks as a worker does, and ends once it is told to; a process that it has started has its connection, too.
LEAVES = """
import os, signal, socket, sys
from pathlib import Path
from adaptor.protocol import environment, wire
from adaptor.protocol.board import Board
from adaptor.protocol.messages import Hello, Layout, Share
folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + os.environ[environment.AGENT])
board = Board(rank, os.environ[environment.BOARD], os.environ[environment.BOARD_RANKS])
board.hold_lifeline()
connection.sendall(wire.frame(Hello(rank, os.getpid())))
hears, tells = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    os.write(tells, b"!")
    signal.alarm(600)
    signal.pause()
os.read(hears, 1)
(folder / "child").write_text(str(child))
os.read(os.open(folder / "go", os.O_RDONLY), 1)
connection.sendall(wire.frame(Layout(rank, (Share("g", 0, 1),), str(folder), 10, "same", online="")))
board.end()
"""


class Node:
    """The workers of a node and their replacements, without a connection to the controller."""

    def __init__(self, folder: Path, spares: int, extra_lines: str, first: str) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(f"{first}\n" + SCRIPT.replace("{more}", extra_lines))
        self.log = (folder / "log").open("ab")
        self.heard: list[FromAgent] = []
        self.news = asyncio.Event()
        self.workers = Workers(asyncio.get_running_loop(), self.hear)
        self.replacements = Replacements(self.workers, spares)
        self.of_a_rank: tuple[str, ...] = ("RANK",)
        self.of_all_ranks: dict[str, str] = {}
        self.may_spare = True
        self.program = WORKER
        self.broken = False
        self.room = 100  # for so many spares
        self.spares: list[Spare] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.started = 0  # so many in the place of another one

    def hear(self, message: FromAgent) -> None:
        self.heard.append(message)
        self.news.set()

    async def told(self, kind: type, count: int = 1) -> list[Any]:
        """Return the messages of this kind, once at least `count` have come."""
        async with deadline(LONG_S):
            while len(messages := [message for message in self.heard if isinstance(message, kind)]) < count:
                self.news.clear()
                await self.news.wait()
        return messages

    async def until(self, condition: Callable[[], Any], description: str) -> None:
        await asyncio.to_thread(waiting.until, condition, description)

    async def start_workers(self, *ranks: int) -> None:
        """Start and watch the workers; no message of a worker arrives before the loop runs."""
        await self.workers.serve()
        boards = self.workers.begin(ranks)
        os.environ.update({BOARD: boards.path, BOARD_RANKS: boards.slots, AGENT: self.workers.address})
        for rank in ranks:
            self.processes[rank] = self._popen(rank, {})
        self.workers.watch(self.processes, self.folder, self.folder)
        self.replacements.begin(self)

    async def begin(self, *ranks: int) -> None:
        await self.start_workers(*ranks)
        await self.told(Layout, len(ranks))

    async def has_run(self, rank: int) -> str:
        """Return the note that the newest process of `rank` writes at the end of its script."""
        note = self.folder / f"{rank}-{self.processes[rank].pid}.done"
        await self.until(note.exists, "the script has come to its end")
        return note.read_text()

    async def waits(self) -> Spare:
        """Return the newest spare, once it has imported everything."""
        await self.until(lambda: self.spares and self.spares[-1].ready, "a spare waits")
        return self.spares[-1]

    async def makes_a_spare(self) -> Spare:
        """Return a spare that has imported the modules of a worker."""
        look(self)
        (modules,) = await self.told(Modules)
        self.replacements.hear(modules)
        return await self.waits()

    async def begin_with_a_spare(self) -> Spare:
        """Start the worker of rank 0; return a spare that has imported the modules of the worker."""
        await self.begin(0)
        await self.has_run(0)
        return await self.makes_a_spare()

    async def close(self) -> None:
        await self.replacements.end(is_last=True)
        self.workers.end_the_living()
        await self.until(lambda: all(map(is_gone, self._pids)), "all have ended")
        await self.workers.end()
        await self.workers.close()
        for process in self.processes.values():
            process.wait()
        self.log.close()

    @property
    def _pids(self) -> list[int]:
        return [process.pid for process in self.processes.values()]

    # as a starter

    def start(
        self, rank: int, added: Mapping[str, str], spare: Spare | None, *, or_cold: bool
    ) -> subprocess.Popen[bytes]:
        if self.broken:
            raise OSError(11, "Resource temporarily unavailable")
        self.started += 1
        if spare is None:
            self.processes[rank] = self._popen(rank, added)
        else:
            self.processes[rank] = spare.become(self.environment(rank, added), self.log, self.log)
        return self.processes[rank]

    def spare(self) -> Spare:
        if self.broken or len(self.spares) >= self.room:
            raise OSError(11, "Resource temporarily unavailable")
        environment = self.environment(0, {})
        del environment["RANK"]
        self.spares.append(Spare(self._command(SPARE), environment))
        return self.spares[-1]

    def _popen(self, rank: int, added: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command(self.program),
            env=self.environment(rank, added),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def _command(self, program: Path) -> list[str]:
        return [sys.executable, str(program), str(self.script), str(self.folder)]

    def environment(self, rank: int, added: Mapping[str, str]) -> dict[str, str]:
        return {**os.environ, "RANK": str(rank), "MASTER_PORT": "0", "PYTHONPATH": str(ROOT), **added}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TTP_")]:
        monkeypatch.delenv(name)
    for name in (AGENT, BOARD, BOARD_RANKS, GENERATION):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path))
    monkeypatch.setattr(spare_pool, "END_S", LONG_S)  # whom the kernel ends, it may end slowly


@contextlib.asynccontextmanager
async def running(
    folder: Path, spares: int = 0, extra_lines: str = "", first: str = ""
) -> AsyncIterator[Node]:
    """Yield a node, closed at the end; `first`, `extra_lines`: lines of the script of its workers."""
    node = Node(folder, spares, extra_lines, first)
    try:
        yield node
    finally:
        await node.close()


def always() -> bool:
    return True


async def test_a_new_process_takes_the_slot_of_a_dead_one(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.begin(0, 1)
        await node.has_run(1)
        old = node.processes[1]
        old.kill()
        (died,) = await node.told(Died)
        assert (died.rank, died.status, died.board.pid, died.board.finished) == (1, -9, old.pid, 11)
        assert node.workers.alive == {0}
        node.heard.clear()
        assert await node.replacements.replace(Replace(7, 1, 1), always) is None
        new = node.processes[1]
        assert node.workers.alive == {0, 1}
        assert (await node.told(Hello))[0] == Hello(1, new.pid)
        await node.told(Layout)
        assert await node.has_run(1) == "7"  # TTP_NEWCOMER
        board = node.workers.boards.read(1)  # type: ignore[union-attr]
        assert (board.pid, board.phase, board.finished) == (new.pid, Phase.RUNNING, 11)
        assert [message for message in node.heard if message.rank != 1] == []  # type: ignore[union-attr]
        # Its lifeline is a new one. The loop stands still until it has broken: what tells of it is queued
        # before the loop can see the status, with which nobody would be told of it any more.
        new.kill()
        waiting.until(lambda: not is_awaited(1), "its lifeline breaks")
        (dying,), (died,) = await node.told(Dying), await node.told(Died)
        assert (dying.rank, dying.board.pid, died.board.pid) == (1, new.pid, new.pid)


async def test_a_hung_process_is_ended_first(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.begin(0)
        old = node.processes[0]
        old.send_signal(signal.SIGSTOP)
        await node.until(lambda: state_of(old.pid) == "T", "it is stopped")
        node.heard.clear()
        await node.replacements.replace(Replace(1, 1, 0), always)
        (hello,) = await node.told(Hello)
        assert hello.pid == node.processes[0].pid != old.pid
        message_types = [type(message) for message in node.heard]
        assert message_types.index(Died) < message_types.index(Hello)


async def test_the_stacks_of_a_hung_process_are_written_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each incident of a generation writes its own stacks."""
    monkeypatch.setattr(processes, "find_py_spy", lambda: None)

    async def hang(node: Node, incident: int) -> Path:
        process = node.processes[0]
        process.send_signal(signal.SIGSTOP)
        await node.until(lambda: state_of(process.pid) == "T", "it is stopped")
        node.workers.order(0, Freeze(incident, stacks=True))
        await node.replacements.replace(Replace(incident, 1, 0), always)
        await node.has_run(0)
        return environment.stack_folder_of(tmp_path, incident) / "rank0.txt"

    async with running(tmp_path) as node:
        await node.begin(0)
        await node.has_run(0)
        first = await hang(node, 1)
        assert first.read_text() == "Nothing was written. State: T (stopped)\n"
        node.workers.end_incident()
        second = await hang(node, 2)
        assert second != first
        assert second.read_text() == "Nothing was written. State: T (stopped)\n"


async def test_of_two_orders_for_one_rank_the_newer_one_starts_its_process(tmp_path: Path) -> None:
    """The process of before takes so long to end that the controller has begun another attempt."""
    async with running(tmp_path) as node:
        await node.begin(0)
        old_pid = node.processes[0].pid
        orders = (Replace(7, 1, 0), Replace(8, 2, 0))
        await asyncio.gather(*(node.replacements.replace(order, always) for order in orders))
        assert node.started == 1
        assert await node.has_run(0) == "8"  # TTP_NEWCOMER
        new = node.processes[0]
        new.kill()
        assert [died.board.pid for died in await node.told(Died, 2)] == [old_pid, new.pid]


@contextlib.contextmanager
def is_given_orphans() -> Iterator[None]:
    """Let the kernel hand orphans to this process, as to the first process of a container."""
    set_subreaper, prctl = 36, ctypes.CDLL(None).prctl
    prctl(set_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(set_subreaper, 0, 0, 0, 0)


@pytest.mark.robustness(
    "B7", "ttprun is process 1 of a container, and a worker with children dies", "no zombie is left"
)
async def test_children_of_a_dead_worker_become_no_zombies(tmp_path: Path) -> None:
    with is_given_orphans():
        async with running(tmp_path, extra_lines=CHILD) as node:
            await node.begin(0)
            await node.has_run(0)
            old = node.processes[0]
            child = int((tmp_path / f"0-{old.pid}.child").read_text())
            old.kill()
            await node.told(Died)
            await node.until(lambda: is_gone(child), "its child has ended, too")
        assert state_of(child) == ""


@pytest.mark.parametrize("hello", ["is heard", "is not heard"])
async def test_the_last_messages_of_a_process_arrive_before_its_death(tmp_path: Path, hello: str) -> None:
    """The loop stands still until the process has ended, and then gets all messages at once."""
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    async with running(tmp_path) as node:
        node.program = tmp_path / "leaves.py"
        node.program.write_text(LEAVES)
        await node.start_workers(0)
        if hello == "is heard":
            await node.told(Hello)
        os.write(go, b"!")
        os.waitid(os.P_PID, node.processes[0].pid, os.WEXITED | os.WNOWAIT)
        child = int((tmp_path / "child").read_text())
        try:
            await node.told(Died)
            assert [type(message) for message in node.heard] == [Hello, Layout, Died]
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
    os.close(go)


async def test_children_of_a_dead_worker_end_before_the_new_process_starts(tmp_path: Path) -> None:
    async with running(tmp_path, extra_lines=CHILD) as node:
        await node.begin(0)
        await node.has_run(0)
        old = node.processes[0]
        pid = int((tmp_path / f"0-{old.pid}.child").read_text())
        old.kill()
        await node.replacements.replace(Replace(1, 1, 0), always)
        await node.until(lambda: is_gone(pid), "the kernel has ended the killed child")
        await node.has_run(0)
        assert not is_gone(int((tmp_path / f"0-{node.processes[0].pid}.child").read_text()))


async def test_a_newcomer_that_ends_before_it_has_said_anything_tells_its_pid(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.begin(0)
        node.processes[0].kill()
        await node.told(Died)
        node.heard.clear()
        node.program = tmp_path / "hangs.py"  # as in its first import
        node.program.write_text("import threading\nthreading.Event().wait()\n")
        await node.replacements.replace(Replace(1, 1, 0), always)
        node.processes[0].kill()
        (died,) = await node.told(Died)
        assert died.board == BoardRecord(0, pid=node.processes[0].pid)
        node.program = WORKER
        await node.replacements.replace(Replace(1, 2, 0, cold=True), always)
        assert await node.has_run(0) == "1"


async def test_no_process_can_be_started(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.begin(0)
        node.processes[0].kill()
        await node.told(Died)
        node.broken = True
        answer = await node.replacements.replace(Replace(3, 2, 0), always)
        reason = "no process can be started in its place (Resource temporarily unavailable)"
        assert answer == RegroupFailed(0, 3, 2, reason)
        assert node.workers.alive == set()


async def test_a_spare_that_cannot_be_started_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process, no descriptor or no memory is left: a rank is replaced by a new process later."""
    async with running(tmp_path, spares=1) as node:
        await node.begin(0)
        node.broken = True
        node.replacements.hear(Modules(0, (), {}, {}, {}))
        line = "[ttp] no spare process waits on this node"
        await node.until(lambda: line in capsys.readouterr().err, "it is said")
        node.replacements.end_incident()
        assert (node.workers.alive, node.spares) == ({0}, [])


async def test_one_spare_waits_and_a_second_cannot_be_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The waiting spare is used; when a process can be started again, another spare comes."""
    async with running(tmp_path, spares=2) as node:
        await node.begin(0)
        await node.has_run(0)
        node.room = 1
        look(node)
        node.replacements.hear((await node.told(Modules))[0])
        line = "[ttp] only 1 of 2 spare processes wait on this node: no more can be started (Resource"
        await node.until(lambda: line in capsys.readouterr().err, "it is said")
        spare = await node.waits()
        node.processes[0].kill()
        await node.told(Died)
        assert await node.replacements.replace(Replace(1, 1, 0), always) is None
        assert node.processes[0] is spare.process
        node.room = 3
        node.replacements.end_incident()
        assert len(node.spares) == 3


async def test_without_a_spare_where_no_restart_is_left_it_is_said_at_once(tmp_path: Path) -> None:
    """The process of before may take long to end; the job is saved, and ends."""
    async with running(tmp_path) as node:
        await node.begin(0)
        node.replacements.begin(node, spares_alone=True)
        answer = await node.replacements.replace(Replace(3, 2, 0), always)
        assert isinstance(answer, RegroupFailed)
        assert (answer.rank, answer.incident, answer.attempt) == (0, 3, 2)
        assert answer.reason.startswith("no restart is left (--max-restarts), and no spare process waits")
        assert node.workers.alive == {0}


async def test_a_node_that_has_not_started_its_workers_yet_says_so(tmp_path: Path) -> None:
    """A spare node, which the controller knows before the node's first workers exist."""
    async with running(tmp_path) as node:
        failed = await node.replacements.replace(Replace(1, 2, 0, cold=True), always)
        assert failed == RegroupFailed(0, 1, 2, "the workers of its node have not been started yet")
        assert node.started == 0


async def test_nothing_is_started_where_it_is_not_wanted_any_more(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await node.begin(0)
        old = node.processes[0]
        old.kill()
        assert await node.replacements.replace(Replace(3, 1, 0), lambda: False) is None
        assert node.processes[0] is old
        assert node.workers.alive == set()


def look(node: Node) -> None:
    node.replacements.look(node.workers.read(), 10)


async def test_a_spare_becomes_a_worker(tmp_path: Path) -> None:
    """The spare has imported the modules of the worker, and otherwise equals a cold process."""
    state = (
        "import json, sys; note.with_suffix('.json').write_text(json.dumps(dict(argv=sys.argv, path=sys.path,"
        " name=__name__, file=__file__, nice=os.nice(0), policy=os.sched_getscheduler(0),"
        " comm=Path('/proc/self/comm').read_text(),"
        " input=os.readlink('/proc/self/fd/0'), group=os.getpgrp() == os.getpid(),"
        " early='colorsys' in EARLY, known=KNOWN, pool=pool.WARM, environment=dict(os.environ))))"
    )

    (tmp_path / "pool.py").write_text(
        "import os\nWARM = os.environ.get('TORCH_WARM_POOL', '1')\nos.environ['BY_IMPORT'] = '1'\n"
    )
    first = (
        "import inspect, sys; EARLY = set(sys.modules); import colorsys, pool\n"
        "import tests.unit.trainee as last\n"
        "KNOWN = [file in inspect.modulesbyfile for file in (last.__file__, __file__)]"
    )
    async with running(tmp_path, spares=1, extra_lines=state, first=first) as node:
        await node.begin(0, 1)
        await node.has_run(0)
        look(node)
        (modules,) = await node.told(Modules)
        assert {"adaptor.worker.runtime", "tests.unit.trainee", "colorsys"} <= modules.origins.keys()
        node.replacements.hear(modules)
        spare = await node.waits()
        node.processes[1].kill()
        await node.told(Died)
        await node.replacements.replace(Replace(1, 1, 1), always)
        assert node.processes[1] is spare.process
        assert await node.has_run(1) == "1"
        first, warm = (
            json.loads((tmp_path / f"{rank}-{node.processes[rank].pid}.json").read_text()) for rank in (0, 1)
        )
        assert (first.pop("early"), warm.pop("early")) == (False, True)
        # The spare has started no processes for torch's compiler.
        assert (first.pop("pool"), warm.pop("pool")) == ("1", "0")
        assert (first.pop("known"), warm.pop("known")) == ([False, False], [True, True])
        assert first.pop("environment") | {"RANK": "1", NEWCOMER: "1"} == warm.pop("environment")
        assert first.pop("input") == "/dev/null"
        assert not warm.pop("input").startswith("socket:")
        assert first == warm
        assert f"wrote {spare.process.pid}" in (tmp_path / "log").read_text()
        # Another one comes when the incident is over, not before.
        assert len(node.spares) == 1
        node.replacements.end_incident()
        assert (await node.waits()).process.pid != spare.process.pid


async def test_the_workers_of_a_restart_are_forks_of_a_spare(tmp_path: Path) -> None:
    """Each is a child of the agent, and what a cold process would be; the spare waits on."""
    state = (
        "import json, numpy, random, sys; note.with_suffix('.json').write_text(json.dumps(dict("
        " argv=sys.argv, path=sys.path, name=__name__, file=__file__, nice=os.nice(0),"
        " collects=__import__('gc').get_threshold(), comm=Path('/proc/self/comm').read_text(),"
        " input=os.readlink('/proc/self/fd/0'), group=os.getpgrp() == os.getsid(0) == os.getpid(),"
        " parent=os.getppid(), descriptors=len(os.listdir('/proc/self/fd')),"
        " own=own.VALUE, environment=dict(os.environ),"
        " python=random.random(), numpy=numpy.random.random(), early='own' in EARLY)))"
    )
    (tmp_path / "own.py").write_text(
        "import numpy, os\nVALUE = os.environ.get('MASTER_ADDR')\nos.environ['BY_IMPORT'] = VALUE or ''\n"
    )
    first = "import sys; EARLY = set(sys.modules); import own"
    async with running(tmp_path, spares=1, extra_lines=state, first=first) as node:
        await node.begin(0, 1)
        await node.has_run(0)
        spare = await node.makes_a_spare()
        cold = json.loads((tmp_path / f"0-{node.processes[0].pid}.json").read_text())
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        for generation in (1, 2):
            node.workers.end_the_living()
            await node.told(Died, 2 * generation)
            await node.replacements.end(is_last=False)
            await node.workers.end()
            boards = node.workers.begin((0, 1))
            # The new generation has other boards and another port, which no import has read.
            os.environ.update({BOARD: boards.path, BOARD_RANKS: boards.slots})
            assert await node.replacements.spares.spare_to_fork() is spare
            for rank in (0, 1):
                node.processes[rank] = spare.fork(
                    node.environment(rank, {"MASTER_PORT": str(generation)}), node.log, node.log
                )
            node.workers.watch(node.processes, tmp_path, tmp_path)
            node.replacements.begin(node)
            await node.told(Layout, 2 + 2 * generation)
            await node.has_run(0)
            await node.has_run(1)
            warm = [
                json.loads((tmp_path / f"{rank}-{node.processes[rank].pid}.json").read_text())
                for rank in (0, 1)
            ]
            for drawn in ("python", "numpy"):
                assert warm[0].pop(drawn) != warm[1].pop(drawn)
            for rank, state_of_rank in enumerate(warm):
                assert state_of_rank.pop("early")
                assert state_of_rank.pop("environment") == {
                    **cold["environment"],
                    "MASTER_PORT": str(generation),
                    "RANK": str(rank),
                    BOARD: boards.path,
                    BOARD_RANKS: boards.slots,
                }
                assert not state_of_rank.pop("input").startswith("socket:")
                assert state_of_rank == {name: cold[name] for name in state_of_rank}
            assert node.spares == [spare]
            assert spare.process.poll() is None
        assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


async def test_output_of_a_former_spare_appears_at_once_on_a_terminal(tmp_path: Path) -> None:
    """The spare itself was started with /dev/null, for which Python buffers lines."""
    async with running(tmp_path, spares=1, extra_lines="print('a line')") as node:
        await node.begin_with_a_spare()
        node.processes[0].kill()
        await node.told(Died)
        terminal, of_the_worker = pty.openpty()
        node.log.close()
        node.log = os.fdopen(of_the_worker, "ab", 0)
        await node.replacements.replace(Replace(1, 1, 0), always)
        printed = b""
        with os.fdopen(terminal, "rb", 0) as shown:
            while b"a line" not in printed:
                readable, _, _ = await asyncio.to_thread(select.select, [shown], [], [], LONG_S)
                assert readable, printed
                printed += shown.read(100)


@pytest.mark.parametrize(
    ("module_code", "reason"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "a thread",
        ),
        ("import subprocess; CHILD = subprocess.Popen(['sleep', '600'])", "a process"),
        ("import os; HELD = os.open('/dev/zero', os.O_RDONLY)", "opens /dev/zero"),
        # Otherwise a worker that is killed with the lock would stop the workers of all later restarts.
        ("import multiprocessing; LOCK = multiprocessing.Lock()", "shared memory (/dev/shm/"),
        ("import mmap; SHARED = mmap.mmap(-1, 4096)", "shared memory (/dev/zero"),
        ("import random; random.seed(1)", "random numbers"),
        ("import numpy; numpy.random.seed(1)", "random numbers"),
    ],
)
async def test_a_spare_that_is_not_to_be_forked_says_why(
    tmp_path: Path, module_code: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(f"{module_code}\n")
    async with running(tmp_path, spares=1, first="import own") as node:
        spare = await node.begin_with_a_spare()
        assert reason in spare.no_forks
        await node.replacements.end(is_last=False)
        assert await node.replacements.spares.spare_to_fork() is None
        assert spare.process.poll() is not None
        assert f"all workers of this node import by themselves: {spare.no_forks}" in capfd.readouterr().err


async def test_a_spare_with_one_thread_is_not_forked_to_try(tmp_path: Path) -> None:
    """A fork would make each page of the spare cost a fault when it is first written to, in a recovery."""
    forked = tmp_path / "forked"
    (tmp_path / "own.py").write_text(
        f"import os, pathlib\nos.register_at_fork(before=pathlib.Path({str(forked)!r}).touch)\n"
    )
    async with running(tmp_path, spares=1, first="import own") as node:
        assert (await node.begin_with_a_spare()).no_forks == ""
        assert not forked.exists()


async def test_a_restart_does_not_wait_for_a_spare_whose_imports_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spare_pool, "STANDSTILL_S", 0.2)
    hang = tmp_path / "hang"
    module_code = f"import os, threading\nif os.path.exists({str(hang)!r}): threading.Event().wait()\n"
    (tmp_path / "own.py").write_text(module_code)
    async with running(tmp_path, spares=1, first="import own") as node:
        await node.begin(0)
        await node.has_run(0)
        hang.touch()
        look(node)
        node.replacements.hear((await node.told(Modules))[0])
        await node.replacements.end(is_last=False)
        async with deadline(LONG_S):
            assert await node.replacements.spares.spare_to_fork() is None
        (spare,) = node.spares
        assert spare.process.poll() is not None
        assert f"the import in the spare process {spare.process.pid} hangs" in capfd.readouterr().err


async def test_a_spare_that_a_restart_waits_for_stands_back_no_longer(tmp_path: Path) -> None:
    """On a machine with other work its imports would take minutes."""
    hang = tmp_path / "hang"
    module_code = f"import os, time\nwhile os.path.exists({str(hang)!r}): time.sleep(0.1)\n"
    (tmp_path / "own.py").write_text(module_code)
    async with running(tmp_path, spares=1, first="import own") as node:
        await node.begin(0)
        await node.has_run(0)
        hang.touch()
        look(node)
        (modules,) = await node.told(Modules)
        node.replacements.hear(modules)
        (spare,) = node.spares

        def schedules_as(policy: int) -> Callable[[], bool]:
            return lambda: os.sched_getscheduler(spare.process.pid) == policy

        assert schedules_as(os.SCHED_BATCH)(), "the spare stands back from its start"
        await node.until(lambda: spare.told, "the spare imports beside workers")
        await node.replacements.end(is_last=False)
        fork = asyncio.ensure_future(node.replacements.spares.spare_to_fork())
        await node.until(schedules_as(os.SCHED_OTHER), "the spare stands back no longer")
        assert os.getpriority(os.PRIO_PROCESS, spare.process.pid) == os.nice(0)
        hang.unlink()
        assert await fork is spare


async def test_no_worker_is_forked_where_an_import_has_read_another_value(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\nPORT = os.environ['MASTER_PORT']\n")
    async with running(tmp_path, spares=1, first="import own") as node:
        spare = await node.begin_with_a_spare()
        with pytest.raises(OSError, match="own reads MASTER_PORT while it is imported, and it has another"):
            spare.fork(node.environment(0, {"MASTER_PORT": "1"}), node.log, node.log)
        await node.until(lambda: spare.process.poll() is not None, "the spare has ended")


async def test_a_spare_outlives_a_fork_that_dies_before_it_has_its_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(worker_forks.ForkedWorker):
        def __init__(self, command: object, pid: int) -> None:
            super().__init__(command, pid)
            self.kill()
            self.wait()

    async with running(tmp_path, spares=1) as node:
        spare = await node.begin_with_a_spare()
        with monkeypatch.context() as patch:
            patch.setattr(worker_forks, "ForkedWorker", Killed)
            for _ in range(2):
                spare.fork(node.environment(0, {}), node.log, node.log)
        worker = spare.fork(node.environment(0, {}), node.log, node.log)
        assert spare.process.poll() is None
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    ("struck_by", "reason"),
    [
        (signal.SIGKILL, "has ended"),
        (signal.SIGSTOP, "has not answered for 0.2 s"),
        (None, "has ended"),  # by the agent
    ],
)
async def test_a_spare_that_forks_no_worker_any_more_is_ended(
    struck_by: signal.Signals | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_pool, "FORK_S", 0.2)
    async with running(tmp_path, spares=1) as node:
        spare = await node.begin_with_a_spare()
        if struck_by is None:
            await spare.end()
        else:
            os.kill(spare.process.pid, struck_by)
        with pytest.raises(OSError, match=f"^the spare process {spare.process.pid} {reason}$"):
            spare.fork(node.environment(0, {}), node.log, node.log)
        await node.until(lambda: spare.process.poll() is not None, "the spare has ended")


async def test_a_stopped_spare_neither_takes_a_place_nor_forks(tmp_path: Path) -> None:
    async with running(tmp_path, spares=1) as node:
        stopped = await node.begin_with_a_spare()
        os.kill(stopped.process.pid, signal.SIGSTOP)
        await node.until(lambda: state_of(stopped.process.pid) == "T", "the spare is stopped")
        node.processes[0].kill()
        await node.replacements.replace(Replace(1, 1, 0), always)
        assert await node.has_run(0) == "1"
        assert node.processes[0] is not stopped.process
        await node.until(lambda: len(node.spares) == 2, "another one is made")
        next_spare = await node.waits()
        os.kill(next_spare.process.pid, signal.SIGSTOP)
        await node.until(lambda: state_of(next_spare.process.pid) == "T", "the spare is stopped")
        await node.replacements.end(is_last=False)
        assert await node.replacements.spares.spare_to_fork() is None
        assert next_spare.process.poll() is not None


async def test_a_spare_imports_modules_that_import_each_other(tmp_path: Path) -> None:
    """`lib.tool` can be imported by `lib.engine` alone, which can be imported once in a process."""
    for name, text in {
        "__init__": "",
        "tool": "from lib.engine import NAME\nTOOL = NAME",
        "engine/parts": "NAME = 1",
        "engine/__init__": "from .parts import NAME\nfrom lib.tool import TOOL\n"
        "import sys; sys.modules[__name__].parts",
    }.items():
        path = tmp_path / "lib" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    await a_spare_takes_the_place(
        tmp_path,
        extra_lines="import sys; early = 'lib.engine' in sys.modules; import lib.engine;"
        " assert early == ('TTP_NEWCOMER' in os.environ)",
    )


async def test_no_worker_is_asked_before_it_has_finished_a_step(tmp_path: Path) -> None:
    async with running(tmp_path, spares=1) as node:
        await node.begin(0)
        await node.has_run(0)
        node.replacements.look(node.workers.read(), 11)
        look(node)
        await node.told(Modules)
        assert len(await node.told(Modules)) == 1


async def test_the_newest_layout_of_a_rank_decides_whether_there_are_spares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that calls `protection.run_steps` sends a layout before `run_steps` begins, and another
    afterwards.

    Spares stay as long as restarts are left.
    """
    async with running(tmp_path, spares=1) as node:
        await node.begin(0)
        await node.has_run(0)
        (layout,) = await node.told(Layout)
        orders: list[Any] = []
        monkeypatch.setattr(node.workers, "order", lambda rank, order: orders.append(order))
        for spares_alone, online, asks in (
            (True, UNDECIDED, False),
            (True, "", True),
            (False, UNDECIDED, True),
        ):
            orders.clear()
            node.replacements.begin(node, spares_alone=spares_alone)
            node.replacements.hear_layout(msgspec.structs.replace(layout, online=online))
            look(node)
            assert orders == [ModulesProbe()] * asks


@pytest.mark.parametrize(
    ("spares", "online_s", "restarts", "is_recorded"),
    [
        ("1", "0", "0", False),
        ("1", "0", "2", False),
        ("1", "0", "3", True),
        ("1", "60", "0", True),
        ("0", "60", "3", False),
    ],
)
def test_a_worker_records_its_imports_where_a_spare_may_need_them(
    spares: str, online_s: str, restarts: str, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_SPARES", spares)
    monkeypatch.setenv("TTP_ONLINE", online_s)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(min(int(restarts), 2)))
    assert worker_main._may_have_spares() is is_recorded


async def test_a_cold_process_where_no_spare_is_to_be_used(tmp_path: Path) -> None:
    async with running(tmp_path, spares=1) as node:
        spare = await node.begin_with_a_spare()
        node.processes[0].kill()
        await node.replacements.replace(Replace(1, 2, 0, cold=True), always)
        assert node.processes[0] is not spare.process
        assert await node.has_run(0) == "1"


async def test_a_spare_that_ends_is_made_again_a_few_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, spares=1) as node:
        await node.begin(0)
        await node.has_run(0)
        look(node)
        node.replacements.hear((await node.told(Modules))[0])
        for count in range(1, MOST_DEATHS + 1):
            await node.until(lambda count=count: len(node.spares) == count, "another one is made")
            (await node.waits()).process.kill()
        line = f"no spare process waits on this node: {MOST_DEATHS} have ended, the last one was ended by SIG"
        await node.until(lambda: line in capsys.readouterr().err, "it is said")
        node.processes[0].kill()
        await node.replacements.replace(Replace(1, 1, 0), always)
        assert await node.has_run(0) == "1"
        assert len(node.spares) == MOST_DEATHS


async def a_spare_takes_the_place(tmp_path: Path, *, extra_lines: str) -> None:
    """Assert that a spare takes the place of a worker and runs `extra_lines` of the script without an
    error.
    """
    async with running(tmp_path, spares=1, extra_lines=extra_lines) as node:
        spare = await node.begin_with_a_spare()
        node.processes[0].kill()
        await node.replacements.replace(Replace(1, 1, 0), always)
        assert node.processes[0] is spare.process
        assert await node.has_run(0) == "1"


async def a_spare_imports_a_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra_lines: str, *, without: str, reason: str
) -> None:
    """A spare imports `colorsys`, and no module from `without` on, for the reason `reason`.

    The script runs `extra_lines` and imports the other modules when the spare is a worker.
    """
    imports = (
        "import sys; EARLY = set(sys.modules); import colorsys; {more}; "
        "assert ('colorsys' in EARLY, '{without}' in EARLY) == ('TTP_NEWCOMER' in os.environ, False)"
    )
    await a_spare_takes_the_place(tmp_path, extra_lines=imports.format(more=extra_lines, without=without))
    line = (
        f"[ttp] spare processes import no module from {without} on, so a replacement takes longer: {reason}"
    )
    assert line in capsys.readouterr().err


async def test_a_spare_imports_no_module_that_reads_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_a_rank.py").write_text("import os\nDEVICE = int(os.environ.get('RANK', '9'))\n")

    await a_spare_imports_a_part(
        *(tmp_path, capsys, "import of_a_rank; assert of_a_rank.DEVICE == 0"),
        without="of_a_rank",
        reason="of_a_rank reads RANK while it is imported; to avoid this, read it in a function",
    )


MODE = "import os\nMODE = os.environ.get('MODE')\n"


@pytest.mark.parametrize(
    ("extra_lines", "without", "reason"),
    [
        (
            "os.environ['MODE'] = 'exact'; import mode; assert mode.MODE == 'exact'",
            "mode",
            "mode reads MODE while it is imported",
        ),
        (
            "import early; os.environ['MODE'] = 'exact'; import mode; assert mode.MODE == 'exact'",
            "mode",
            "mode reads MODE while it is imported",
        ),
        (
            "os.environ['OMP_NUM_THREADS'] = '77'; import numpy",
            "numpy",
            "numpy reads OMP_NUM_THREADS when it is loaded",
        ),
    ],
    ids=["a module reads it", "one before the change, too", "a library"],
)
async def test_a_spare_imports_no_module_that_reads_a_variable_of_the_script(
    extra_lines: str, without: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module would read another value than in a worker, where the script sets the variable first."""
    (tmp_path / "early.py").write_text(MODE)
    (tmp_path / "mode.py").write_text(MODE)
    remedy = ", and the script sets it before; to avoid this, set it in the environment of ttprun"
    await a_spare_imports_a_part(tmp_path, capsys, extra_lines, without=without, reason=reason + remedy)


@pytest.mark.parametrize(
    "extra_lines",
    [
        "import sets, mode; assert mode.MODE == 'exact'",
        "import mode; os.environ['OTHER_MODE'] = 'exact'",
        "import mode; os.environ['MODE'] = 'exact'; import later",
        "os.environ['OMP_NUM_THREADS'] = '77'; import later",
    ],
    ids=[
        "an import sets it",
        "nobody reads it",
        "it is set after the import",
        "no library is loaded after it",
    ],
)
async def test_a_variable_that_makes_no_difference_to_imports_leaves_spares_fit(
    extra_lines: str, tmp_path: Path
) -> None:
    (tmp_path / "sets.py").write_text("import os\nos.environ.setdefault('MODE', 'exact')\n")
    (tmp_path / "mode.py").write_text(MODE)
    (tmp_path / "later.py").touch()

    await a_spare_takes_the_place(tmp_path, extra_lines=extra_lines)


async def test_a_module_that_torch_makes_in_a_folder_of_the_process_leaves_spares_fit(tmp_path: Path) -> None:
    """torch 2.7 makes such a module at import; its folder is removed when its process ends."""
    (tmp_path / "makes.py").write_text(
        "import pathlib, shutil, sys, tempfile\n"
        "folder = tempfile.mkdtemp(dir=pathlib.Path(__file__).parent)\n"
        "pathlib.Path(folder, '_remote_module_non_scriptable.py').write_text('def forward(): pass')\n"
        "sys.path.insert(0, folder)\n"
        "import _remote_module_non_scriptable\n"
        "shutil.rmtree(folder)\n"
    )
    (tmp_path / "later.py").touch()
    extra_lines = (
        "import sys; early = 'later' in sys.modules; import makes, later;"
        " assert early == ('TTP_NEWCOMER' in os.environ)"
    )
    await a_spare_takes_the_place(tmp_path, extra_lines=extra_lines)


HERE = "def function(): pass\n"
THERE = "from here import function\n"


async def test_a_spare_imports_no_module_with_a_function_that_the_script_has_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A spare that had imported the module before the script ran would have the original function."""
    (tmp_path / "here.py").write_text(HERE)
    (tmp_path / "there.py").write_text(THERE)

    await a_spare_imports_a_part(
        *(
            tmp_path,
            capsys,
            "import here; here.function = print; import there; assert there.function is print",
        ),
        without="there",
        reason="there.function is another one in a worker, where the script changes it before the import of"
        " there; to avoid this, make the change in a module that it imports",
    )


async def test_a_spare_makes_the_changes_that_an_import_makes(tmp_path: Path) -> None:
    """A module that the script imports makes the changes; a spare imports it before the changed modules."""
    (tmp_path / "here.py").write_text(HERE)
    (tmp_path / "there.py").write_text(THERE)
    (tmp_path / "changes.py").write_text("import here\nhere.function = print\n")

    await a_spare_takes_the_place(
        tmp_path, extra_lines="import changes, there; assert there.function is print"
    )


async def test_a_spare_makes_the_changes_that_the_script_makes_after_an_import(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(HERE)
    (tmp_path / "there.py").write_text(THERE)

    change = "import there; assert there.function.__module__ == 'here'; there.function = print"
    await a_spare_takes_the_place(tmp_path, extra_lines=change)


async def test_spares_end_with_the_agent_and_the_generation(tmp_path: Path) -> None:
    async with running(tmp_path, spares=2) as node:
        waiting = await node.begin_with_a_spare()
        importing = node.spares[0] if node.spares[0] is not waiting else node.spares[1]
        await node.replacements.end(is_last=True)
        for spare in (waiting, importing):
            assert is_gone(spare.process.pid)


async def test_a_module_that_has_the_name_of_another_one_is_left_alone(tmp_path: Path) -> None:
    """The script's path was another one at the import; a spare would import the first module of that name."""
    for folder in ("first", "second"):
        (tmp_path / folder / "twofold").mkdir(parents=True)
        (tmp_path / folder / "twofold/__init__.py").touch()
    (tmp_path / "second/twofold/inner.py").touch()
    extra_lines = (
        "import sys; early = 'twofold' in sys.modules; sys.path.append(sys.argv[1] + '/second');"
        " import twofold.inner; sys.path.insert(0, sys.argv[1] + '/first');"
        " note.with_suffix('.early').write_text(f'{early} {twofold.__file__}')"
    )
    async with running(tmp_path, spares=1, extra_lines=extra_lines) as node:
        spare = await node.begin_with_a_spare()
        node.processes[0].kill()
        await node.replacements.replace(Replace(1, 1, 0), always)
        assert node.processes[0] is spare.process
        assert await node.has_run(0) == "1"
        early = (tmp_path / f"0-{spare.process.pid}.early").read_text()
        assert early == f"False {tmp_path}/second/twofold/__init__.py"

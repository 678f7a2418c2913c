"""Plays agent and controller for the workers of one node, over the real protocol: an online recovery alone.

What it decides is what the real ones decide where nothing else goes wrong; whatever does raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adaptor.launchers.agent_listener import LOOPBACK
from adaptor.launchers.dump_store import DumpStore
from adaptor.protocol import environment as names
from adaptor.protocol import wire
from adaptor.protocol.board import BoardMemory
from adaptor.protocol.messages import (
    Freeze,
    Frozen,
    Hello,
    Joined,
    Layout,
    Proceed,
    Raised,
    Regroup,
    RegroupFailed,
    Replacement,
    ShardSource,
    ToWorker,
)
from tests.faults import harness, warm
from tests.faults.harness import Job
from tests.frameworks import args
from tests.ports import free_ports

WORKER = Path(harness.ROOT) / "launchers/worker_main.py"
# A quiet machine needs a tenth of it.
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Ended:
    """A process has ended."""

    rank: int
    process: subprocess.Popen[bytes]
    code: int


@dataclass
class OnlineAgent:
    """Runs `job` to its end; `incidents` says what happened, in words."""

    job: Job
    online: str = "60"
    incidents: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Train; every fault is recovered online.

        Raises:
            AssertionError: something went wrong.
        """
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        size = self.job.layout.processes
        self._ranks = range(size)
        self._boards = BoardMemory(self._ranks)
        self._address = f"ttp-test-{secrets.token_hex(8)}"
        (port,) = free_ports(1)
        keep = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self._environment = self._base(port)
        self._connections: dict[int, socket.socket] = {}
        self._accepted: list[socket.socket] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._layouts: dict[int, Layout] = {}
        self._all: list[subprocess.Popen[bytes]] = []
        loop = asyncio.new_event_loop()
        runs = threading.Thread(target=loop.run_forever, daemon=True)
        runs.start()
        self._store = DumpStore(LOOPBACK, size)
        loop.call_soon_threadsafe(self._store.start)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + self._address)
            listener.listen(size)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            try:
                for rank in self._ranks:
                    self._start(rank, 0)
                self._serve()
            finally:
                for process in self._all:
                    if process.poll() is None:
                        process.kill()
                        process.wait()
                for connection in self._accepted:
                    connection.close()
                asyncio.run_coroutine_threadsafe(self._store.close(), loop).result()
                loop.call_soon_threadsafe(loop.stop)
                runs.join()
                loop.close()
                del keep

    def _base(self, port: int) -> dict[str, str]:
        job, size = self.job, self.job.layout.processes
        job.out.mkdir(parents=True, exist_ok=True)
        (job.out / "scratch").mkdir()
        given = args.environment(
            TTP_LOG_PATH=str(job.out / "logs"),
            PYTHONUNBUFFERED="1",
            PYTHONWARNINGS="ignore",
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            TTP_DEVICE="cpu",
            TTP_ONLINE=self.online,
            TTP_REPLICA=job.layout.replica,
            **{
                names.AGENT: self._address,
                names.BOARD: self._boards.path,
                names.BOARD_RANKS: self._boards.slots,
                names.SCRATCH: str(job.out / "scratch"),
                names.GENERATION: "0",
                names.IS_RESTART: "0",
            },
        )
        given.pop("PYTHONDONTWRITEBYTECODE", None)
        return {**given, **job.environment}

    def _start(self, rank: int, incident: int) -> None:
        environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if incident:
            environment[names.NEWCOMER] = str(incident)
            self._boards.lifelines[rank].prepare()
        command = harness.worker_command(self.job)
        with (self.job.out / f"log{rank}-{incident}.txt").open("wb") as sink:
            process = warm.Warm(
                [sys.executable, str(WORKER), *command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                cwd=harness.ROOT,
            )
        self._processes[rank] = process
        self._all.append(process)
        threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._heard.put(Ended(rank, process, process.wait()))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._accepted.append(connection)
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            while True:
                message = wire.receive(connection, wire.from_worker)
                if isinstance(message, Hello):
                    self._connections[message.rank] = connection
                self._heard.put(message)
        except (EOFError, OSError):
            return

    def _say(self, rank: int, message: ToWorker) -> None:
        with contextlib.suppress(OSError):  # it has ended, which will be heard
            self._connections[rank].sendall(wire.frame(message))

    def _next(self) -> Any:
        try:
            message = self._heard.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"nothing is heard any more; {self._logs()}") from None
        if isinstance(message, Layout):
            self._layouts[message.rank] = message
            assert message.online == ("" if self.online != "0" else "off"), message.online
        return message

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.job.out.glob("log*-*.txt")))

    def _serve(self) -> None:
        running = set(self._ranks)
        number = 0
        while running:
            message = self._next()
            if isinstance(message, Ended) and message.code == 0:
                running.discard(message.rank)
            elif isinstance(message, Ended):
                number += 1
                self._recover(number, {message.rank: message.code}, time.monotonic())
            elif isinstance(message, Raised):
                number += 1
                self._recover(number, {}, time.monotonic())

    def _recover(self, number: int, dead: dict[int, int], since: float) -> None:
        """Freeze, choose the step, replace who is dead, regroup, proceed."""
        alive = [rank for rank in self._ranks if rank not in dead]
        for rank in alive:
            self._say(rank, Freeze(number))
        boards = {}
        while len(boards) < len(alive):
            message = self._next()
            if isinstance(message, Frozen) and message.incident == number:
                boards[message.rank] = message.board
            elif isinstance(message, Ended):
                assert message.code == -9, f"{message}: {self._logs()}"
                dead[message.rank] = message.code
                alive.remove(message.rank)
                boards.pop(message.rank, None)
        steps = {step for board in boards.values() for step in (board.oldest, board.finished, board.ahead)}
        step = max(step for step in steps if all(board.provides(step) for board in boards.values()))
        replaced = tuple(self._replacement(rank, alive) for rank in sorted(dead))
        order = Regroup(
            incident=number,
            attempt=1,
            step=step,
            origin=0,
            replaced=replaced,
            store_host=self._store.host,
            store_port=self._store.port,
            timeout_s=60.0,
            store_secret=self._store.secret,
        )
        for rank in dead:
            self._start(rank, number)
        for rank in alive:
            self._say(rank, order)
        joined: dict[int, Joined] = {}
        while len(joined) < len(self._ranks):
            message = self._next()
            if isinstance(message, Hello):
                self._say(message.rank, order)
            elif isinstance(message, Joined):
                joined[message.rank] = message
            elif isinstance(message, (RegroupFailed, Ended)) or (
                isinstance(message, Raised) and message.rank in dead
            ):
                raise AssertionError(f"{message}\n{self._logs()}")
        assert {(one.step, one.digest) for one in joined.values()} == {(step, joined[0].digest)}
        for rank in self._ranks:
            self._say(rank, Proceed(number, step))
        self.seconds.append(time.monotonic() - since)
        self.incidents.append(f"step {step}, replaced {sorted(dead)}")

    def _replacement(self, rank: int, alive: list[int]) -> Replacement:
        own = {share.group for share in self._layouts[rank].shares if share.can_write}
        twins = [
            other
            for other in alive
            if own & {share.group for share in self._layouts[other].shares if share.can_write}
        ]
        sources = []
        for share in self._layouts[rank].shares:
            for other in alive:
                if any((share.group, share.index) == (o.group, o.index) for o in self._layouts[other].shares):
                    sources.append(ShardSource(share.group, share.index, other))
                    break
        return Replacement(rank, twins[0], tuple(sources))

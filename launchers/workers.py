"""A node's workers, as its agent sees them: their boards and connections, and how they end.

Everything here runs on the agent's control thread, except the threads that wait for lifelines. Nothing has a
name in a file system: the workers' socket is an abstract one, the boards are anonymous memory, so nothing is
left behind however the agent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from adaptor.control import wire
from adaptor.control.board import BoardMemory
from adaptor.control.deadline import deadline
from adaptor.control.messages import (
    BoardRecord,
    Died,
    Dying,
    Freeze,
    FromAgent,
    FromWorker,
    Hello,
    Look,
    Looked,
    Phase,
    ToWorker,
)
from adaptor.launchers.strangers import Strangers
from adaptor.launchers.witness import Witness

# In /proc/PID/stat: the process is on its way out (PF_EXITING of the kernel), and where the flags stand.
_EXITING = 0x4
_FLAGS_FIELD = 6  # behind the name, which is in parentheses and may hold anything
# Who is asked where it stands answers at once, or hangs so that nobody answers there.
LOOKED_S = 1.0


class Workers:
    """One agent's workers, generation after generation: `begin`, `watch`, `end`.

    Args:
        loop: of the control thread.
        up: takes what the workers say, and word of their deaths.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, up: Callable[[FromAgent], None]) -> None:
        self._loop = loop
        self._up = up
        self.address = f"ttp-{os.getpid()}-{secrets.token_hex(8)}"
        self.alive: set[int] = set()
        self.boards: BoardMemory | None = None
        self._server: asyncio.AbstractServer | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._deaths: dict[int, int] = {}  # ranks, and the descriptors that tell of their deaths
        self._lifelines: list[threading.Thread] = []
        self._held: set[int] = set()  # lifelines, by processes that still run the program that was started
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._hearing: set[asyncio.StreamWriter] = set()
        self._strangers = Strangers("the workers' socket")
        self._witness: Witness | None = None
        self._look: asyncio.Task[None] | None = None
        self._held_back: list[tuple[int, ToWorker]] | None = None  # orders, in their order, during the look
        self._looked: asyncio.Queue[Looked] = asyncio.Queue()

    async def serve(self) -> None:
        """Hear workers, from now to `close`."""
        self._server = await asyncio.start_unix_server(self._hear, "\0" + self.address)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        while self._hearing:
            await asyncio.sleep(0)
        self._strangers.close()

    def begin(self, ranks: Sequence[int]) -> BoardMemory:
        """Before the workers of `ranks` start: their boards."""
        self.boards = BoardMemory(ranks)
        self.alive = set(ranks)
        return self.boards

    def watch(
        self, processes: Mapping[int, subprocess.Popen[bytes]], stacks_folder: Path, scratch: Path
    ) -> None:
        """The workers have been started; `processes` by rank."""
        self._processes = dict(processes)
        self._witness = Witness(stacks_folder, scratch)
        for rank, process in processes.items():
            self._deaths[rank] = os.pidfd_open(process.pid)
            self._loop.add_reader(self._deaths[rank], self._on_death, rank, process)

    @property
    def running(self) -> bool:
        """Whether workers have been started and are alive."""
        return bool(self._processes and self.alive)

    def read(self) -> list[BoardRecord]:
        """The boards of the workers that are alive."""
        return [self.boards.read(rank) for rank in sorted(self.alive)] if self.boards is not None else []

    @property
    def traced(self) -> bool:
        """Whether a debugger holds one of the workers."""
        return any(map(_traced, self._living.values()))

    async def take_their_time(self) -> bool:
        """Whether one of the workers is in a debugger of its own, or in a compiler; it is asked."""
        self._looked = asyncio.Queue()
        asked = list(self.alive)  # some of them may die meanwhile
        for rank in asked:
            self.order(rank, Look())
        with contextlib.suppress(asyncio.TimeoutError):
            async with deadline(LOOKED_S):
                for _ in asked:
                    if (await self._looked.get()).takes_its_time:
                        return True
        return False

    def order(self, rank: int, message: ToWorker) -> None:
        """Say `message` to the worker of `rank`, where there is one that listens.

        Where the job hangs, all are looked at first; orders keep their order.
        """
        if isinstance(message, Freeze) and message.stacks and self._look is None:
            self._held_back = []
            self._look = self._loop.create_task(self._look_first())
        if self._held_back is not None:
            self._held_back.append((rank, message))
        elif rank in self._connections:
            self._connections[rank].write(wire.frame(message))

    async def _look_first(self) -> None:
        assert self._witness is not None
        try:
            await self._witness.look(self._living)
        finally:
            orders, self._held_back = self._held_back or [], None
            for rank, message in orders:
                self.order(rank, message)

    @property
    def _living(self) -> dict[int, int]:
        """Processes, by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if rank in self.alive}

    async def ask_for_stacks(self) -> None:
        """Where the job hangs, of those that have not written theirs."""
        if self._witness is not None:
            await self._witness.ask(self._living)

    async def keep_stacks(self) -> None:
        """Of those that have been asked."""
        if self._witness is not None:
            await self._witness.keep(self._living)

    def end_the_living(self) -> None:
        """End those that have not gone by themselves."""
        for rank, process in self._processes.items():
            if rank in self.alive:
                _end_session(process.pid)

    async def end(self) -> None:
        """Every worker of the generation is dead."""
        if self._look is not None:
            await self._look
            self._look = None  # not before: the orders that it held back would make another one look
        for writer in self._hearing:
            writer.close()
        self._connections.clear()
        for rank in list(self._deaths):
            self._forget(rank)
        self._processes = {}
        self._held = set()
        self.alive = set()
        boards, self.boards = self.boards, None
        for thread in self._lifelines:
            await asyncio.to_thread(thread.join)
        self._lifelines = []
        if boards is not None:
            boards.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        self._hearing.add(writer)
        try:
            if not _same_user(writer.get_extra_info("socket")):
                self._strangers.count("were of another user")
                return
            hello = await wire.read(reader, wire.from_worker)
            if (
                not isinstance(hello, Hello)
                or hello.rank not in self.alive
                or hello.rank in self._connections
            ):
                self._strangers.count("were no worker of this node")
                return
            rank = hello.rank
            self._connections[rank] = writer
            self._watch_lifeline(rank, hello.pid)
            message: FromWorker = hello
            while message.rank == rank:
                if isinstance(message, Looked):
                    self._looked.put_nowait(message)
                else:
                    self._up(message)
                message = await wire.read(reader, wire.from_worker)
        except (EOFError, OSError, msgspec.DecodeError):
            pass  # the death of the worker is learnt from the operating system
        finally:
            if self._connections.get(rank) is writer:
                del self._connections[rank]
            writer.close()
            self._hearing.discard(writer)

    def _watch_lifeline(self, rank: int, pid: int) -> None:
        boards = self.boards
        assert boards is not None
        lifeline = boards.lifelines[rank]

        def wait() -> None:
            if not lifeline.wait(lambda: self.boards is boards):
                return
            if _exiting(pid):
                self._loop.call_soon_threadsafe(self._on_dying, rank, time.time())
            else:
                self._held.discard(rank)

        self._held.add(rank)
        thread = threading.Thread(target=wait, name=f"ttp-lifeline-{rank}", daemon=True)
        thread.start()
        self._lifelines.append(thread)

    def _on_dying(self, rank: int, at: float) -> None:
        if self.boards is None or rank not in self.alive:
            return
        board = self.boards.read(rank)
        if board.phase != Phase.ENDED:
            self._up(Dying(rank, at, board))

    def _on_death(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        at = time.time()
        self._forget(rank)
        # Children of the worker, data loaders and the like; before anyone else may get its number.
        _end_session(process.pid)
        status = process.wait()  # at once; poll() knows nothing while torch's thread is in it
        assert self.boards is not None  # `end` forgets the descriptor before it
        if status == 0 and rank in self._held:  # of a small process this may be known first
            self._on_dying(rank, at)
        self.alive.discard(rank)
        self._up(Died(rank, status, at, self.boards.read(rank)))

    def _forget(self, rank: int) -> None:
        descriptor = self._deaths.pop(rank)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)


def _same_user(connection: Any) -> bool:
    """Abstract sockets have no permissions, so the kernel is asked who is on the other side."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _exiting(pid: int) -> bool:
    """Whether the process is gone or on its way: one that replaces its program (exec) lets go, too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(fields[_FLAGS_FIELD]) & _EXITING)


def _traced(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    return bool(re.search(rb"^TracerPid:\t[1-9]", status, re.MULTILINE))


def _end_session(leader: int) -> None:
    """End every process of the session that a worker leads (torch elastic starts each in its own)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)

"""The workers of a node: their processes, boards and connections, on the agent's control thread.

Only the threads that wait for lifelines run elsewhere. The workers' socket is abstract and the boards are
anonymous memory, so nothing remains in a file system, however the agent ends.

Invariant: what another thread brings to the loop, that a worker dies or that this agent is told to end, is
reported after all messages that workers had sent before: they wait in their sockets (`_report_end`,
`read_sent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from adaptor import output, text
from adaptor.host_memory import OutOfMemoryKills
from adaptor.launchers.agent import processes
from adaptor.launchers.agent.processes import StackCollector, WorkerLifelines
from adaptor.launchers.control.agent_connections import RejectedConnections
from adaptor.protocol import wire
from adaptor.protocol.board import BoardMemory
from adaptor.protocol.messages import (
    BoardRecord,
    BusyProbe,
    BusyReport,
    ComputeTime,
    Died,
    Dying,
    Freeze,
    FromAgent,
    FromWorker,
    Hello,
    Phase,
    ToWorker,
)
from adaptor.protocol.records import DrillAnswer, DrillRequest, drill_address
from adaptor.protocol.wire import deadline, is_same_user

# The time for the answer to a busy probe: a healthy worker answers at once.
LOOKED_S = 1.0
# After this number of turns of the loop the connection of a dead process was accepted and its hello read, and
# so was all that workers had sent; about six are enough. Turns, not seconds: the kernel already has the data.
_TURNS = 100


class Workers:
    """The workers of an agent; `begin`, `watch` and `end` are called in each generation.

    Args:
        up: is called with messages of the workers, and with reports of their deaths.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, up: Callable[[FromAgent], None]) -> None:
        self._loop = loop
        self._up = up
        self.address = f"ttp-{os.getpid()}-{secrets.token_hex(8)}"
        self.alive: set[int] = set()  # ranks without a reported death
        self.boards: BoardMemory | None = None
        # The steps of a rank's copies in host memory.
        self.copies_of: Callable[[int], tuple[int, ...]] = lambda rank: ()
        self._server: asyncio.AbstractServer | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}  # of living processes, by rank
        # Reports about a process that ends or has ended, by rank (`_report_end`).
        self._unreported_ends: dict[int, list[Callable[[], None]]] = {}
        self._ended_connections: set[int] = set()  # ranks
        self._ended: dict[int, asyncio.Future[None]] = {}  # done when the process of a rank has ended
        self._orders_to_replace: Counter[int] = Counter()  # by rank
        self._kills = OutOfMemoryKills()
        self._lifelines = WorkerLifelines(loop, self._on_dying)
        self._sessions: dict[int, int] = {}  # the start of each worker, by process number
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._hearing: set[asyncio.StreamWriter] = set()
        self._rejected = RejectedConnections("the workers' socket")
        self._stack_collector: StackCollector | None = None
        self._look: asyncio.Task[None] | None = None
        self._held_back: list[tuple[int, ToWorker]] | None = None  # orders during the look at stacks
        self._looked: asyncio.Queue[BusyReport] = asyncio.Queue()

    async def serve(self) -> None:
        """Accept connections of workers until `close`."""
        self._server = await asyncio.start_unix_server(self._hear, "\0" + self.address)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        while self._hearing:
            for writer in self._hearing:  # a connection may be newer than the end of the generation
                writer.transport.abort()
            await asyncio.sleep(0)
        self._rejected.close()

    def begin(self, ranks: Sequence[int]) -> BoardMemory:
        """Make the boards of the workers of `ranks`, before they start."""
        self.boards = BoardMemory(ranks)
        self._lifelines.begin(self.boards)
        self.alive = set(ranks)
        return self.boards

    def watch(
        self, processes: Mapping[int, subprocess.Popen[bytes]], stacks_folder: Path, scratch: Path
    ) -> None:
        """Watch the started workers.

        Args:
            processes: by rank.
            stacks_folder: for the stacks of the workers.
            scratch: a folder of the agent.
        """
        self._stack_collector = StackCollector(stacks_folder, scratch)
        for rank, process in processes.items():
            self._watch_process(rank, process)

    def _watch_process(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._processes[rank] = process
        self._pidfds[rank] = os.pidfd_open(process.pid)
        self._ended[rank] = self._loop.create_future()
        self._sessions[process.pid] = processes.started(process.pid)
        self._kills.note(process.pid)
        self._loop.add_reader(self._pidfds[rank], self._on_death, rank, process)

    async def replace(self, rank: int, start: Callable[[], subprocess.Popen[bytes] | None]) -> None:
        """Replace the process of `rank`; a living process (one that hangs) is ended first.

        Invariant: the old process has ended before the new process starts. Until its end, after its memory is
        free, the kernel keeps its ports, file locks and device memory, and the script of the new process may
        need the same ones.

        The new process gets the slot of the board, cleared. Messages of the old process are no longer read.
        After several calls for `rank` before the old process has ended, only the last call starts a process.

        Args:
            start: starts the process; returns None if no process is wanted any more.
        """
        boards = self.boards
        assert boards is not None
        self._orders_to_replace[rank] += 1
        order = self._orders_to_replace[rank]
        if rank in self._pidfds and self._stack_collector is not None:
            if self._look is not None:
                await asyncio.shield(self._look)
            await self._stack_collector.take(rank, self._processes[rank].pid)
            if self._orders_to_replace[rank] != order:
                return
        if rank in self._pidfds:
            processes.end_group(self._processes[rank].pid)
        await asyncio.shield(self._ended[rank])
        await self._lifelines.let_go(rank)
        if self._orders_to_replace[rank] != order:
            return
        # No await from here on: no other order can intervene.
        connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.close()
        boards.reset(rank)
        self._ended_connections.discard(rank)
        process = start()
        if process is not None:
            self._watch_process(rank, process)
            self.alive.add(rank)

    async def read_sent(self) -> None:
        """Return after all messages were read that the workers had sent before the call."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    @property
    def running(self) -> bool:
        """Return whether workers have been started and are alive."""
        return bool(self._processes and self.alive)

    def read(self) -> list[BoardRecord]:
        """Return the boards of the living workers."""
        return [self.boards.read(rank) for rank in sorted(self.alive)] if self.boards is not None else []

    def ticks_of(self, rank: int) -> int:
        """Return the CPU time of the main thread of the living process of `rank`, in ticks of the kernel."""
        return processes.main_thread_ticks(self._living[rank]) if rank in self._living else 0

    def newest_step(self) -> int:
        """Return the newest finished step of a worker of the node, dead or alive; -1: none."""
        return self.boards.newest_step() if self.boards is not None else -1

    def spent(self) -> list[float] | None:
        """Return the uses of time of the lowest rank, dead or alive; None without boards."""
        return self.boards.spent() if self.boards is not None else None

    def compute_times(self) -> dict[int, ComputeTime]:
        """Return the compute time of each rank; see `BoardMemory.compute_times`."""
        return self.boards.compute_times() if self.boards is not None else {}

    @property
    def traced(self) -> bool:
        """Return whether a debugger holds one of the workers."""
        return any(map(processes.is_traced, self._living.values()))

    async def are_busy(self) -> bool:
        """Ask all workers; return whether one is in its own debugger, or in a compiler."""
        self._looked = asyncio.Queue()
        asked_ranks = list(self.alive)  # workers may die meanwhile
        for rank in asked_ranks:
            self.order(rank, BusyProbe())
        with contextlib.suppress(asyncio.TimeoutError):
            async with deadline(LOOKED_S):
                for _ in asked_ranks:
                    if (await self._looked.get()).busy:
                        return True
        return False

    def order(self, rank: int, message: ToWorker) -> None:
        """Send `message` to the worker of `rank`, if connected.

        In a hang, the stacks of all workers are read first; orders keep their sequence.
        """
        if isinstance(message, Freeze) and message.stacks and self._look is None:
            assert self._stack_collector is not None
            self._stack_collector.begin_incident(message.incident)
            self._held_back = []
            self._look = self._loop.create_task(self._look_first())
        if self._held_back is not None:
            self._held_back.append((rank, message))
        elif rank in self._connections:
            self._connections[rank].write(wire.frame(message))

    async def _look_first(self) -> None:
        assert self._stack_collector is not None
        try:
            await self._stack_collector.look(self._living)
        finally:
            orders, self._held_back = self._held_back or [], None
            for rank, message in orders:
                self.order(rank, message)

    @property
    def _living(self) -> dict[int, int]:
        """Return the living processes, by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if rank in self._pidfds}

    def end_incident(self) -> None:
        """End an incident after which all ranks train on: the next incident reads stacks again."""
        if self._held_back is None:
            self._look = None
        if self._stack_collector is not None:
            self._stack_collector.end_incident()

    async def ask_for_stacks(self) -> None:
        """Ask the workers of a job that hangs for missing stacks."""
        if self._stack_collector is not None:
            await self._stack_collector.ask(self._living)

    async def keep_stacks(self) -> None:
        """Keep the stacks of the asked workers."""
        if self._stack_collector is not None:
            await self._stack_collector.keep(self._living)

    def end_the_living(self, ranks: Collection[int] | None = None) -> None:
        """Kill the living workers, or those of `ranks`; called from any thread."""
        for rank, process in list(self._processes.items()):
            if rank not in self._pidfds or (ranks is not None and rank not in ranks):
                continue
            if process.returncode is None:  # otherwise the process number is free again
                processes.end_group(process.pid)

    async def end(self) -> None:
        """Close the generation: every worker is dead."""
        if self._look is not None:
            await self._look
            self._look = None  # after the await: the held-back orders would start another look
        for writer in self._hearing:
            writer.close()
        self._connections.clear()
        for rank in list(self._pidfds):
            self._forget(rank)
        self._unreported_ends = {}
        self._ended_connections = set()
        self._ended = {}
        self._processes = {}
        self.alive = set()
        boards, self.boards = self.boards, None
        await self._lifelines.end()
        self._sweep(self._sessions)
        self._sessions = {}
        if boards is not None:
            boards.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        self._hearing.add(writer)
        try:
            if not is_same_user(writer.get_extra_info("socket")):
                self._rejected.count("were of another user")
                return
            hello = await wire.read(reader, wire.from_worker)
            if (
                not isinstance(hello, Hello)
                or hello.rank not in self.alive
                or hello.rank in self._connections
            ):
                self._rejected.count("were no worker of this node")
                return
            rank = hello.rank
            self._connections[rank] = writer
            if rank in self._unreported_ends:
                _end_reading(writer)
            self._lifelines.watch(rank, hello.pid)
            message: FromWorker = hello
            while message.rank == rank and self._connections.get(rank) is writer:
                if isinstance(message, BusyReport):
                    self._looked.put_nowait(message)
                else:
                    self._up(message)
                message = await wire.read(reader, wire.from_worker)
        except (EOFError, OSError, msgspec.DecodeError):
            pass  # the operating system reports the death of the worker
        finally:
            if self._connections.get(rank) is writer:
                del self._connections[rank]
                self._ended_connections.add(rank)
                if rank in self._unreported_ends:
                    self._loop.call_soon(self._tell_when_heard, rank)
            writer.close()
            self._hearing.discard(writer)

    def _on_dying(self, rank: int, pid: int, at: float) -> None:
        if rank in self.alive and rank not in self._unreported_ends:
            self._report_end(rank, functools.partial(self._tell_dying, rank, pid, at))

    def _tell_dying(self, rank: int, pid: int, at: float) -> None:
        board = self._last_board(rank, pid)
        if board.phase != Phase.ENDED:
            self._up(Dying(rank, at, board))

    def _last_board(self, rank: int, pid: int) -> BoardRecord:
        """Return the last board of the process `pid`, with its pid even if the process has written
        nothing, and with its copies in host memory.
        """
        assert self.boards is not None
        board = self.boards.read(rank)
        return msgspec.structs.replace(board, pid=board.pid or pid, copies=self.copies_of(rank))

    def _on_death(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        at = time.time()
        self._forget(rank)
        # Also ends the children of the worker, such as data loaders.
        processes.end_group(process.pid)
        status = process.wait()  # returns at once; poll() fails while torch's thread polls
        self._report_end(rank, functools.partial(self._tell_of_death, rank, process.pid, status, at))

    def _report_end(self, rank: int, report: Callable[[], None]) -> None:
        """Call `report` after all messages of the process were read: no notice of an end overtakes them.

        The kernel has the messages before the end. The loop learns of both at once, or of the end first, by a
        thread, and reads messages later.
        """
        self._unreported_ends.setdefault(rank, []).append(report)
        if rank in self._connections:
            _end_reading(self._connections[rank])
        self._tell_when_heard(rank)

    def _tell_when_heard(self, rank: int, turns: int = _TURNS) -> None:
        # The end of the connection calls again.
        if rank not in self._unreported_ends or rank in self._connections:
            return
        assert self.boards is not None
        # A process connects before it writes to its board.
        if turns and rank not in self._ended_connections and self.boards.read(rank).pid:
            self._loop.call_soon(self._tell_when_heard, rank, turns - 1)
            return
        for report in self._unreported_ends.pop(rank):
            report()

    def _tell_of_death(self, rank: int, pid: int, status: int, at: float) -> None:
        # The agent may see the exit of a small process before its broken lifeline.
        if status == 0 and rank in self._lifelines.held:
            self._tell_dying(rank, pid, at)
        self.alive.discard(rank)
        kill_reason = self._kills.explain(pid) if status == -signal.SIGKILL else ""
        self._up(Died(rank, status, at, self._last_board(rank, pid), kill_reason))
        self._ended[rank].set_result(None)
        self._loop.call_soon(self._sweep, (pid,))

    def _sweep(self, leaders: Iterable[int]) -> None:
        """End the remaining processes in the sessions of dead workers, in other process groups."""
        living = set(self._living.values())
        ended_workers = {
            leader: at for leader in leaders if (at := self._sessions.get(leader)) and leader not in living
        }
        processes.end_sessions(ended_workers)

    def _forget(self, rank: int) -> None:
        descriptor = self._pidfds.pop(rank)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)


def _end_reading(writer: asyncio.StreamWriter) -> None:
    """Let a connection end after all sent data: a child of the worker may hold the other side open."""
    try:
        writer.get_extra_info("socket").shutdown(socket.SHUT_RD)
    except OSError:  # the connection is broken
        writer.transport.abort()


class DrillListener:
    """Answers `ttp drill` on this machine until `close` (TTP_ALLOW_DRILL); used on the control thread.

    The socket is abstract, and named after the process of `ttprun`. Only the user of the job is answered.

    Args:
        drill: ends a worker on purpose, or refuses to.
    """

    def __init__(self, drill: Callable[[DrillRequest], DrillAnswer]) -> None:
        self._drill = drill
        self._server: asyncio.AbstractServer | None = None

    async def listen(self) -> None:
        """Answer requests from now on; a line says so if the name is taken."""
        try:
            self._server = await asyncio.start_unix_server(self._answer, drill_address(os.getpid()))
        except OSError as error:
            output.tell(f"[ttp] TTP_ALLOW_DRILL: this node cannot answer `ttp drill`: {text.say(error)}")

    async def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            if is_same_user(writer.get_extra_info("socket")):
                request = msgspec.json.decode(await reader.readline(), type=DrillRequest)
                writer.write(msgspec.json.encode(self._drill(request)) + b"\n")

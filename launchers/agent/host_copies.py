"""The copies in host memory that an agent holds, gives to the next node, and keeps for the previous node.

The files of the copies are anonymous memory without a name: they end with the agent process, however the
process ends. `adaptor.protocol.copy_file` has their content.

Giving and keeping run in a separate thread: a copy may have gigabytes, and an incident must not wait. An
arrived copy counts after its checksum was verified; then the sender's file is marked, and the worker may
overwrite the previous copy. After any failure the next copy is tried; the job goes on, with one line for the
user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Collection, Sequence

import msgspec

from adaptor import descriptors, output, text, threads
from adaptor.config import Config
from adaptor.errors import StartError
from adaptor.launchers.agent.control_thread import ControlThread, ControlThreadError, call_in_thread
from adaptor.launchers.control.agent_connections import AgentListener, RejectedConnections, connect
from adaptor.launchers.control.credentials import Tls, kind_of
from adaptor.protocol import wire
from adaptor.protocol.copy_file import (
    FILES,
    CopyFile,
    CopyFollows,
    CopyHeader,
    CopyHello,
    CopyKept,
    from_keeper,
    to_keeper,
)
from adaptor.protocol.messages import Endpoint
from adaptor.protocol.wire import deadline

# Bytes read or sent at once, so that other connections get their turn.
PIECE = 1 << 18
# Seconds between two attempts to reach the next node.
AGAIN_S = 2.0
# Seconds until a refused copy is sent again: the next node may lack memory.
REFUSED_S = 10.0
# The limit in seconds for one piece of a copy.
SLOW_S = 30.0
_GONE = (EOFError, OSError, msgspec.DecodeError, asyncio.TimeoutError, StartError)


class CopyFiles:
    """The files of one agent, for its workers and for the ranks of another node, from start to start."""

    def __init__(self) -> None:
        self._own: dict[int, list[int]] = {}
        self._others: dict[int, list[int]] = {}  # of ranks of another node
        self._ranks: set[int] = set()

    def begin(self, ranks: Sequence[int]) -> str:
        """Make the missing files for `ranks`; return the paths of all files, for the environment.

        Files of ranks that were on this node in the previous start are kept: the ranks may be on another
        node now. For each rank the files that its worker writes come first.

        Raises:
            OSError: no more files can be made.
        """
        _keep_only(self._own, {*ranks, *self._ranks})
        self._ranks = set(ranks)
        for rank in ranks:
            if rank not in self._own:
                self._own[rank] = [_new_file() for _ in range(FILES)]
        paths: dict[int, list[str]] = {}
        for files_by_rank in (self._own, self._others):
            for rank, files in files_by_rank.items():
                paths.setdefault(rank, []).extend(map(_path, files))
        return json.dumps(paths)

    def own(self) -> dict[int, list[CopyFile]]:
        """Open the files of the ranks of this node for reading.

        Raises:
            OSError: no more files can be opened.
        """
        return {rank: [CopyFile(_path(file)) for file in self._own[rank]] for rank in sorted(self._ranks)}

    def other(self, rank: int, slot: int) -> CopyFile:
        """Open a file for a copy of a rank of another node.

        Raises:
            OSError: no more files can be made or opened.
        """
        if rank not in self._others:
            self._others[rank] = [_new_file() for _ in range(FILES)]
        return CopyFile(_path(self._others[rank][slot]))

    def to_overwrite(self, rank: int, generation: str, step: int, other_step: int) -> CopyFile:
        """Open the file for the copy of `step` of a rank of another node.

        The copy of `other_step` is kept, otherwise the older copy is overwritten: a spare node in the place
        of a lost node has no copy, and these copies may be the only ones. A copy that is not older than
        `step` was sent before, or belongs to a step from which the job has gone back.

        Args:
            rank: the owner of the copy.
            generation: the start of the workers in which the copy was made.
            step: the copied step.
            other_step: the step of the sender's other copy; -1: none.

        Raises:
            OSError: no more files can be made or opened.
        """

        def worth(slot: int) -> int:
            with contextlib.closing(self.other(rank, slot)) as file:
                header = file.header
            if header is None or header.generation != generation or header.step >= step:
                return -1
            return step if header.step == other_step else header.step

        return self.other(rank, min(range(FILES), key=worth))

    def steps_of(self, rank: int, generation: str) -> tuple[int, ...]:
        """Return the steps of the whole copies that the worker of `rank` has made in this generation."""
        try:
            headers = [CopyFile(file).header for file in self._own.get(rank, ())]
        except OSError:  # the files are given up at this moment
            return ()
        return tuple(header.step for header in headers if header and header.generation == generation)

    def forget_after(self, step: int) -> None:
        """Give up the copies of later steps: their state is in doubt."""
        for files in (*self._own.values(), *self._others.values()):
            for file in map(CopyFile, files):
                if file.header is not None and file.header.step > step:
                    file.begin()

    def newest(self, *, is_kept: bool) -> int | None:
        """Return the newest step of which each rank of this node has a complete copy; None without one.

        Args:
            is_kept: count only copies that another node also has.
        """
        common_steps: set[int] | None = None
        for rank in sorted(self._ranks):
            steps = set()
            for file in map(CopyFile, self._own.get(rank, ())):
                header = file.header
                if header is not None and (not is_kept or file.kept == header.step):
                    steps.add(header.step)
            common_steps = steps if common_steps is None else common_steps & steps
        return max(common_steps, default=None) if common_steps else None

    def close(self) -> None:
        """Close all files."""
        _keep_only(self._own, ())
        _keep_only(self._others, ())


def _keep_only(files_by_rank: dict[int, list[int]], ranks: Collection[int]) -> None:
    for rank in files_by_rank.keys() - set(ranks):
        for file in files_by_rank.pop(rank):
            os.close(file)


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def _new_file() -> int:
    file = descriptors.in_memory("ttp-host-copy")
    os.fchmod(file, 0o600)
    return file


class CopyKeeper:
    """The giver and the keeper of one node, in one generation.

    Args:
        files: the files of the agent.
    """

    def __init__(self, node: int, files: CopyFiles, config: Config, tls: Tls | None) -> None:
        self._node = node
        self._files = files
        self._kind = kind_of(config)
        self._port = config.port
        self._tls = tls
        self._secret = b""
        self._rejected = RejectedConnections("the port for host copies")
        self._listener: AgentListener[CopyHello] | None = None
        self._changed = asyncio.Event()
        self._told = False
        self._senders: dict[int, asyncio.StreamWriter] = {}  # the newest connection of each node
        self._thread = ControlThread(self._on_failure, lambda reason: None)
        self._thread.start()

    def listen(self, secret: bytes, address: str) -> str:
        """Keep copies of other nodes from now on; return the endpoint for the rendezvous store.

        Args:
            address: the address of this node for other nodes.
        """
        self._secret = secret

        async def serve() -> Endpoint:
            self._listener = AgentListener(secret, self._tls, self._rejected, self._keep, _first)
            return self._listener.open(self._kind, address, self._port)

        return msgspec.json.encode(self._thread.wait_for(serve())).decode()

    def give(self, find: Callable[[], str]) -> None:
        """Give copies of this node's ranks to the next node, from the first copy on.

        Until then no store is asked and no connection is made: with `auto` there may never be a copy.

        Args:
            find: returns what `listen` has returned on the next node, also on a spare node that has taken its
                place meanwhile. It is called in a thread.
        """

        async def begin() -> None:
            self._thread.spawn(self._give(find))

        self._thread.wait_for(begin())

    def copied(self) -> None:
        """Note a new copy of a worker of this node; called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._thread.loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        """End the thread."""

        async def end() -> None:
            await self._thread.cancel_tasks()
            if self._listener is not None:
                await self._listener.close()
            self._rejected.close()

        with contextlib.suppress(ControlThreadError):
            self._thread.wait_for(end())
        self._thread.stop()

    def _on_failure(self, error: BaseException) -> None:
        self._tell(text.describe(error))

    def _tell(self, reason: str) -> None:
        """Tell the user once that the other node does not get the copies."""
        if not self._told:
            self._told = True
            output.tell(
                f"[ttp] node {self._node}: the next node keeps no new copies of this node's ranks"
                f" (TTP_HOST_COPY): {reason}"
            )

    # giving

    async def _give(self, find: Callable[[], str]) -> None:
        await self._changed.wait()
        own_files, endpoint = self._files.own(), None
        with contextlib.ExitStack() as opened:
            for file in (file for files in own_files.values() for file in files):
                opened.callback(file.close)
            while True:
                result = await self._find(find)
                if endpoint is not None and result not in (None, endpoint):
                    for file in (file for files in own_files.values() for file in files):
                        file.forget_kept()  # the previous keeper is lost
                endpoint = result or endpoint
                if endpoint is None:
                    self._tell("the rendezvous store has no address of that node")
                else:
                    await self._give_until_it_is_lost(endpoint, own_files)
                await asyncio.sleep(AGAIN_S)

    @staticmethod
    async def _find(find: Callable[[], str]) -> Endpoint | None:
        """Return the endpoint of the next node's keeper now; None if the store does not answer."""
        try:
            answer = await call_in_thread(threads.reserve, "ttp-find", find)
            return msgspec.json.decode(answer, type=Endpoint)
        except Exception:  # no thread, torch's error of a lost store, or no endpoint
            return None

    async def _give_until_it_is_lost(self, endpoint: Endpoint, own_files: dict[int, list[CopyFile]]) -> None:
        """Give the newest copies to the keeper at `endpoint` until the connection fails or ends."""
        writer = None
        try:
            keeper_address = (endpoint.address, endpoint.port)
            reader, writer = await connect(*keeper_address, self._secret, self._tls)
            writer.write(wire.frame(CopyHello(self._node)))
            while True:
                self._changed.clear()
                for rank, files in own_files.items():
                    await self._give_newest(rank, files, reader, writer)
                await self._wait_for_a_copy(reader)
        except StartError:
            at = f"{endpoint.address} port {endpoint.port}" if endpoint.port else "its socket"
            self._tell(f"it cannot be reached at {at}")
        except _GONE:
            pass  # `_give` connects again
        finally:
            if writer is not None:
                writer.close()

    async def _wait_for_a_copy(self, reader: asyncio.StreamReader) -> None:
        """Return when a worker has a new copy.

        Raises:
            EOFError: the connection has ended: the keeping node may be lost.
            OSError: the connection is broken.
        """
        change = asyncio.ensure_future(self._changed.wait())
        word = asyncio.ensure_future(reader.read(1))  # no answer is due: only the end can come
        try:
            await asyncio.wait({change, word}, return_when=asyncio.FIRST_COMPLETED)
            if word.done():
                word.result()
                raise EOFError("the connection has ended")
        finally:
            change.cancel()
            word.cancel()
            await asyncio.gather(change, word, return_exceptions=True)

    async def _give_newest(
        self, rank: int, files: list[CopyFile], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send the newest copy of `rank`, unless the keeper has the copy."""
        complete_slots = [
            (header.step, slot, header) for slot, file in enumerate(files) if (header := file.header)
        ]
        if not complete_slots:
            return
        *older_slots, (step, slot, header) = sorted(complete_slots)
        file = files[slot]
        if file.kept == step:
            return
        older_step = older_slots[0][0] if older_slots else -1
        writer.write(wire.frame(CopyFollows(older_step, *header)))
        for start in range(0, header.size, PIECE):
            writer.write(file.read(start, min(PIECE, header.size - start)))
            async with deadline(SLOW_S):
                await writer.drain()
        answer = await wire.read(reader, from_keeper)
        if file.header != header or answer.step != step:
            return  # the worker has overwritten the copy meanwhile
        if not answer.reason:
            file.note_kept(step)
            return
        self._tell(f"the copy of rank {rank}: {answer.reason}")
        # Ranks wait until this copy is kept, and set no event meanwhile: try again after a pause.
        await asyncio.sleep(REFUSED_S)
        self._changed.set()

    # keeping

    async def _keep(
        self, hello: CopyHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._senders[hello.node] = writer
        try:
            while True:
                message = await wire.read(reader, to_keeper)
                if not isinstance(message, CopyFollows):
                    return
                reason = await self._take(message, reader, lambda: self._senders[hello.node] is writer)
                writer.write(wire.frame(CopyKept(message.rank, message.step, reason)))
                await writer.drain()
        except _GONE:
            return  # the sender connects again

    async def _take(
        self, message: CopyFollows, reader: asyncio.StreamReader, is_newest: Callable[[], bool]
    ) -> str:
        """Read a copy from the newest connection of its sender; return why the copy is not kept, or ''."""
        reason, memory, file = "", None, None
        try:
            file = self._files.to_overwrite(message.rank, message.generation, message.step, message.beside)
            file.begin()
            file.reserve(message.size)
            memory = file.content
        except OSError as error:
            reason = f"no memory for {message.size} bytes there ({error.strerror})"
        at = 0
        try:
            while at < message.size:
                piece_size = min(PIECE, message.size - at)
                async with deadline(SLOW_S):
                    part = await reader.read(piece_size)
                if not part or not is_newest():
                    raise EOFError("the other side closed the connection")
                if memory is not None:
                    memory[at : at + len(part)] = part
                at += len(part)
            if file is not None and not reason:
                digest = await asyncio.to_thread(file.digest, message.size)
                if not is_newest():
                    raise EOFError("the other side has made another connection")
                if digest == message.digest:
                    file.commit(
                        CopyHeader(
                            message.generation,
                            message.world_size,
                            message.rank,
                            message.step,
                            message.size,
                            message.digest,
                        )
                    )
                else:
                    reason = "its checksum is wrong"
            return reason
        finally:
            memory = None
            if file is not None:
                file.close()


async def _first(reader: asyncio.StreamReader) -> CopyHello | None:
    hello = await wire.read(reader, to_keeper)
    return hello if isinstance(hello, CopyHello) else None

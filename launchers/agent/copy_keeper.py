"""Gives the host copies of a node's ranks to the agent of the next node, and keeps those of the previous
node.

All work runs in a separate thread: a copy may have gigabytes, and an incident must not wait. An arrived copy
counts after its checksum was verified; then the sender's file is marked, and the worker may overwrite the
previous copy. After any failure the next copy is tried; the job goes on, with one line for the user.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from adaptor import output, text, threads
from adaptor.config import Config
from adaptor.errors import StartError
from adaptor.launchers.agent.control_thread import ControlThread, ControlThreadError, call_in_thread
from adaptor.launchers.agent.copy_files import CopyFiles
from adaptor.launchers.control.agent_connection import connect
from adaptor.launchers.control.agent_listener import AgentListener, RejectedConnections
from adaptor.launchers.control.invitation import kind_of
from adaptor.launchers.control.tls import Tls
from adaptor.protocol import wire
from adaptor.protocol.copy_file import (
    CopyFile,
    CopyFollows,
    CopyHeader,
    CopyHello,
    CopyKept,
    from_keeper,
    to_keeper,
)
from adaptor.protocol.deadline import deadline
from adaptor.protocol.messages import Endpoint

# Bytes read or sent at once, so that other connections get their turn.
PIECE = 1 << 18
# Seconds between two attempts to reach the next node.
AGAIN_S = 2.0
# Seconds until a refused copy is sent again: the next node may lack memory.
REFUSED_S = 10.0
# The limit in seconds for one piece of a copy.
SLOW_S = 30.0
_GONE = (EOFError, OSError, msgspec.DecodeError, asyncio.TimeoutError, StartError)


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
                found = await self._find(find)
                if endpoint is not None and found not in (None, endpoint):
                    for file in (file for files in own_files.values() for file in files):
                        file.forget_kept()  # the previous keeper is lost
                endpoint = found or endpoint
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
        # No rank makes a new copy before this copy is kept.
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

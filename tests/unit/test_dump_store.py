"""The survivors' rendezvous store, with torch's gloo, strangers and another user."""

from __future__ import annotations

import asyncio
import resource
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    ProcessGroupGloo,
)

from adaptor.launchers.control import agent_connections
from adaptor.launchers.control.dump_store_server import DumpStoreServer
from adaptor.protocol import wire
from adaptor.protocol.messages import Endpoint, Standing
from adaptor.worker import stacks
from adaptor.worker.dump_store import DumpStore as Client
from adaptor.worker.origin import may_be_an_echo
from tests import waiting
from tests.unit.nodes import Job, controller_host_of, job
from tests.unit.other_user import other_user
from tests.unit.test_controller_host import FIRST
from tests.unit.threads import LONG_S

__all__ = ["job"]

ADDRESSES = pytest.mark.parametrize("address", ["127.0.0.1", ""], ids=["one machine", "several"])
HALF = bytes.fromhex("00000000" + "00c00000" + "00" * 7)  # 15 bytes of a message of 3 GiB
HOLD = """
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
connection.sendall(bytes.fromhex(sys.argv[2]))
print("holds", flush=True)
sys.stdin.read()
"""


class ServedStore:
    """A store that answers in its own event loop."""

    def __init__(self, store: DumpStoreServer) -> None:
        self.store = store
        self.secret = store.secret
        self.place = Endpoint(store.host or "127.0.0.1", store.port)

    def client(self, timeout_s: float = LONG_S, secret: bytes | None = None) -> Client:
        return Client(self.place, self.secret if secret is None else secret, timeout_s)


@contextmanager
def served(address: str, extra: int = 0) -> Iterator[ServedStore]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def in_loop(act: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(call(), loop).result(LONG_S)

    store = in_loop(lambda: DumpStoreServer(address, extra))
    in_loop(store.start)
    try:
        yield ServedStore(store)
    finally:
        asyncio.run_coroutine_threadsafe(store.close(), loop).result(LONG_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@ADDRESSES
def test_gloo_meets_over_the_store(address: str) -> None:
    def take_part(rank: int) -> float:
        store = opened.client()
        try:
            timeout = timedelta(seconds=LONG_S)
            group = ProcessGroupGloo(PrefixStore("ttp/1/1/g", store), rank, 5, timeout)
            tensor = torch.ones(1) * rank
            group.allreduce([tensor]).wait()
            del group
            return float(tensor)
        finally:
            store.close()

    with served(address) as opened, ThreadPoolExecutor(5) as pool:
        assert list(pool.map(take_part, range(5))) == [10.0] * 5


@ADDRESSES
def test_values_are_awaited(address: str) -> None:
    with served(address) as opened, ThreadPoolExecutor(1) as pool:
        reader, writer = opened.client(), opened.client()
        pending = pool.submit(reader.get, "g/late")
        writer.set("g/early", b"1")
        writer.set("g/late", b"\x00\xff")
        assert pending.result(LONG_S) == b"\x00\xff"
        assert reader.get("g/early") == b"1"
        with pytest.raises(TimeoutError, match=r"a rank has not come to the store \(never is not there\)"):
            reader.wait(["g/never"], timedelta(seconds=0.05))
        reader.close()
        writer.close()


@ADDRESSES
def test_several_threads_reconnect_to_an_idle_store(address: str) -> None:
    """NCCL makes a communicator at a group's first collective, in any thread."""
    with served(address) as opened, ThreadPoolExecutor(2) as pool:
        first, second = opened.client(), opened.client()
        first.set("g/early", b"1")
        for store in (first, second):
            store.rest(LONG_S)
        late = pool.submit(second.get, "g/late")
        assert second.get("g/early") == b"1"
        first.set("g/late", b"2")
        assert late.result(LONG_S) == b"2"
        assert second.check(["g/early", "g/late"])
        assert not second.check(["g/never"])


@ADDRESSES
def test_whoever_waits_at_a_store_that_rests_can_be_woken(address: str) -> None:
    """A main thread that waits at the store during another incident raises the same error as at torch's
    store.
    """
    main, standings = threading.get_ident(), list[Standing | None]()

    def wake() -> None:
        waiting.until(lambda: "_ask" in _calls_of(main), "the main thread waits")
        standings.append(stacks.awaited())
        store.abandon()

    with served(address) as opened:
        store = opened.client()
        store.rest(LONG_S)
        thread = threading.Thread(target=wake)
        thread.start()
        with pytest.raises(DistStoreError) as raised:
            store.wait(["g/never"])
        thread.join()
        assert may_be_an_echo(raised.value)
        with pytest.raises(DistStoreError, match="the meeting of the ranks is over"):
            store.get("g/never")
        assert standings[0] is not None
        assert standings[0].where.startswith("test_whoever_waits_at_a_store_that_rests_can_be_woken")


def _calls_of(thread: int) -> list[str]:
    frame, calls = stacks.frame_of(thread), list[str]()
    while frame is not None:
        calls.append(frame.f_code.co_name)
        frame = frame.f_back
    return calls


def test_many_large_values() -> None:
    """More than one answer holds: gloo's addresses of some hundreds of ranks."""
    with served("127.0.0.1") as opened:
        reader, writer = opened.client(), opened.client()
        for rank in range(300):
            writer.set(f"g/{rank}", bytes([rank % 256]) * 20_000)
        assert all(reader.get(f"g/{rank}") == bytes([rank % 256]) * 20_000 for rank in range(300))
        reader.close()
        writer.close()


@ADDRESSES
def test_a_client_without_the_secret_is_refused(address: str) -> None:
    with served(address) as opened, pytest.raises((EOFError, OSError)):
        opened.client(timeout_s=1.0, secret=bytes(32)).get("g/1")


def test_a_client_turned_away_tries_again() -> None:
    """More ranks may connect at once than unproved connections are allowed."""
    secret, came, proved = secrets.token_bytes(32), [], threading.Event()

    async def serve() -> None:
        async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(1)
            if len(came) < 3:
                writer.close()
                return
            await wire.prove_controller(reader, writer, secret)
            proved.set()
            writer.close()

        server = await asyncio.start_server(admit, "127.0.0.1", 0)
        place = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        client = await asyncio.to_thread(Client, place, secret, LONG_S)
        client.close()
        server.close()

    asyncio.run(serve())
    assert proved.is_set()
    assert len(came) == 3


def test_a_proved_client_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo resolves names in between, which may take longer than the time for a proof."""
    monkeypatch.setattr(agent_connections, "HANDSHAKE_S", 4.0)  # the time for the two clients below
    with served("") as opened:
        first, second = opened.client(), opened.client()
        with socket.create_connection(("127.0.0.1", opened.place.port), LONG_S) as stranger:
            while stranger.recv(64):
                pass  # shut: its time is over, so the time of the earlier clients would be over, too
        second.set("g/1", b"here")
        assert first.get("g/1") == b"here"
        first.close()
        second.close()


@pytest.mark.robustness(
    "B2", "another user holds half a message at the store, a rank is killed", "saved as ever"
)
@pytest.mark.parametrize("job", [2], indirect=True)
def test_half_a_message_of_another_user_takes_no_memory(job: Job) -> None:
    job.begin(4)
    store = controller_host_of(job.nodes[0]).store
    with other_user(HOLD, store.host, HALF.hex()) as child:
        assert child.stdout is not None
        child.stdout.readline()
        memory_before = resident_mib()
        job.train("step")
        job.workers[0].process.kill()
        verdict = job.verdict()
        assert (verdict.outcome, verdict.step) == ("saved", FIRST)
        job.end()
        job.close()
        job.nodes = []
        assert resident_mib() - memory_before < 200


@pytest.mark.robustness(
    "B2", "hundreds of clients send half a message to the store on a network", "workers come in"
)
def test_half_messages_over_a_network_take_no_memory() -> None:
    with served("") as opened:
        strangers = []
        for _ in range(300):
            stranger = socket.create_connection(("127.0.0.1", opened.place.port), LONG_S)
            stranger.sendall(HALF)
            strangers.append(stranger)
        memory_before = resident_mib()
        first, second = opened.client(), opened.client()
        second.set("g/1", b"here")
        assert first.get("g/1") == b"here"
        assert resident_mib() - memory_before < 200
        for connection in (first, second, *strangers):
            connection.close()


@contextmanager
def descriptors(limit: int | None) -> Iterator[None]:
    """Limit the descriptors of this process; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit or soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.robustness(
    "B2",
    "clients without a proof fill all places at the store",
    "all ranks can still connect at once; a new client displaces the oldest without a proof, no other",
)
@pytest.mark.parametrize(
    ("limit", "ranks", "limit_of_strangers"),
    [(None, 3, 5), (256 * 4, 500, 256)],
    ids=["ranks", "descriptors"],
)
def test_the_limit_of_unproved_connections(
    limit: int | None, ranks: int, limit_of_strangers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOST and one for each rank, or a quarter of the descriptors."""
    monkeypatch.setattr(agent_connections, "MOST", 2)
    monkeypatch.setattr(agent_connections, "HANDSHAKE_S", LONG_S)
    with ExitStack() as stack:
        stack.enter_context(descriptors(limit))
        opened = stack.enter_context(served("", ranks))
        proved = opened.client()
        proved.set("g/1", b"here")
        assert proved.get("g/1") == b"here"
        strangers = []
        for _ in range(limit_of_strangers):
            opened_connection = socket.create_connection(("127.0.0.1", opened.place.port), LONG_S)
            stack.callback(opened_connection.close)
            assert opened_connection.recv(64), "it is asked for its proof, so it is in"
            strangers.append(opened_connection)
        assert [is_shut(stranger) for stranger in strangers] == [False] * limit_of_strangers
        late = opened.client()
        assert late.get("g/1") == b"here"
        assert strangers[0].recv(64) == b"", "the oldest goes for the next"
        assert [is_shut(stranger) for stranger in strangers[1:]] == [False] * (limit_of_strangers - 1)
        proved.set("g/2", b"still")
        assert late.get("g/2") == b"still"
        for connection in (proved, late):
            connection.close()


def is_shut(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection without data."""
    return bool(select.select((connection,), (), (), 0)[0]) and connection.recv(64) == b""


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

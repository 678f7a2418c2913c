"""The store over which the survivors find each other, with torch's gloo, strangers and another user."""

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
from adaptor.launchers.control.controller_host import DumpStoreServer
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
HALF = bytes.fromhex("00000000" + "00c00000" + "00" * 7)  # 15 bytes that announce 3 GiB
HOLD = """
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
connection.sendall(bytes.fromhex(sys.argv[2]))
print("holds", flush=True)
sys.stdin.read()
"""


class Served:
    """A store that answers, in an event loop of its own."""

    def __init__(self, store: DumpStoreServer) -> None:
        self.store = store
        self.secret = store.secret
        self.place = Endpoint(store.host or "127.0.0.1", store.port)

    def client(self, timeout_s: float = LONG_S, secret: bytes | None = None) -> Client:
        return Client(self.place, self.secret if secret is None else secret, timeout_s)


@contextmanager
def served(address: str, more: int = 0) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def here(act: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(call(), loop).result(LONG_S)

    store = here(lambda: DumpStoreServer(address, more))
    here(store.start)
    try:
        yield Served(store)
    finally:
        asyncio.run_coroutine_threadsafe(store.close(), loop).result(LONG_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@ADDRESSES
def test_gloo_meets_over_it(address: str) -> None:
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
def test_values_are_waited_for(address: str) -> None:
    with served(address) as opened, ThreadPoolExecutor(1) as pool:
        one, other = opened.client(), opened.client()
        found = pool.submit(one.get, "g/late")
        other.set("g/early", b"1")
        other.set("g/late", b"\x00\xff")
        assert found.result(LONG_S) == b"\x00\xff"
        assert one.get("g/early") == b"1"
        with pytest.raises(TimeoutError, match=r"a rank has not come to the store \(never is not there\)"):
            one.wait(["g/never"], timedelta(seconds=0.05))
        one.close()
        other.close()


@ADDRESSES
def test_a_store_that_rests_is_reached_again_by_several_threads(address: str) -> None:
    """As by NCCL, which makes a communicator at the first collective of a group, in any thread."""
    with served(address) as opened, ThreadPoolExecutor(2) as pool:
        one, other = opened.client(), opened.client()
        one.set("g/early", b"1")
        for store in (one, other):
            store.rest(LONG_S)
        late = pool.submit(other.get, "g/late")
        assert other.get("g/early") == b"1"
        one.set("g/late", b"2")
        assert late.result(LONG_S) == b"2"
        assert other.check(["g/early", "g/late"])
        assert not other.check(["g/never"])


@ADDRESSES
def test_whoever_waits_at_a_store_that_rests_can_be_woken(address: str) -> None:
    """As its main thread, when there is another incident: it stands still in a wait, and raises what torch's
    own store would raise."""
    main, told = threading.get_ident(), list[Standing | None]()

    def wake() -> None:
        waiting.until(lambda: "_ask" in _calls_of(main), "the main thread waits")
        told.append(stacks.awaited())
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
        assert told[0] is not None
        assert told[0].where.startswith("test_whoever_waits_at_a_store_that_rests_can_be_woken")


def _calls_of(thread: int) -> list[str]:
    frame, found = stacks.frame_of(thread), list[str]()
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_many_large_values() -> None:
    """More than one answer takes: gloo's addresses for some hundreds of ranks."""
    with served("127.0.0.1") as opened:
        one, other = opened.client(), opened.client()
        for rank in range(300):
            other.set(f"g/{rank}", bytes([rank % 256]) * 20_000)
        assert all(one.get(f"g/{rank}") == bytes([rank % 256]) * 20_000 for rank in range(300))
        one.close()
        other.close()


@ADDRESSES
def test_who_does_not_know_the_secret(address: str) -> None:
    with served(address) as opened, pytest.raises((EOFError, OSError)):
        opened.client(timeout_s=1.0, secret=bytes(32)).get("g/1")


def test_who_is_turned_out_comes_again() -> None:
    """As when more ranks connect at once than may be unproved at a time."""
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


def test_whoever_has_proved_itself_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo asks name servers in between, which may take longer than a proof may."""
    monkeypatch.setattr(agent_connections, "HANDSHAKE_S", 4.0)  # in which the two below have to come
    with served("") as opened:
        one, other = opened.client(), opened.client()
        with socket.create_connection(("127.0.0.1", opened.place.port), LONG_S) as stranger:
            while stranger.recv(64):
                pass  # shut: its time is over, and so would theirs be, who came before it
        other.set("g/1", b"here")
        assert one.get("g/1") == b"here"
        one.close()
        other.close()


@pytest.mark.robustness(
    "B2",
    "another user holds half a message at the store, a rank is killed",
    "saved as ever",
)
@pytest.mark.parametrize("job", [2], indirect=True)
def test_half_a_message_of_another_user(job: Job) -> None:
    """And the other half never comes."""
    job.begin(4)
    store = controller_host_of(job.nodes[0]).store
    with other_user(HOLD, store.host, HALF.hex()) as child:
        assert child.stdout is not None
        child.stdout.readline()
        before = resident_mib()
        job.train("step")
        job.workers[0].process.kill()
        verdict = job.verdict()
        assert (verdict.outcome, verdict.step) == ("saved", FIRST)
        job.end()
        job.close()
        job.nodes = []
        assert resident_mib() - before < 200


@pytest.mark.robustness(
    "B2",
    "hundreds of clients send half a message to the store on a network",
    "workers come in",
)
def test_half_messages_over_a_network() -> None:
    with served("") as opened:
        held = []
        for _ in range(300):
            stranger = socket.create_connection(("127.0.0.1", opened.place.port), LONG_S)
            stranger.sendall(HALF)
            held.append(stranger)
        before = resident_mib()
        one, other = opened.client(), opened.client()
        other.set("g/1", b"here")
        assert one.get("g/1") == b"here"
        assert resident_mib() - before < 200
        for each in (one, other, *held):
            each.close()


@contextmanager
def descriptors(limit: int | None) -> Iterator[None]:
    """This process may open so many; None: as ever."""
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
    ("limit", "ranks", "most"), [(None, 3, 5), (256 * 4, 500, 256)], ids=["ranks", "descriptors"]
)
def test_how_many_may_be_there_without_a_proof(
    limit: int | None, ranks: int, most: int, monkeypatch: pytest.MonkeyPatch
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
        for _ in range(most):
            one = socket.create_connection(("127.0.0.1", opened.place.port), LONG_S)
            stack.callback(one.close)
            assert one.recv(64), "it is asked for its proof, so it is in"
            strangers.append(one)
        assert [is_shut(stranger) for stranger in strangers] == [False] * most
        late = opened.client()
        assert late.get("g/1") == b"here"
        assert strangers[0].recv(64) == b"", "the oldest goes for the next"
        assert [is_shut(stranger) for stranger in strangers[1:]] == [False] * (most - 1)
        proved.set("g/2", b"still")
        assert late.get("g/2") == b"still"
        for each in (proved, late):
            each.close()


def is_shut(connection: socket.socket) -> bool:
    """Whether the other side has ended it; nothing else comes."""
    return bool(select.select((connection,), (), (), 0)[0]) and connection.recv(64) == b""


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

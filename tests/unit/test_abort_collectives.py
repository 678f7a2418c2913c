"""Waking threads that wait for peers; in a child process, because all its TCP connections are shut."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults import warm

# Each part's assertion names the part.
PRELUDE = """
import errno, os, socket, threading
from adaptor.worker.abort_collectives import shut_collectives

def pair(family=socket.AF_INET, host="127.0.0.1"):
    with socket.create_server((host, 0), family=family) as server:
        here = socket.create_connection(server.getsockname()[:2])
        there, _ = server.accept()
    return here, there

def works(one, other):
    one.sendall(b"x")
    return other.recv(1) == b"x"
"""


def run(script: str) -> None:
    warm.run([sys.executable, "-c", PRELUDE + script], code=0)


def test_a_thread_that_waits_for_a_peer_is_woken() -> None:
    run("""
here, there = pair()
received, waiting = [], threading.Event()

def wait():
    waiting.set()
    received.append(here.recv(1))

thread = threading.Thread(target=wait)
thread.start()
waiting.wait()
assert shut_collectives(frozenset()) == 2, "both ends are of this process"
thread.join(30)
assert received == [b""]
try:
    here.sendall(b"x")
    raise SystemExit("it can still be written to")
except OSError as error:
    assert error.errno == errno.EPIPE, error
here.fileno() >= 0 or exit("the descriptor itself was closed")
""")


def test_kept_ports_are_left_alone_at_either_end() -> None:
    run("""
store, client = pair(), pair()
other = pair()
as_client, as_server = client[0].getpeername()[1], store[1].getsockname()[1]
assert shut_collectives(frozenset({as_client, as_server})) == 2
assert works(*store) and works(*reversed(store)), "a store that this process serves"
assert works(*client) and works(*reversed(client)), "a store that this process uses"
assert other[0].recv(1) == b""
""")


def test_only_what_belongs_to_a_group_is_shut() -> None:
    run("""
from adaptor.worker.abort_collectives import sockets
other, before = pair(), sockets()
group = pair()
assert shut_collectives(frozenset(), sockets() - before) == 2
assert works(*other)
assert group[0].recv(1) == b""
""")


def test_other_descriptors_than_tcp_connections_are_left_alone() -> None:
    run("""
local = socket.socketpair()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.connect(("127.0.0.1", 9))
pipe = os.pipe()
with socket.create_server(("127.0.0.1", 0)) as listening:
    assert shut_collectives(frozenset()) == 0
    here = socket.create_connection(listening.getsockname())
    there, _ = listening.accept()
    assert works(here, there), "a listening socket still listens"
    assert works(*local)
    os.write(pipe[1], b"x")
    assert os.read(pipe[0], 1) == b"x"
    before = len(os.listdir("/proc/self/fd"))
    assert shut_collectives(frozenset()) == 2
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left behind"
""")


def test_ipv6() -> None:
    run("""
try:
    here, there = pair(socket.AF_INET6, "::1")
except OSError:
    raise SystemExit(0)  # this machine has none
assert shut_collectives(frozenset({here.getpeername()[1]})) == 0
assert shut_collectives(frozenset()) == 2
""")


@pytest.mark.parametrize("work", ["broadcast", "gather", "send", "recv"])
def test_a_wait_for_work_that_gloo_has_forgotten_is_ended(work: str) -> None:
    """The peer was stopped with part of the data sent, then killed."""
    script = Path(__file__).with_name("waits_script.py")
    environment = {
        **os.environ,
        "PYTHONPATH": str(script.parents[2]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ran = warm.run([sys.executable, str(script), work], env=environment, timeout=240)
    # The other error if it was killed between two pieces of work, which gloo does not drop.
    assert ran.stdout.split() in (["WaitEndedError"], ["RuntimeError"]), ran.stderr[-3000:]


# Rank 1 of a group takes no part in what rank 0 waits for, and the connections are shut.
REDUCE_SCATTER = """
import os, threading
from datetime import timedelta
import torch
from torch.distributed import HashStore, ProcessGroupGloo
from adaptor import context, patches, patching
from adaptor.waits import Waits
from adaptor.worker import abort_collectives

store, groups = HashStore(), {}

def make(rank):
    groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(hours=1))

other = threading.Thread(target=make, args=(1,))
other.start()
make(0)
other.join()
waits, left = context.part(Waits), threading.Event()
patches.load("online")
patching.arm("waits")

def break_it():
    while waits.current is None:
        pass
    wake = abort_collectives.Waker(frozenset())
    while True:
        wake()
        if left.wait(abort_collectives.LOOK_S):
            return

breaks = threading.Thread(target=break_it, daemon=True)
breaks.start()
work = groups[0]._reduce_scatter_base(torch.ones(4), torch.ones(8))
try:
    work.wait()
except RuntimeError as error:
    print(type(error).__name__, flush=True)
left.set()
breaks.join()
os._exit(0)
"""


def test_a_reduce_scatter_that_fails_raises_by_itself() -> None:
    """Check that the work raises its own exception, which was once taken for a timeout."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = warm.run([sys.executable, "-c", REDUCE_SCATTER], env=environment)
    assert ran.stdout.split() == ["RuntimeError"], ran.stderr[-3000:]

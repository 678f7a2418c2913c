"""Process groups with exchanged backends: a rank is replaced, and no other rank makes a group."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

from adaptor.online import group_books
from tests.faults import warm
from tests.faults.warm import Warm
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("groups_script.py")


def test_this_torch_can_exchange_backends() -> None:
    assert group_books.why_not() == ""


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "gloo"), (2, "hccl")])
def test_a_newcomer_takes_the_place_of_the_last_rank(size: int, backend: str) -> None:
    """The newcomer also receives an optimizer's state with the sender's checksum. HCCL has a stand-in."""

    (port,) = free_ports(1)

    def start(rank: int, newcomer: bool) -> subprocess.Popen[str]:
        arguments = [str(port), str(rank), str(size), str(int(newcomer)), backend]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "standins" / "hccl")])
        return Warm(
            [sys.executable, str(SCRIPT), *arguments],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    ranks = [start(rank, newcomer=False) for rank in range(size)]
    assert ranks[-1].communicate(timeout=120)[0].splitlines()[-1] == "first"
    ranks[-1] = start(size - 1, newcomer=True)
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [text.splitlines()[-1] for text in outputs] == ["done"] * size, "\n".join(outputs)


LONE = """
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from adaptor import context
from adaptor.online.groups import Groups

made = context.part(Groups)
made.remember(lone=True)
helper = c10d._new_process_group_helper
c10d._new_process_group_helper = lambda *args, **kwargs: made.make(helper, args, kwargs)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
for group in (dist.group.WORLD, dist.new_group([0, 1], backend="gloo"), dist.new_group([0, 1])):
    devices = sorted(device.type for device in group._device_types)
    print(dist.get_backend(group), c10d._get_object_coll_device(group), *devices)
print(*sorted(made.backends), made.are_gloo, made.is_bound)
"""


def test_the_groups_of_a_newcomer_have_the_devices_of_the_others() -> None:
    """Otherwise torch would gather objects of an NCCL group on the host, without the other ranks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed = warm.run([sys.executable, "-c", LONE], env=environment)
    *devices, backends = completed.stdout.splitlines()
    assert devices == ["nccl cuda cuda", "gloo cpu cpu cuda", "nccl cuda cuda"], completed.stderr
    assert backends == "gloo nccl False False"


BATCHES = """
import contextlib
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from adaptor import context
from adaptor.online.group_books import ExchangeError
from adaptor.online.groups import Groups

made = context.part(Groups)
made.remember(lone=False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def batch():
    with contextlib.suppress(KeyError), c10d._coalescing_manager():
        raise KeyError


batch()
made.exchange(dist.HashStore(), "1.1")
batch()  # torch is in no batch, or it would raise
c10d._world.pg_map[dist.group.WORLD] = ("nccl", c10d._world.pg_map[dist.group.WORLD][1])
try:
    made.exchange(dist.HashStore(), "2.1")
except ExchangeError as error:
    print(error)
"""


def test_a_batch_left_by_an_exception_is_forgotten() -> None:
    """torch would queue later calls without executing them; NCCL's own batch cannot be inspected."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed = warm.run([sys.executable, "-c", BATCHES], env=environment)
    assert completed.stdout == "the fault has struck in the middle of a batch of messages over NCCL\n", (
        completed.stderr
    )


EXCHANGES = """
import os, resource, sys
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from adaptor import context
from adaptor.online import reconfiguration
from adaptor.online.group_books import ExchangeError
from adaptor.online.groups import DESCRIPTORS_OF_A_GROUP, LEFT_DESCRIPTORS, Groups

more, rank, port = (int(word) for word in sys.argv[1:])
reconfiguration.of_group = lambda helper, request: None  # as with torch before 2.14
made = context.part(Groups)
made.remember(lone=False)
helper = c10d._new_process_group_helper
c10d._new_process_group_helper = lambda *args, **kwargs: made.make(helper, args, kwargs)
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=2)
groups = [dist.new_group([0, 1]) for _ in range(23)]
alone = [dist.new_group([each], backend="gloo") for each in (0, 1)]
if more:
    limit = len(os.listdir("/proc/self/fd")) + 24 * DESCRIPTORS_OF_A_GROUP + LEFT_DESCRIPTORS + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
number = 0
while True:
    try:
        made.exchange(dist.PrefixStore(str(number), store), f"{number}.1")
    except ExchangeError as error:
        files = [open(os.devnull) for _ in range(LEFT_DESCRIPTORS)]  # as many as last words need
        print(number, error)
        break
    number += 1
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
"""


def exchanges(spare_descriptors: int) -> str:
    """Exchange the backends of 24 groups of two ranks as often as possible; return the count and the reason
    to stop.

    Args:
        spare_descriptors: descriptors at the start beyond the need of one exchange; 0: this machine's limit.
    """
    (port,) = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def command(rank: int, spare_descriptors: int) -> list[str]:
        return [sys.executable, "-c", EXCHANGES, str(spare_descriptors), str(rank), str(port)]

    peer = Warm(command(1, 0), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ran = warm.run(command(0, spare_descriptors), env=environment, timeout=240)
    finally:
        peer.kill()
        peer.wait()
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.strip()


def test_the_backends_of_each_group_have_enough_numbers() -> None:
    """With one counter for all 24 groups the numbers would run out earlier."""
    assert exchanges(spare_descriptors=0) == "10 the process groups were exchanged 10 times in this process"


def test_descriptors_are_left_for_last_words() -> None:
    """An exchange is not started if it would use the last descriptors."""
    result = exchanges(spare_descriptors=120)
    assert re.fullmatch(
        r"[12] \d+ descriptors are open, and 320 more may be needed for 24 process groups: "
        r"the limit \(ulimit -n\) is \d+, \d+ would do",
        result,
    ), result


RECONNECTED = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from adaptor import context
from adaptor.online.groups import Groups

rank, port = (int(word) for word in sys.argv[1:])
made = context.part(Groups)
made.remember(lone=False)
helper = c10d._new_process_group_helper
c10d._new_process_group_helper = lambda *args, **kwargs: made.make(helper, args, kwargs)
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
for number in range(2):  # the second groups have the names of the first
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if number == 0:
        dist.destroy_process_group()
groups = [dist.new_group([0, 1]) for _ in range(5)]
os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
groups.append(dist.new_group([0, 1], use_local_synchronization=True))
for number in range(40):
    made.exchange(dist.PrefixStore(str(number), store), f"{number}.1")
    for group in groups:
        total = torch.ones(1000)
        dist.all_reduce(total, group=group)
        assert total[0] == 2
    if number in (0, 39):
        counts = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        print(made.most_exchanges, *counts, len(made.sockets()) > 0)
"""


def test_reconnected_groups_leak_nothing() -> None:
    """After forty exchanges there are as many threads and descriptors as after the first."""
    if "enable_reconfigure" not in inspect.signature(distributed_c10d._new_process_group_helper).parameters:
        pytest.skip("torch 2.14 or later")
    (port,) = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RECONNECTED]
    peer = Warm([*command, "1", str(port)], env=environment, stdout=subprocess.DEVNULL)
    try:
        ran = warm.run([*command, "0", str(port)], env=environment, timeout=240)
    finally:
        peer.kill()
        peer.wait()
    first, last = ran.stdout.splitlines()
    assert first == last, ran.stderr
    assert first.startswith("0 ")
    assert first.endswith(" True")

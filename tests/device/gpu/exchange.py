"""Two ranks over one GPU with NCCL: one is killed, and the other goes on with a process in its place.

`python -m tests.device.gpu.exchange` kills and replaces rank 1 as often as ROUNDS says, and prints one line
of JSON. Rank 0 hangs in a collective each time: its communicators are aborted, and the backends of its groups
are exchanged, as in an online recovery.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adaptor import context
from adaptor.devices.cuda import Cuda
from adaptor.online.groups import Groups
from tests.device.gpu.shared import a_host_of_its_own
from tests.ports import free_ports

GPU = torch.device("cuda", 0)
ROUNDS = 3
RANKS = 2
WAIT = timedelta(seconds=60)
ELEMENTS = 1 << 20
# Long enough for a main thread to stand in a collective that will not end; short beside the test.
HANGS_S = 1.0


class Member:
    """A rank with groups made through `Groups`, as in a worker.

    Args:
        rank: of the process.
        port: of the store at which the ranks meet; rank 0 has the store.
        lone: the process takes the place of another, and joins with `exchange`.
    """

    def __init__(self, rank: int, port: int, lone: bool) -> None:
        a_host_of_its_own(rank)
        os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
        torch.cuda.set_device(0)
        self._rank = rank
        self._store = dist.TCPStore("127.0.0.1", port, None, rank == 0, WAIT, wait_for_workers=False)
        self.groups = context.part(Groups)
        original = distributed_c10d._new_process_group_helper
        distributed_c10d._new_process_group_helper = lambda *args, **kwargs: self.groups.make(
            original, args, kwargs
        )
        self.groups.remember(lone=lone)
        start = dist.HashStore() if lone else dist.PrefixStore("start", self._store)
        dist.init_process_group("nccl", store=start, rank=rank, world_size=RANKS, timeout=WAIT)
        self.members = [
            dist.group.WORLD,
            dist.new_group([0, 1]),
            [dist.new_group([0]), dist.new_group([1])][rank],
        ]

    def exchange(self, occasion: str) -> None:
        self.groups.exchange(dist.PrefixStore(occasion, self._store), occasion)

    def sums(self) -> list[float]:
        """Return what each group makes of a tensor of `rank + 1`."""
        sums = []
        for group in self.members:
            tensor = torch.full((ELEMENTS,), float(self._rank + 1), device=GPU)
            dist.all_reduce(tensor, group=group)
            sums.append(float(tensor[-1].item()))
        return sums


def peer(port: int, occasion: str) -> None:
    """Be rank 1 until somebody ends this process."""
    member = Member(1, port, lone=bool(occasion))
    if occasion:
        member.exchange(occasion)
    member.sums()
    print("joined", flush=True)
    threading.Event().wait()


def start_peer(port: int, occasion: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.device.gpu.exchange", "peer", str(port), occasion]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> dict[str, Any]:
    (port,) = free_ports(1)
    peer = start_peer(port, "")
    figures: dict[str, Any] = {"rounds": []}
    try:
        member = Member(0, port, lone=False)
        figures["before"] = member.sums()
        device = Cuda(GPU)
        for number in range(ROUNDS):
            figures["rounds"].append(one_round(member, device, peer, str(number)))
            peer = figures["rounds"][-1].pop("peer")
    finally:
        peer.kill()
        peer.wait()
    free, total = torch.cuda.mem_get_info(GPU)
    figures["memory used on the device, GiB"] = round((total - free) / 2**30, 2)
    return figures


def one_round(member: Member, device: Cuda, peer: subprocess.Popen[str], occasion: str) -> dict[str, Any]:
    assert peer.stdout is not None
    assert peer.stdout.readline().strip() == "joined"
    peer.kill()
    peer.wait()
    times = {"hung": False, "abort": 0.0}
    came_back = threading.Event()

    def abort() -> None:
        times["hung"] = not came_back.wait(HANGS_S)
        start = time.monotonic()
        device.release()
        times["abort"] = time.monotonic() - start

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        member.sums()  # it hangs in the first, and the others raise
        raised = "nothing"
    except Exception as error:
        raised = type(error).__name__
    came_back.set()
    thread.join()
    torch.cuda.synchronize()
    start = time.monotonic()
    fresh = start_peer(member._store.port, occasion)
    member.exchange(occasion)
    sums = member.sums()
    return {
        "peer": fresh,
        "hung": times["hung"],
        "raised": raised,
        "abort_s": round(float(times["abort"]), 3),
        "replaced_s": round(time.monotonic() - start, 2),
        "sums": sums,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        peer(int(sys.argv[2]), sys.argv[3])
    print(json.dumps(main()), flush=True)
    os._exit(0)  # without waiting for backends that were aborted

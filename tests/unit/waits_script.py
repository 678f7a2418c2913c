"""A process that waits for gloo work whose other end is stopped in the middle of it and then killed.

    waits_script.py WORK      WORK: broadcast (this end sends), gather (it receives), send or recv

gloo forgets the work, so that nobody would be told. The last line is what the main thread was told.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from adaptor import patches, patching
from adaptor.worker import abort_collectives
from tests import waiting

WORK = sys.argv[1]
# More than the kernel takes in on its way.
SIZE = 64 << 20


def begin(group: ProcessGroupGloo, rank: int, data: torch.Tensor) -> Work:
    """Begin work in which rank 0 sends, or receives; it takes no part of it back."""
    if WORK in ("broadcast", "gather"):
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0 if WORK == "broadcast" else 1
        return group.broadcast([data], options)
    if (WORK == "send") == (rank == 0):
        return group.send([data], 1 - rank, 0)
    return group.recv([data], 1 - rank, 0)


def meet(store: TCPStore, rank: int) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore("two", store), rank, 2, timedelta(hours=1))


def on_its_way(keep: frozenset[int]) -> bool:
    return any(sent or unread for _, sent, unread in abort_collectives._traffic(keep, None))


def main() -> None:
    fork = multiprocessing.get_context("fork")
    port = fork.SimpleQueue()
    peer = fork.Process(target=other_end, args=(port,), daemon=True)
    peer.start()  # before there is a second thread
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    group, data = meet(store, 0), torch.ones(SIZE, dtype=torch.uint8)
    keep = frozenset({store.port})
    left, told = threading.Event(), []

    def break_it() -> None:
        waiting.until(lambda: on_its_way(keep), "a part of the work is on its way")
        assert peer.pid is not None
        os.kill(peer.pid, signal.SIGSTOP)
        os.waitpid(peer.pid, os.WUNTRACED)
        peer.kill()
        peer.join()
        wake = abort_collectives.Waker(keep)
        while not left.wait(abort_collectives.LOOK_S):
            wake()

    breaks = threading.Thread(target=break_it, daemon=True)
    breaks.start()
    patches.load("online")
    patching.arm("waits")
    try:
        while True:
            begin(group, 0, data).wait()
    except RuntimeError as error:
        told.append(type(error).__name__)
    left.set()
    breaks.join()
    print(*told, flush=True)
    os._exit(0)  # the thread of the forgotten work would be waited for


def other_end(port: multiprocessing.SimpleQueue[int]) -> None:
    store = TCPStore("127.0.0.1", port.get(), is_master=False)
    group, data = meet(store, 1), torch.ones(SIZE, dtype=torch.uint8)
    while True:
        begin(group, 1, data).wait()


main()

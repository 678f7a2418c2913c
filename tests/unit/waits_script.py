"""Waits for gloo work whose peer is stopped in the middle of the transfer and then killed.

waits_script.py WORK      WORK: broadcast (rank 0 sends), gather (rank 0 receives), send or recv

gloo drops such work without an error. The last line is the type of the exception in the main thread.
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
# More than the kernel's socket buffers hold.
SIZE = 64 << 20


def start_work(group: ProcessGroupGloo, rank: int, data: torch.Tensor) -> Work:
    """Start work of the kind `WORK`, without waiting for it."""
    if WORK in ("broadcast", "gather"):
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0 if WORK == "broadcast" else 1
        return group.broadcast([data], options)
    if (WORK == "send") == (rank == 0):
        return group.send([data], 1 - rank, 0)
    return group.recv([data], 1 - rank, 0)


def join_group(store: TCPStore, rank: int) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore("two", store), rank, 2, timedelta(hours=1))


def is_in_transit(keep: frozenset[int]) -> bool:
    return any(sent or unread for _, sent, unread in abort_collectives._traffic(keep, None))


def main() -> None:
    fork = multiprocessing.get_context("fork")
    port = fork.SimpleQueue()
    peer = fork.Process(target=run_peer, args=(port,), daemon=True)
    peer.start()  # fork before a second thread exists
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    group, data = join_group(store, 0), torch.ones(SIZE, dtype=torch.uint8)
    keep = frozenset({store.port})
    finished, error_names = threading.Event(), []

    def kill_peer() -> None:
        waiting.until(lambda: is_in_transit(keep), "a part of the work is on its way")
        assert peer.pid is not None
        os.kill(peer.pid, signal.SIGSTOP)
        os.waitpid(peer.pid, os.WUNTRACED)
        peer.kill()
        peer.join()
        wake = abort_collectives.Waker(keep)
        while not finished.wait(abort_collectives.LOOK_S):
            wake()

    breaks = threading.Thread(target=kill_peer, daemon=True)
    breaks.start()
    patches.load("online")
    patching.arm("waits")
    try:
        while True:
            start_work(group, 0, data).wait()
    except RuntimeError as error:
        error_names.append(type(error).__name__)
    finished.set()
    breaks.join()
    print(*error_names, flush=True)
    os._exit(0)  # a normal exit would join the thread of the dropped work


def run_peer(port: multiprocessing.SimpleQueue[int]) -> None:
    store = TCPStore("127.0.0.1", port.get(), is_master=False)
    group, data = join_group(store, 1), torch.ones(SIZE, dtype=torch.uint8)
    while True:
        start_work(group, 1, data).wait()


main()

"""Rank 0 waits at a barrier that rank 1 never reaches; another thread interrupts the wait.

Prints the type of the error in the main thread of rank 0, or `nothing`.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading

import torch.distributed as dist

from adaptor import context
from adaptor.replica import group
from adaptor.waits import Waits
from tests import waiting


def _rank(rank: int, port: int, outcomes: multiprocessing.Queue[str], over: multiprocessing.Event) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    everyone = group.of_everyone()
    group.barrier(everyone)  # to this one both come
    if rank == 1:
        over.wait()
        return
    waits_part = context.part(Waits)

    def end() -> None:
        waiting.until(lambda: waits_part.current is not None, "rank 0 waits")
        waits_part.current.end()

    threading.Thread(target=end, daemon=True).start()
    try:
        group.barrier(everyone)
        outcomes.put("nothing")
    except RuntimeError as error:
        outcomes.put(type(error).__name__)
    over.set()


if __name__ == "__main__":
    spawn = multiprocessing.get_context("fork")
    outcomes, over = spawn.Queue(), spawn.Event()
    ranks = [spawn.Process(target=_rank, args=(rank, int(sys.argv[1]), outcomes, over)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    print(outcomes.get())
    for process in ranks:
        process.join()

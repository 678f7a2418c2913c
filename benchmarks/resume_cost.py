"""The check before a resume and the load, against `torch.load` alone: `python benchmarks/resume_cost.py`.

One process, which may use all cores, as in a job whose other ranks wait. The file is one of last words: it
has a checksum of blocks. Both are timed in turn, once from memory, once from the disk (the pages of the file
are given up before each load).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _bench import Benchmark, spread, table
from _job import new_folder, run

from adaptor.checkpoint import publish, resume_check
from adaptor.checkpoint.hashing import BLOCK, BlockDigest
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry

TARGET = 1.1
_STEP = 1
_NAME = "distrib_optim.pt"


def make(root: Path, mebibytes: int) -> Path:
    """Publish a checkpoint of so much; return its file."""
    folder = publish.prepare(root, _STEP)
    path = folder / _NAME
    torch.save({key: torch.rand(mebibytes << 18) / 3 for key in ("param",)}, path)
    digest = BlockDigest()
    with path.open("rb") as file:
        while piece := file.read(BLOCK):
            digest.update(piece)
        os.fsync(file.fileno())
    entry = FileEntry(_NAME, path.stat().st_size, None, xxh3_128_blocks=digest.hexdigest())
    publish.publish(root, _STEP, [entry], {}, 1)
    return root / naming.final_name(_STEP) / _NAME


def forget(path: Path) -> None:
    """Let the system give up the pages of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10, help="pairs, from memory and from the disk each")
    parser.add_argument("--mebibytes", type=int, default=1024)
    given = parser.parse_args()
    benchmark = Benchmark("resume_cost", {"repeats": given.repeats, "MiB": given.mebibytes})
    folder = new_folder("resume_cost")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    root = folder / "save"
    path = make(root, given.mebibytes)

    def load() -> None:
        torch.load(path)

    def check_and_load() -> None:
        resume_check.require_intact(root, root)
        load()

    rows, findings = [], {}
    for where in ("memory", "disk"):
        alone, both = [], []
        for number in range(given.repeats + 1):
            for act, times in ((load, alone), (check_and_load, both))[:: 1 if number % 2 else -1]:
                if where == "disk":
                    forget(path)
                seconds = timed(act)
                if number:  # the first pair warms up
                    times.append(seconds)
        ratios = [b / a for a, b in zip(alone, both, strict=True)]
        ratio = statistics.median(ratios)
        verdict = "reached" if ratio <= TARGET else "MISSED"
        rows.append(
            [
                where,
                *(
                    f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"
                    for times in (alone, both)
                ),
                f"{ratio:.2f}",
                verdict,
            ]
        )
        findings[where] = {"load": spread(alone), "check_and_load": spread(both), "ratio": ratio}
    shutil.rmtree(folder)
    head = ["from", "torch.load, s", "check and torch.load, s", "median of ratios", f"≤ {TARGET:g}"]
    benchmark.finish(table(head, rows), findings)


if __name__ == "__main__":
    run(main)

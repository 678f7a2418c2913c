"""The check before a resume and the load, against the load alone: `python benchmarks/resume_cost.py`.

One process, which may use all cores, as in a job whose other ranks wait. Both formats, each as the framework
loads it: with `torch.load` or with `torch.distributed.checkpoint`, into tensors that are there. Large files
have a checksum of blocks. With the check and without it are timed in turn, once from memory, once from the
disk (the pages of the files are given up before each load). Alone, nothing of the adaptor acts.
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
import torch.distributed.checkpoint as dcp
from _bench import Benchmark, spread, table
from _job import new_folder, run

from adaptor import context, patches, patching
from adaptor.checkpoint import disk, hashing, publish, resume_check
from adaptor.checkpoint.checked_files import CheckedFiles
from adaptor.protocol import naming

TARGET = 1.1
_STEP = 1
_NAME = "distrib_optim.pt"
PARAMS = 4

Load = Callable[[Path, dict[str, torch.Tensor]], None]


def _save_torch(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, folder / _NAME)


def _load_torch(folder: Path, state: dict[str, torch.Tensor]) -> None:
    for key, value in torch.load(folder / _NAME).items():
        state[key].copy_(value)


def _save_torch_dist(folder: Path, state: dict[str, torch.Tensor]) -> None:
    dcp.save(state, checkpoint_id=folder)


def _load_torch_dist(folder: Path, state: dict[str, torch.Tensor]) -> None:
    dcp.load(state, checkpoint_id=folder)


FORMATS = {"torch": (_save_torch, _load_torch), "torch_dist": (_save_torch_dist, _load_torch_dist)}


def make(
    root: Path, save: Callable[[Path, dict[str, torch.Tensor]], None], state: dict[str, torch.Tensor]
) -> Path:
    """Publish a checkpoint of `state`; return its folder."""
    folder = publish.prepare(root, _STEP)
    save(folder, state)
    entries = [hashing.entry_of(path, path.name) for path in sorted(folder.iterdir())]
    for entry in entries:
        disk.sync(folder / entry.path)
    publish.publish(root, _STEP, entries, {}, 1)
    return root / naming.final_name(_STEP)


def forget(folder: Path) -> None:
    """Let the system give up the pages of the files in a folder."""
    for path in folder.iterdir():
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
    patches.load("worker")
    patching.arm("worker")
    state = {f"param{number}": torch.rand((given.mebibytes << 18) // PARAMS) / 3 for number in range(PARAMS)}
    rows, findings = [], {}
    for name, (save, load) in FORMATS.items():
        root = folder / name
        checkpoint = make(root, save, state)

        def alone(load: Load = load, checkpoint: Path = checkpoint) -> None:
            load(checkpoint, state)

        def checked(load: Load = load, checkpoint: Path = checkpoint, root: Path = root) -> None:
            with context.part(CheckedFiles).loading():
                resume_check.require_intact(root, root)
                load(checkpoint, state)

        for where in ("memory", "disk"):
            times: dict[Callable[[], None], list[float]] = {alone: [], checked: []}
            for number in range(given.repeats + 1):
                for act in (alone, checked)[:: 1 if number % 2 else -1]:
                    if where == "disk":
                        forget(checkpoint)
                    seconds = timed(act)
                    if number:  # the first pair warms up
                        times[act].append(seconds)
            ratio = statistics.median(b / a for a, b in zip(times[alone], times[checked], strict=True))
            rows.append(
                [
                    name,
                    where,
                    *(
                        f"{statistics.median(one):.3f} ({min(one):.3f} to {max(one):.3f})"
                        for one in times.values()
                    ),
                    f"{ratio:.2f}",
                    "reached" if ratio <= TARGET else "MISSED",
                ]
            )
            findings[f"{name}, {where}"] = {
                "load": spread(times[alone]),
                "check_and_load": spread(times[checked]),
                "ratio": ratio,
            }
        shutil.rmtree(root)
    shutil.rmtree(folder)
    head = ["format", "from", "the load, s", "check and load, s", "median of ratios", f"≤ {TARGET:g}"]
    benchmark.finish(table(head, rows), findings)


if __name__ == "__main__":
    run(main)

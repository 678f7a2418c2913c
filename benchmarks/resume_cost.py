"""The check before a resume and the load, against the load alone: `python benchmarks/resume_cost.py`.

One process, which may use all cores, as in a job whose other ranks wait. Both formats, each as the framework
loads it: with `torch.load` or with `torch.distributed.checkpoint`, into existing tensors. Large files have a
checksum of blocks. Loads with the check and without are timed in turn, once from memory, once from the disk
(the pages of the files are dropped before each load). The load alone runs without the adaptor. The bytes read
from the disk, in sizes of the checkpoint, and the CPU time depend less on other load.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _bench import Benchmark, argument_parser, spread, table
from _job import new_folder, run

from adaptor import context, patches, patching
from adaptor.checkpoint import disk, hashing, publish, resume_check
from adaptor.checkpoint.divided_reading import CheckedFiles
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


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def forget(folder: Path) -> None:
    """Let the system give up the pages of the files in a folder."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Took:
    """The cost of a load.

    Attributes:
        seconds: of wall time
        cpu: seconds of CPU time
        read: bytes read from the disk
    """

    seconds: float
    cpu: float
    read: int


def measured(act: Callable[[], object]) -> Took:
    read, cpu, began = _read_from_disk(), time.process_time(), time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    return Took(seconds, time.process_time() - cpu, _read_from_disk() - read)


def _read_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="pairs, from memory and from the disk each")
    parser.add_argument("--mebibytes", type=int, default=1024)
    options = parser.parse_args()
    benchmark = Benchmark("resume_cost", {"repeats": options.repeats, "MiB": options.mebibytes})
    folder = new_folder("resume_cost")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    patches.load("worker")
    patching.arm("worker")
    state = {
        f"param{number}": torch.rand((options.mebibytes << 18) // PARAMS) / 3 for number in range(PARAMS)
    }
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

        for source in ("memory", "disk"):
            took: dict[Callable[[], None], list[Took]] = {alone: [], checked: []}
            for number in range(options.repeats + 1):
                for act in (alone, checked)[:: 1 if number % 2 else -1]:
                    if source == "disk":
                        forget(checkpoint)
                    cost = measured(act)
                    if number:  # the first pair warms up
                        took[act].append(cost)
            ratio = statistics.median(
                checked_cost.seconds / bare_cost.seconds
                for bare_cost, checked_cost in zip(*took.values(), strict=True)
            )
            seconds = [[cost.seconds for cost in some] for some in took.values()]
            cpu = [statistics.median(cost.cpu for cost in some) for some in took.values()]
            read = max(cost.read for cost in took[checked]) / bytes_of(checkpoint)
            cells = [
                f"{statistics.median(second):.3f} ({min(second):.3f} to {max(second):.3f})"
                for second in seconds
            ]
            reached = "reached" if ratio <= TARGET else "MISSED"
            rows.append([name, source, *cells, f"{ratio:.2f}", reached, *map("{:.2f}".format, (*cpu, read))])
            findings[f"{name}, {source}"] = {
                "load": spread(seconds[0]),
                "check_and_load": spread(seconds[1]),
                "ratio": ratio,
                "cpu": cpu,
                "read": read,
            }
        shutil.rmtree(root)
    shutil.rmtree(folder)
    head = ["format", "from", "the load, s", "check and load, s", "median of ratios", f"≤ {TARGET:g}"]
    head += ["the load, CPU s", "check and load, CPU s", "read from the disk at most, in sizes of it"]
    benchmark.finish(table(head, rows), findings)


if __name__ == "__main__":
    run(main)

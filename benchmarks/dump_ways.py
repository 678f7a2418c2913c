"""Two holders write 1 GB of state in place, against a single gathering writer, and against `dd`: `python
benchmarks/dump_ways.py`.

Two processes, each with half of the state of an optimizer, from the order to write until all bytes are on
disk, in turn with `dd conv=fsync` of as many bytes by two processes: once of zeros, a file each, which is the
minimum for the disk; once from their memory into one file, as in a dump. Seconds of wall time, and seconds of
CPU time of all processes, which depend less on other load. `--parts` measures the work of a holder per byte
instead: CPU seconds of one process for each GB, part by part.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import struct
import subprocess
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from _bench import Benchmark, argument_parser, spread, table
from _job import JobError, new_folder, run

from adaptor.checkpoint import disk, page_cache, shards, state_writer
from adaptor.checkpoint.hashing import BLOCK, crc32
from adaptor.checkpoint.shards import Exchange
from tests.unit.test_checkpoint_dump import RECORD, Rank
from tests.unit.test_in_place import half

RANKS = 2
TIMEOUT = timedelta(minutes=5)
_ZEROS = "dd of zeros, a file each"
_PART = 512 << 20  # bytes
_ONE_FILE = "one file from memory, as dd writes"
_REPORT = struct.Struct("<dd")  # the time of its end, its CPU seconds


def dump(ranks: list[Rank], in_place: bool, folder: Path, number: int) -> None:
    """Do what a rank does in a dump, from the order on."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    group = dist.ProcessGroupGloo(store, number, RANKS, TIMEOUT)
    exchange = Exchange(group, number, [list(range(RANKS))], folder=folder if in_place else None)
    if number:
        state_writer.send_shards(ranks[number].state, 0, exchange)
    else:
        state_writer.write_files(ranks[0].state, RECORD, exchange, folder, 1)


def dd(size: int, folder: Path, number: int) -> None:
    options = ["if=/dev/zero", "bs=1M", f"count={size // RANKS >> 20}", "conv=fsync", "status=none"]
    subprocess.run(["dd", f"of={folder}/{number}", *options], check=True)


def write_from_memory(ranks: list[Rank], size: int, folder: Path, number: int) -> None:
    """Write as `dd bs=1M conv=fsync,notrunc` does, from the tensors of the rank into its part of one file."""
    part_size = size // RANKS >> 20 << 20
    (state,) = ranks[number].states.values()
    views = [memoryview(tensor.view(torch.uint8).numpy()) for tensor in state.values()]
    descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT, 0o600)
    place, end = number * part_size, (number + 1) * part_size
    for view in itertools.cycle(views):  # the weights, which are made of them, are a sixth more
        for begin in range(0, len(view), 1 << 20):
            place += os.pwrite(descriptor, view[begin : min(begin + (1 << 20), begin + end - place)], place)
        if place == end:
            break
    os.fsync(descriptor)
    os.close(descriptor)


def measured(work: Callable[[int], None]) -> tuple[float, float]:
    """Return seconds, and CPU seconds of all processes, in which waiting processes do their `work`."""
    order, begin = os.pipe()
    reports, report_end = os.pipe()
    pids = [forked(work, number, order, begin, report_end) for number in range(RANKS)]
    os.close(order)
    os.close(report_end)
    began = time.perf_counter()
    os.close(begin)
    raw_reports = [os.read(reports, _REPORT.size) for _ in pids]
    exit_codes = [os.waitpid(pid, 0)[1] for pid in pids]
    os.close(reports)
    if any(exit_codes):
        raise JobError(f"the processes have ended with {exit_codes}")
    ends, cpu = zip(*map(_REPORT.unpack, raw_reports), strict=True)
    return max(ends) - began, sum(cpu)


def forked(work: Callable[[int], None], number: int, order: int, begin: int, report_end: int) -> int:
    """Fork a process that waits until all ends of `begin` are closed, does its work and reports the end
    time.
    """
    if pid := os.fork():
        return pid
    try:
        os.close(begin)
        os.read(order, 1)
        cpu_before = sum(os.times()[:4])
        work(number)
        os.write(report_end, _REPORT.pack(time.perf_counter(), sum(os.times()[:4]) - cpu_before))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def parts(folder: Path) -> dict[str, Callable[[], None]]:
    """Return the operations of one process on `_PART` bytes in memory, by name."""
    state = torch.randn(_PART // 4)
    path, data = folder / "file", memoryview(state.view(torch.uint8).numpy())
    blocks = [data[begin : begin + BLOCK] for begin in range(0, _PART, BLOCK)]
    elements = state.split(BLOCK // 4)
    memory = page_cache.huge_pages(4 * BLOCK)
    copies = [memory[begin : begin + BLOCK] for begin in range(0, len(memory), BLOCK)]
    weights = torch.empty(BLOCK // 4, dtype=torch.bfloat16)

    def copy() -> None:
        for number, block in enumerate(blocks):
            copies[number % len(copies)][:] = block

    def write(flags: int, source: Sequence[memoryview]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        disk.reserve(descriptor, _PART)
        for number in range(len(blocks)):
            os.pwrite(descriptor, source[number % len(source)], number * BLOCK)
        os.fsync(descriptor)
        os.close(descriptor)
        path.unlink()

    def dd() -> None:
        options = ["if=/dev/zero", "bs=1M", f"count={_PART >> 20}", "conv=fsync", "status=none"]
        subprocess.run(["dd", f"of={path}", *options], check=True)
        path.unlink()

    def save() -> None:
        torch.save(state, path)
        path.unlink()

    return {
        "nothing is nan or infinite (`aminmax`)": lambda: [*map(shards.is_finite, elements)].clear(),
        "weights in bf16": lambda: [weights.copy_(part) for part in elements].clear(),
        "CRC-32 (isal)": lambda: [*map(crc32, blocks, [0] * len(blocks))].clear(),
        "CRC-32 (zlib)": lambda: [*map(zlib.crc32, blocks)].clear(),
        "xxh3-128": lambda: [*map(xxhash.xxh3_128_digest, blocks)].clear(),
        "copy into a buffer for the disk": copy,
        "direct writes of 1 MiB": lambda: write(os.O_DIRECT, copies),
        "writes through the page cache": lambda: write(0, blocks),
        "`torch.save`": save,
        "`dd bs=1M conv=fsync`": dd,
    }


def measure_parts(folder: Path, repeats: int, benchmark: Benchmark) -> None:
    figures: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        for name, act in parts(folder).items():
            cpu_before = sum(os.times()[:4])
            act()
            if number:  # the first round warms up
                figures.setdefault(name, []).append((sum(os.times()[:4]) - cpu_before) / (_PART / 1e9))
    rows = [
        [name, f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})"] for name, v in figures.items()
    ]
    benchmark.finish(table(["part", "CPU s for each GB"], rows), {"parts": figures})


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--params", type=int, default=75, help="in millions; each has 14 bytes in the files")
    parser.add_argument("--not-gathered", action="store_true", help="leave that way out, which takes longest")
    parser.add_argument("--parts", action="store_true", help="what a holder does with each byte, instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numel = options.params * 1_000_000 // 256 * 256
    benchmark = Benchmark("dump_ways", {"repeats": options.repeats, "bytes": 14 * numel})
    root = new_folder("dump_ways")
    if options.parts:
        measure_parts(root, options.repeats, benchmark)
        shutil.rmtree(root)
        return
    ranks = [half(number, RANKS, numel) for number in range(RANKS)]
    ways: dict[str, Callable[[Path, int], None]] = {
        "in place": functools.partial(dump, ranks, True),
        "gathered": functools.partial(dump, ranks, False),
        _ZEROS: functools.partial(dd, 14 * numel),
        _ONE_FILE: functools.partial(write_from_memory, ranks, 14 * numel),
    }
    if options.not_gathered:
        del ways["gathered"]
    figures: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(options.repeats + 1):
        for way, act in list(ways.items())[:: 1 if number % 2 else -1]:
            folder = root / "iter_0000012_tmp"
            folder.mkdir()
            seconds_pair = measured(functools.partial(act, folder))
            shutil.rmtree(folder)
            if number:  # the first round warms up
                figures[way].append(seconds_pair)
    shutil.rmtree(root)
    rows: list[list[str]] = []
    findings: dict[str, Any] = {}
    for way, pairs in figures.items():
        seconds, cpu = ([pair[place] for pair in pairs] for place in (0, 1))
        ratios = [
            statistics.median(
                own_pair[0] / other_pair[0]
                for own_pair, other_pair in zip(pairs, figures[other_way], strict=True)
            )
            for other_way in (_ZEROS, _ONE_FILE)
        ]
        cells = [f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in (seconds, cpu)]
        rows.append([way, *cells, *map("{:.2f}".format, ratios)])
        findings[way] = {"seconds": spread(seconds), "cpu": spread(cpu), "of_dd": ratios}
    head = ["way", "s", "CPU s", "median of ratios to dd of zeros", "to one file from memory"]
    benchmark.finish(table(head, rows), findings)


if __name__ == "__main__":
    run(main)

"""What a new process among survivors spends on its start: `python benchmarks/newcomer_start.py`.

CPU seconds of fresh processes, in turns: the imports of torch and Megatron-LM with Python's garbage
collection as it is and put off (`adaptor/worker/garbage.py`), and what `inspect` takes for its first look at
all modules, which a spare has made before it is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from _bench import ROOT, Benchmark, spread, table
from _job import run

from tests.frameworks import args, prepare

_START = """
import json, sys, time
if sys.argv[1] == "put off":
    from adaptor import context
    from adaptor.worker.garbage import GarbageCollection
    context.part(GarbageCollection).put_off()
began = time.process_time()
import torch
import megatron.training.training
imported = time.process_time()
import inspect
inspect.getmodule(compile("", "<of no module>", "exec"))
looked = time.process_time()
if sys.argv[1] == "put off":
    context.part(GarbageCollection).resume()
print(json.dumps([imported - began, looked - imported, time.process_time() - looked]), flush=True)
"""
WAYS = ("as it is", "put off")
PARTS = ("imports", "inspect's first look", "collection goes on")


def start(way: str) -> list[float]:
    """Start a process; return the CPU seconds of each of `PARTS`."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _START, way],
        env=args.environment(PYTHONPATH=f"{ROOT}:{prepare.megatron_lm()}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10, help="processes of each way")
    options = parser.parse_args()
    benchmark = Benchmark("newcomer_start", {"pairs": options.pairs})
    start(WAYS[0])  # the first one may compile what it imports
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(options.pairs):
        for way in WAYS:
            found[way].append(start(way))
    rows = []
    for number, part in enumerate(PARTS):
        each = {way: spread([one[number] for one in found[way]]) for way in WAYS}
        cells = [f"{told['median']:.3f} ({told['min']:.3f} to {told['max']:.3f})" for told in each.values()]
        rows.append([part, *cells])
    pairs = zip(*(found[way] for way in WAYS), strict=True)
    ratio = spread([put_off[0] / usual[0] for usual, put_off in pairs])
    rows.append(["imports, ratio", "1", f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"])
    head = ["CPU seconds, median (range)", *(f"garbage collection {way}" for way in WAYS)]
    benchmark.finish(table(head, rows), {"starts": found})


if __name__ == "__main__":
    run(main)

"""What a gloo process group holds in a process, beside tensors: `python benchmarks/group_memory.py`.

`split` and the framework's own optimizer instances make more process groups than one instance does. Each of
some groups is made, then used with a small message, then with a large one; after each of these the private
memory of a process is read from the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _bench import Benchmark, table

GROUPS = 20
LARGE_MB = 1.0
_FLOAT = 4  # bytes


def _private_mb() -> float:
    """The memory of this process that is no file's, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return found * 1024 / 1e6


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _process(rank: int, processes: int, folder: str) -> None:
    """Write what rank 0 has seen into `folder`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)

    def use(group: Any, megabytes: float) -> None:
        dist.all_reduce(torch.ones(int(megabytes * 1e6) // _FLOAT), group=group)

    use(None, LARGE_MB)  # what torch needs for the first one of all
    memory, threads = [_private_mb()], _threads()
    groups = [dist.new_group(list(range(processes))) for _ in range(GROUPS)]
    memory.append(_private_mb())
    for megabytes in (0.004, LARGE_MB):
        for group in groups:
            use(group, megabytes)
        memory.append(_private_mb())
    if rank == 0:
        found = {"mb": memory, "threads": [threads, _threads()]}
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(processes: int) -> dict[str, float]:
    """Return what one group adds to a process, in a job of `processes`."""
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_process, (processes, folder), processes)  # type: ignore[no-untyped-call]
        found = json.loads(Path(folder, "found").read_text())
    begun, made, used, used_large = found["mb"]
    return {
        "made": (made - begun) / GROUPS,
        "used": (used - made) / GROUPS,
        "used with a large message": (used_large - used) / GROUPS,
        "threads": (found["threads"][1] - found["threads"][0]) / GROUPS,
    }


def main() -> None:
    """Measure with 2 and with 4 processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    benchmark = Benchmark("group_memory", {"groups": GROUPS, "large message": f"{LARGE_MB:g} MB"})
    found = {processes: measure(processes) for processes in options.processes}
    names = list(next(iter(found.values())))
    rows = [[name, *(f"{found[p][name]:.2f}" for p in found)] for name in names]
    benchmark.finish(
        table(["one group adds (MB; threads)", *(f"{p} processes" for p in found)], rows),
        {str(processes): values for processes, values in found.items()},
    )


if __name__ == "__main__":
    sys.exit(main())

"""A push and a pull against the bare client with the same bytes, and the choice of the newest checkpoint:
`python benchmarks/store_rate.py`.

Each run is a process of its own, like the uploader; push, bare put, pull and bare get take turns, so all see
the same machine. `bare` passes each file to the client with the same size and number of parts, and writes the
received bytes to a file, without a checksum, a list or a manifest. The memory is the peak of the process; its
CPU time is the loss of a training beside it, and depends least on other load. Stores: a folder on this disk,
and moto, an S3 server in Python on this machine, which is the bottleneck: it reads a whole object for each
requested range. So a pull is also compared with the bare client with the same ranges and the same
concurrency. With `--url s3://bucket/prefix --endpoint URL` another server also takes turns; its credentials
come from the environment, and objects below the prefix are removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _bench import Benchmark, spread, table

from adaptor.protocol import naming
from adaptor.store import catalog, pull, push
from adaptor.store.client import PIECE, Store, open_store
from adaptor.threads import AT_ONCE
from tests.unit import object_store

STEP = 12
TARGETS = {"rate": 0.8, "memory": 256 << 20, "choose": 2.0}
BUCKET = "rate"
BARE = (("push", "bare put"), ("pull", "bare get"), ("pull", "bare get, ranges"))
BARE_WORDS = {"push": "bare put", "pull": "bare get"}


def bare_put(store: Store, root: Path) -> None:
    """Write the files of a checkpoint with the client alone."""
    import obstore

    folder = root / naming.final_name(STEP)
    for path in sorted(folder.rglob("*.pt")):
        name = f"bare/{path.relative_to(folder).as_posix()}"
        obstore.put(store._client, name, path, chunk_size=PIECE, max_concurrency=AT_ONCE)


def bare_get(store: Store, root: Path) -> None:
    """Read them with the client alone."""
    import obstore

    for name in store.objects("bare"):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in obstore.get(store._client, name).stream(min_chunk_size=PIECE):
                file.write(chunk)
            os.fsync(file.fileno())


def bare_get_ranges(store: Store, root: Path) -> None:
    """Read the files with the client alone, in the ranges of a pull."""
    import obstore

    for name, stored in store.objects("bare").items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        starts = range(0, stored.bytes, PIECE)

        def piece(start: int, name: str = name, size: int = stored.bytes) -> obstore.Bytes:
            return obstore.get_range(store._client, name, start=start, end=min(size, start + PIECE))

        with ThreadPoolExecutor(AT_ONCE) as pool, target.open("wb") as file:
            ahead = deque(pool.submit(piece, start) for start in starts[:AT_ONCE])
            for start in [*starts[AT_ONCE:], *[None] * len(ahead)]:
                file.write(ahead.popleft().result())
                if start is not None:
                    ahead.append(pool.submit(piece, start))
            os.fsync(file.fileno())


def choose_newest(store: Store, root: Path) -> None:
    """Find the newest checkpoint, as a resume does."""
    next(catalog.newest_first(store, None, []))


WHAT: dict[str, Callable[[Store, Path], object]] = {
    "push": lambda store, root: push.push(store, root, STEP),
    "bare put": bare_put,
    "pull": lambda store, root: pull.pull(store, root),
    "bare get": bare_get,
    "bare get, ranges": bare_get_ranges,
    "choose": choose_newest,
}


def run(operation: str, url: str, endpoint: str, root: Path) -> dict[str, float]:
    """Run an operation in a new process; return its seconds and the peak of its memory, in bytes."""
    command = [sys.executable, __file__, "--do", operation, url, endpoint, str(root)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(completed.stdout)
    return figures


def do(operation: str, url: str, endpoint: str, root: str) -> None:
    """Run an operation in this process, and print its cost."""
    store = open_store(url, endpoint, make=True)
    began, cpu_before = time.perf_counter(), time.process_time()
    WHAT[operation](store, Path(root))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_before
    # Not of getrusage, which begins with the memory of the process that this one was forked from.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    memory = int(line.split()[1]) << 10
    print(json.dumps({"seconds": seconds, "cpu": cpu, "memory": memory}))


def measure(url: str, endpoint: str, scratch: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Let the operations take turns; remove the files of each before the next."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in WHAT if name != "choose"}
    store = open_store(url, endpoint, make=True)
    for _ in range(repeats):
        for name in figures:
            root = scratch / "save" if name in ("push", "bare put") else scratch / "pulled"
            figures[name].append(run(name, url, endpoint, root))
        store.delete(list(store.objects("")))
        shutil.rmtree(scratch / "pulled")
    return figures


def choice(url: str, endpoint: str, scratch: Path, count: int, repeats: int) -> list[float]:
    """Return the seconds of the choice among `count` checkpoints of some small files."""
    store = open_store(url, endpoint, make=True)
    root = scratch / "one"
    object_store.save(root, 1)
    saved = push.read_folder(root, 1)
    push.push(store, root, 1)
    place = catalog.place(saved)
    objects = {name: store.get(name, 1 << 20) for name in store.objects(place)}
    for step in range(2, count + 1):
        folder = f"{naming.final_name(step)}/{place.partition('/')[2]}"
        for name, content in objects.items():
            body = content.replace(b'"step": 1,', f'"step": {step},'.encode())
            store.put(f"{folder}/{name.removeprefix(place + '/')}", body)
    return [run("choose", url, endpoint, root)["seconds"] for _ in range(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint (default 1024)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (default 5)")
    parser.add_argument("--checkpoints", type=int, default=1000, help="to choose among (default 1000)")
    parser.add_argument("--url", default="", help="a prefix in one more store, for this alone")
    parser.add_argument("--endpoint", default="", help="where that store answers")
    parser.add_argument("--do", nargs=4, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.do:
        do(*parsed.do)
        return
    bench = Benchmark("store_rate", {name: value for name, value in vars(parsed).items() if name != "do"})
    rows, findings = [], {}
    for name, value in object_store.CREDENTIALS.items():
        os.environ.setdefault(name, value)  # moto takes any
    with tempfile.TemporaryDirectory() as folder, object_store.server() as server:
        scratch = Path(folder)
        object_store.save(scratch / "save", STEP, first=parsed.mib << 20)
        object_store.request(server, "PUT", f"/{BUCKET}")
        stores = [("file", f"file://{folder}/store", ""), ("moto", f"s3://{BUCKET}/run7", server)]
        if parsed.url:
            stores.append((parsed.url, parsed.url, parsed.endpoint))
        for kind, url, endpoint in stores:
            figures = measure(url, endpoint, scratch, parsed.repeats)
            for operation, bare in BARE:
                rates = {
                    name: spread(
                        [(parsed.mib << 20) / run_figures["seconds"] for run_figures in figures[name]]
                    )
                    for name in (operation, bare)
                }
                # Neighbours in time are compared, and not the medians of minutes.
                ratio = spread(
                    [
                        b["seconds"] / o["seconds"]
                        for o, b in zip(figures[operation], figures[bare], strict=True)
                    ]
                )
                memory = max(run_figures["memory"] for run_figures in figures[operation])
                cpu = [
                    spread([run_figures["cpu"] * 1e9 / (parsed.mib << 20) for run_figures in figures[name]])[
                        "median"
                    ]
                    for name in (operation, bare)
                ]
                rows.append(
                    (
                        f"{operation}, {kind}{bare.removeprefix(BARE_WORDS[operation])}",
                        f"{rates[operation]['median'] / 1e6:.0f} MB/s",
                        f"{rates[bare]['median'] / 1e6:.0f} MB/s",
                        f"{ratio['median']:.2f} (≥ {TARGETS['rate']})",
                        f"{memory / (1 << 20):.0f} MiB (≤ {TARGETS['memory'] >> 20})",
                        f"{cpu[0]:.2f} ({cpu[1]:.2f})",
                    )
                )
                findings[f"{operation} {kind}{bare.removeprefix(BARE_WORDS[operation])}"] = {
                    "rates": rates,
                    "ratio": ratio,
                    "memory": memory,
                    "cpu_per_gb": cpu,
                }
            store = open_store(url, endpoint)
            store.delete(list(store.objects("")))
            seconds = spread(choice(f"{url}/choice", endpoint, scratch, parsed.checkpoints, parsed.repeats))
            rows.append(
                (f"choose, {kind}", f"{seconds['median']:.2f} s (≤ {TARGETS['choose']:g})", *[""] * 4)
            )
            findings[f"choose {kind}"] = seconds
            shutil.rmtree(scratch / "one")
    head = ("", "adaptor", "bare client", "ratio", "peak memory", "CPU s per GB (bare client)")
    bench.finish(table(head, rows), findings)


if __name__ == "__main__":
    main()

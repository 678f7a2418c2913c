"""Step time during an upload to an object store, against the same job without an upload: `python
benchmarks/store_step.py`.

The sending process is that of `ttprun --ttp-store`, with TTP_STORE_RATE; it is stopped (SIGSTOP) and
continued every few steps of one job, so both arms see the same processes and memory. Neighbouring blocks are
a pair; the figure is the median of the pairs' ratios, with a 95 % interval (bootstrap over pairs). As soon as
a checkpoint is in the store, the save folder has the next one: all are names of the same files. The uploader
looks for new checkpoints each second; pairs without an upload are left out.

The store (`_sink.py`) accepts everything and keeps nothing, because a real store is another machine. Ranks
are pinned to a core each. On two cores a job of one rank leaves the uploader a core, as nodes with
accelerators do; two ranks leave it the share of nice 10.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _blocks
import msgspec
import psutil
from _bench import Benchmark, argument_parser, table
from _blocks import Measured, paired
from _job import Job, JobError, add_size_options, model, new_folder, run
from step_cost import interval

from adaptor.checkpoint import hashing, publish
from adaptor.launchers.agent.processes import STORE
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store.settings import UploadSettings, rate
from tests.unit import object_store

TARGET = 1.01
URL = "s3://bucket/run7"
# Steps before the first block: the uploader reaches its rate meanwhile.
WARM_UP = 40
_SINK = Path(__file__).with_name("_sink.py")
_SENT = "is in s3://"
_LIMIT_S = 1800.0
# Megabytes in a step: the uploader has looked at the save folder.
_NOTHING = 0.1


class Checkpoints:
    """A save folder in which a checkpoint comes after the other; their files are links to the same ones."""

    def __init__(self, root: Path, mebibytes: int) -> None:
        self.root = root
        self._files = root.with_name("files")
        self._files.mkdir()
        with (self._files / naming.MODEL_FILE).open("wb") as file:
            block = os.urandom(1 << 20)
            for _ in range(mebibytes):
                file.write(block)
        digest = hashing.hash_file(self._files / naming.MODEL_FILE)
        self._entry = FileEntry(f"mp_rank_00/{naming.MODEL_FILE}", mebibytes << 20, digest)
        self._step = 1

    def add(self) -> None:
        """Save the next checkpoint, and remove the last but one."""
        self._step += 1
        folder = publish.prepare(self.root, self._step, generation="0f3a5c21")
        target = folder / self._entry.path
        target.parent.mkdir()
        target.hardlink_to(self._files / naming.MODEL_FILE)
        publish.publish(self.root, self._step, [self._entry], {}, 1, "0f3a5c21")
        shutil.rmtree(self.root / naming.final_name(self._step - 2), ignore_errors=True)


@contextmanager
def sink() -> Iterator[subprocess.Popen[str]]:
    """Run the store on the last core: beside a rank its work would count as the uploader's."""
    with subprocess.Popen(
        [sys.executable, str(_SINK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        try:
            yield process
        finally:
            process.kill()


class Uploader:
    """The process of the adaptor that sends checkpoints, with the supply of checkpoints."""

    def __init__(self, checkpoints: Checkpoints, endpoint: str, rate: int) -> None:
        self._checkpoints = checkpoints
        self.said: list[str] = []
        checkpoints.add()
        self._process = subprocess.Popen(
            [sys.executable, str(STORE), "send"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **object_store.CREDENTIALS},
        )
        assert self._process.stdin is not None
        order = UploadSettings(URL, endpoint, str(checkpoints.root), 1, 0, rate)
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()
        self.pid = self._process.pid
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.strip())
            if _SENT in line:
                self._checkpoints.add()

    def cpu(self) -> float:
        """Return its CPU seconds."""
        used = psutil.Process(self.pid).cpu_times()
        return float(used.user + used.system)

    def end(self) -> None:
        """End the process at once, even if it is stopped."""
        self._process.kill()
        self._process.wait()


def measure(ranks: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a job of so many ranks; return its pairs of blocks, and the bytes and CPU time of the uploader."""
    folder.mkdir()
    with sink() as store:
        assert store.stdout is not None
        assert store.stdin is not None
        endpoint = f"http://127.0.0.1:{int(store.stdout.readline())}"
        uploader = Uploader(Checkpoints(folder / "save", options.mib), endpoint, options.rate)
        job = Job(
            folder / "job",
            adaptor=True,
            train_iters=WARM_UP + 2 * options.pairs * options.block + 1,
            ranks=ranks,
            extra=[
                *model(options.layers, options.hidden, options.sequence),
                *("--global-batch-size", str(options.global_batch)),
            ],
            uploading=f"{options.block},{options.pairs},{options.seed},{WARM_UP},{uploader.pid}",
            environment={"TTP_HANG": "0", "TTP_REPLICA": "none" if ranks == 1 else "auto"},
        )
        try:
            with job:
                code = job.wait(_LIMIT_S)
            cpu = uploader.cpu()
        except psutil.Error:
            raise JobError(f"the uploader has ended; it said {uploader.said}") from None
        finally:
            uploader.end()
        if code != 0:
            raise JobError(f"{ranks} ranks: exit code {code}: see {job.log}")
        lines = job.watched()
        if len(lines) != 2 * options.pairs * ranks:
            raise JobError(f"{ranks} ranks: {len(lines)} blocks were written down: see {job.log}")
        store.stdin.close()
        taken = json.loads(store.stdout.readline())
    failed = [line for line in uploader.said if _SENT not in line]
    if failed or not taken["bytes"]:
        raise JobError(f"the uploader has not sent what it was to send: {failed}")
    pairs = [pair for pair in paired(lines) if pair[1]["sent"] > _NOTHING]
    if not pairs:
        raise JobError(f"{ranks} ranks: nothing was sent in any block: use a larger --block")
    return {"pairs": pairs, "bytes": taken["bytes"], "cpu": cpu, "cpu_of_store": taken["cpu"]}


def report(results: dict[int, dict[str, Any]], seed: int) -> tuple[str, list[str]]:
    """Return the table, and a line for each job."""
    rows, lines = [], []
    for ranks, result in results.items():
        pairs: list[tuple[Measured, Measured]] = result["pairs"]
        for key, name in (("wall", "wall time"), ("cpu", "CPU time")):
            ratios = [on[key] / off[key] for off, on in pairs]
            low, high = interval(ratios, seed)
            ratio = statistics.median(ratios)
            off = statistics.median(off[key] for off, _ in pairs)
            rows.append([ranks, f"{name}, ms", f"{off:.2f}", f"{ratio:.4f} ({low:.4f} to {high:.4f})"])
            if key == "wall":
                outcome = (
                    "MISSED" if low > TARGET else "reached" if high <= TARGET else "not known: more pairs"
                )
                rate = statistics.median(1000 * on["sent"] / on["wall"] for _, on in pairs)
                gigabytes = result["bytes"] / 1e9
                of_store = result["cpu_of_store"] / gigabytes
                lines.append(
                    f"{ranks} ranks: sending / not sending {ratio:.4f}, at most {TARGET:g}: {outcome};"
                    f" {len(pairs)} pairs, {rate:.0f} MB/s are sent. For each GB the uploader takes"
                    f" {result['cpu'] / gigabytes:.2f} s of CPU time, the store {of_store:.2f} s"
                )
    return table(["ranks", "of a step", "not sending", "sending / not sending (95 %)"], rows), lines


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", choices=(1, 2), default=[1, 2])
    parser.add_argument("--pairs", type=int, default=50, help="pairs of blocks in each job (default 50)")
    parser.add_argument("--rate", type=rate, default=200 * 10**6, help="TTP_STORE_RATE (default 200M)")
    parser.add_argument("--mib", type=int, default=2048, help="size of a checkpoint (default 2048)")
    _blocks.add_options(parser)
    add_size_options(parser)
    options = parser.parse_args()
    benchmark = Benchmark("store_step", vars(options))
    folder = new_folder("store_step")
    results = {}
    for ranks in options.ranks:
        began = time.monotonic()
        results[ranks] = measure(ranks, folder / str(ranks), options)
        shutil.rmtree(folder / str(ranks))  # some gigabytes
        print(f"{ranks} ranks: {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(folder)
    text, lines = report(results, options.seed)
    benchmark.finish("\n".join([text, "", *lines]), {"target": TARGET, "jobs": results})


if __name__ == "__main__":
    run(main)

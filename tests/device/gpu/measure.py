"""Tests and figures of a GPU, in at most nine minutes: `make gpu`, or `python -m tests.device.gpu.measure`.

The parts run in the order of `PARTS`, each with its share of the time. The figures of a part are in
`out/gpu/figures.json` as soon as the part ends; a part that exceeds its share is ended, and named there.
`--device cpu --layers 2 --hidden 64 --sequence 32` tries the same parts on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tests.faults import harness
from tests.faults.fault import ONCE
from tests.faults.harness import DP2, DP4, Ended, Job, Layout

OUT = harness.ROOT / "out/gpu"
# Seconds of each part. The first part needs most, because each of its jobs starts several processes.
PARTS = {"tests": 170, "steps-2": 120, "steps-4": 120, "recoveries": 120}
# One job of each kind, over NCCL: nothing else changes, last words, online recovery, a failed device.
TESTS = (
    "test_gpu.py::test_state_is_copied_beside_a_kernel_that_never_ends",
    "test_gpu.py::test_a_device_that_has_failed_says_so_at_once",
    "test_gpu.py::test_a_rank_is_replaced_under_nccl",
    "test_gpu_online.py::test_a_rank_is_killed_and_replaced_twice[dp2-nccl]",
    "test_gpu.py::test_a_rank_is_killed[nccl-dp2-update]",
    "test_gpu.py::test_a_device_breaks[failed-nccl]",
)
STEPS = 12
FIRST_TIMED = 4  # earlier steps allocate memory and make communicators
RECOVERIES = 10


def _layout(layout: Layout, options: argparse.Namespace, *extra: str) -> Layout:
    """Return `layout` with the device's backend."""
    backend = () if options.device == "cpu" else ("--distributed-backend", "nccl")
    return replace(layout, extra=(*layout.extra, *backend, *extra))


def _milliseconds(result: Ended) -> float:
    """Return the median step time of rank 0."""
    times = [line["time"] for line in result.records[0]][FIRST_TIMED:]
    return 1000 * statistics.median(end_time - earlier for earlier, end_time in pairwise(times))


def run_tests(options: argparse.Namespace) -> dict[str, Any]:
    """Return the outcome of each test of `TESTS`, as far as the time allows."""
    names = [str(Path(__file__).with_name(name)) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *names]
    output = ""
    with subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout or ():
            output += line
            outcomes = re.findall(r"::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", output)
            _write("tests", dict(outcomes))
    return {**dict(outcomes), "exit code": tests.returncode}


def measure_steps(options: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """Return step times without the adaptor and with each kind of replica, and the parts of a save.

    The last step of the jobs with the adaptor ends in a SIGKILL of rank 1, so the save of the same state is
    measured in the same job.
    """
    sizes = {
        "num-layers": options.layers,
        "hidden-size": options.hidden,
        "num-attention-heads": max(4, options.hidden // 128),
        "seq-length": options.sequence,
        "max-position-embeddings": options.sequence,
        "global-batch-size": layout.processes,
        "train-iters": STEPS,
    }
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    figures: dict[str, Any] = {}
    for replica in ("off", "split", "mirror"):
        folder = OUT / f"steps-{layout.processes}-{replica}"
        kind: dict[str, Any] = {"launcher": "torchrun"}
        if replica != "off":
            kind = {
                "faults": [f"rank=1,step={STEPS},phase=backward,kind=sigkill"],
                "options": ("--ttp-online", "0"),
            }
        job = Job(
            folder,
            replace(
                _layout(layout, options, *arguments), replica="auto" if replica != "mirror" else "mirror"
            ),
            save=folder.with_suffix(".save") if replica != "off" else None,
            device=options.device,
            **kind,
        )
        result = harness.run(job)
        milliseconds = _milliseconds(result)
        figures[f"{replica}: ms per step"] = milliseconds
        if replica != "off":
            figures[f"{replica} ÷ off"] = milliseconds / figures["off: ms per step"]
            (path,) = folder.glob("logs/*/incidents/*.json")
            incident = json.loads(path.read_text())
            figures[f"{replica}: save, s"] = {
                **{part: incident["phases"][part] for part in ("detect", "freeze", "write", "publish")},
                "bytes": incident["bytes"],
            }
            shutil.rmtree(folder.with_suffix(".save"))
        _write(f"steps-{layout.processes}", figures)
    return figures


def measure_recoveries(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds from each of ten SIGKILLs in one job to the next step."""
    faults = [
        f"rank=1,step={step},phase=backward,kind=sigkill,restart={ONCE}"
        for step in range(4, 4 + 2 * RECOVERIES, 2)
    ]
    folder = OUT / "recoveries"
    job = Job(
        folder,
        _layout(DP2, options, "--train-iters", str(6 + 2 * RECOVERIES)),
        save=folder.with_suffix(".save"),
        faults=faults,
        restarts=1,
        options=("--ttp-online", "60", "--ttp-spares", "1"),
        device=options.device,
    )
    result = harness.run(job)
    incidents = [json.loads(path.read_text()) for path in folder.glob("logs/*/incidents/*.json")]
    incidents.sort(key=lambda incident: incident["incident"])
    shutil.rmtree(folder.with_suffix(".save"))
    return {
        "verdicts": [incident["verdict"] for incident in incidents],
        "seconds to the next step": [
            min(line["time"] for line in result.records[0] if line["time"] > stamp["time"]) - stamp["time"]
            for stamp in result.stamps
        ],
        "exit code": result.code,
    }


def _write(part: str, figures: dict[str, Any]) -> None:
    """Add the figures of a part to the file, in place of its earlier figures."""
    path = OUT / "figures.json"
    earlier_parts = json.loads(path.read_text()) if path.exists() else {}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({**earlier_parts, part: figures}, indent=1))
    draft.replace(path)


def _run_part(options: argparse.Namespace) -> None:
    """Run a part in the present process."""
    part = options.part
    if part == "tests":
        figures = run_tests(options)
    elif part == "recoveries":
        figures = measure_recoveries(options)
    else:
        figures = measure_steps(options, DP2 if part == "steps-2" else DP4)
    _write(part, figures)


def main() -> None:
    """Run all parts, each in a process group that ends with its time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="nccl", choices=("nccl", "shared", "cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048, help="24 layers of 2048: 1.2 billion parameters")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        _run_part(options)
        return
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu tries the parts on a CPU")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    versions = {"torch": torch.__version__, "python": platform.python_version(), "GPU": gpu}
    _write("machine", {**versions, "date": time.strftime("%Y-%m-%d"), "options": vars(options)})
    for part, limit_s in PARTS.items():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.gpu.measure", "--part", part, *sys.argv[1:]],
            cwd=harness.ROOT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        if problem:
            _write(f"{part}: problem", {"what": problem})
    print((OUT / "figures.json").read_text())


if __name__ == "__main__":
    main()

"""Hooks the measurements of a benchmark into a worker, then runs its script: `_worker.py ... script args`.

--watch      records the durations of the parts of a dump, and the memory
--native     calls the framework's own save, unpatched and timed, after the second step of each start; then
             `dd conv=fsync` writes as many bytes, by as many processes as hold the optimizer state
--gate       waits before every block of iterations until the benchmark gives this job its turn
--holds      records the resources of the process after each INTERVAL-th step, from AT on
--parts      turns the adaptor off and on every few steps, and records the times of each part of a step
--arming     turns online recovery off and on every few steps, and records the times of a step
--uploading  stops and continues an uploader every few steps, and records the times of a step
--cost       records, at the third gate, the memory and parameters of the process, and its sent bytes

Lines of JSON go to OUT/rank<R>.jsonl: what, time (of the end), seconds, restart. All hooks are installed from
outside, as for the recorder.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt
from _arming import Arming, Comparing
from _holdings import Holdings
from _parts import Parts
from _peaks import Peaks
from _uploading import Uploading

RANK = int(os.environ.get("RANK", "0"))
# The parts of a dump: (what, module, function). Parts of one dump never overlap.
PARTS = (
    ("freeze", "adaptor.worker.freezer", "Freezer.freeze"),
    ("door", "adaptor.worker.freezer", "Freezer.bring_to"),
    ("dump", "adaptor.checkpoint.trainee", "MegatronTrainee.dump"),
    ("connect", "adaptor.worker.dump_order", "_connect"),
    ("gather", "adaptor.checkpoint.shards", "gather"),
    ("send", "adaptor.checkpoint.shards", "send_shards"),
    ("cast", "adaptor.checkpoint.weights", "Weights.add_sharded"),
    ("rebuild", "adaptor.checkpoint.weights", "Weights.rebuild"),
    ("write", "torch", "save"),
    ("write", "adaptor.checkpoint.in_place", "InPlace.write"),
    ("fsync", "adaptor.checkpoint.in_place", "InPlace.finish"),
    ("fsync", "adaptor.checkpoint.hashing", "HashingFile.close"),
)


class Notes:
    """The file of this rank's results."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"rank{RANK}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def add(self, event: str, seconds: float, **fields: Any) -> None:
        line = {
            "what": event,
            "time": time.time(),
            "seconds": seconds,
            "restart": self._restart,
            "rank": RANK,
        }
        os.write(self._file, (json.dumps(line | fields) + "\n").encode())


def hook(module: str, name: str, wrapper: Any) -> None:
    """Wrap a function once its module is imported."""

    def wrap(imported: ModuleType) -> None:
        wrapt.wrap_function_wrapper(imported, name, wrapper)

    wrapt.register_post_import_hook(wrap, module)


def watch(notes: Notes) -> None:
    main_thread = threading.main_thread()
    peaks = Peaks()
    hook("megatron.training.training", "train_step", peaks.step)

    def timed(part: str) -> Any:
        def is_timed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if threading.current_thread() is main_thread:
                return wrapped(*args, **kwargs)
            began = time.time()
            if part == "dump":
                peaks.begin()
            try:
                return wrapped(*args, **kwargs)
            finally:
                fields = peaks.end() if part == "dump" else {}
                notes.add(part, time.time() - began, began=began, **fields)

        return is_timed

    for part, module, name in PARTS:
        hook(module, name, timed(part))


# Processes that write with `split`: the state is held twice by four ranks, so two ranks hold all of it.
_WRITERS = 2
# A virtual machine returns freed memory to its host within seconds, and the next write waits to get it back.
# So both dd and the dump begin this long after a folder was removed.
_SETTLE_S = 6.0


class NativeSave:
    """Saves once with the framework's own `save_checkpoint`, to a folder that is removed afterwards."""

    def __init__(self, notes: Notes, folder: Path) -> None:
        self._notes = notes
        self._folder = folder
        self._steps = 0

    def after_step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        self._steps += 1
        if self._steps == 2:
            self._save(*args[2:5])
        return result

    def _save(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        import torch
        from megatron.training import checkpointing
        from megatron.training.global_vars import get_args

        save_checkpoint = inspect.unwrap(checkpointing.save_checkpoint)
        arguments = get_args()
        save, arguments.save = arguments.save, str(self._folder)
        torch.distributed.barrier()
        began = time.time()
        save_checkpoint(arguments.curr_iteration + 1, model, optimizer, scheduler, 0.0)
        torch.distributed.barrier()
        end = time.time()
        arguments.save = save
        if RANK == 0:
            os.sync()  # no pending write disturbs the next measurement
            self._notes.add("durable", time.time() - began)
            size = self._bytes()
            self._notes.add("native", end - began, bytes=size)
            shutil.rmtree(self._folder)
            os.sync()
            time.sleep(_SETTLE_S)
            self._dd(size // _WRITERS >> 20)
            os.sync()
            time.sleep(_SETTLE_S)
        torch.distributed.barrier()

    def _dd(self, mebibytes: int) -> None:
        """Let some processes write so many MiB each at the same time, each to its own file."""
        self._folder.mkdir()
        options = ["if=/dev/zero", "bs=1M", f"count={mebibytes}", "conv=fsync", "status=none"]
        began = time.time()
        writers = [
            subprocess.Popen(["dd", f"of={self._folder}/{number}", *options]) for number in range(_WRITERS)
        ]
        exit_codes = [writer.wait() for writer in writers]
        if any(exit_codes):
            raise OSError(f"dd has ended with {exit_codes}")
        self._notes.add("dd", time.time() - began)
        shutil.rmtree(self._folder)

    def _bytes(self) -> int:
        files = [path for path in self._folder.rglob("*") if path.suffix in (".pt", ".distcp")]
        return sum(path.stat().st_size for path in files)


class Gate:
    """Queues with the other ranks of this job before every block of iterations."""

    def __init__(self, address: str, cost: Cost | None) -> None:
        name, arm, block = address.split(",")
        self._cost = cost
        self._block = int(block)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect("\0" + name)
        self._connection.sendall(f"{arm}\n".encode())

    def wait(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        if get_args().curr_iteration % self._block == 0:
            if self._cost is not None and get_args().curr_iteration == 2 * self._block:
                self._cost.note(args[2], get_args().curr_iteration)
            self._connection.sendall(b"?")
            if not self._connection.recv(1):
                os._exit(1)  # the benchmark has ended
        return wrapped(*args, **kwargs)


class Cost:
    """The memory of this rank, and the bytes sent to the other optimizer instances."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._between = 0
        hook("torch.distributed", "all_reduce", self._all_reduce)

    def _all_reduce(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.core import parallel_state

        # The getter of the group raises if there is none.
        between = parallel_state._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
        if between is not None and kwargs.get("group") is between:
            self._between += args[0].nbytes
        return wrapped(*args, **kwargs)

    def note(self, model: Any, steps: int) -> None:
        """Write down the cost after `steps` steps."""
        self._notes.add("cost", 0.0, between=self._between / steps, **_memory(), **_parameters(model))


def _memory() -> dict[str, int]:
    """Return the bytes of all tensors reachable from Python, and of all memory without a file."""
    import torch

    gc.collect()
    # Some objects answer isinstance for others.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    rollup = Path("/proc/self/smaps_rollup").read_text()
    (anonymous,) = re.findall(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE)
    return {"tensors": sum(storages.values()), "anonymous": 1024 * int(anonymous)}


def _parameters(model: Any) -> dict[str, int]:
    """Return the parameters of this rank (experts apart), and how many ranks share the update of each."""
    from megatron.core import parallel_state

    sizes = {"dense": 0, "experts": 0}
    for param in [param for chunk in model for param in chunk.parameters() if param.requires_grad]:
        sizes["dense" if getattr(param, "allreduce", True) else "experts"] += param.numel()
    return sizes | {
        "sharing_dense": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "sharing_experts": parallel_state.get_expert_data_parallel_world_size(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--native", type=Path, metavar="FOLDER")
    parser.add_argument("--gate", metavar="SOCKET,ARM,BLOCK")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--holds", metavar="INTERVAL,AT")
    parser.add_argument("--parts", metavar="BLOCK,PAIRS,SEED")
    parser.add_argument("--arming", metavar="BLOCK,PAIRS,SEED,WARM_UP,times|holders")
    parser.add_argument("--uploading", metavar="BLOCK,PAIRS,SEED,WARM_UP,PID")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parsed = parser.parse_args()
    notes = Notes(parsed.out)
    if parsed.watch:
        watch(notes)
    if parsed.native:
        hook("megatron.training.training", "train_step", NativeSave(notes, parsed.native).after_step)
    if parsed.holds:
        interval, at = map(int, parsed.holds.split(","))
        holdings = Holdings(notes, interval, at)
        hook("megatron.training.training", "train_step", holdings.after_step)
    if parsed.parts:
        Parts(notes.add, hook, parsed.parts.split(","))
    if parsed.arming:
        kind = Comparing if parsed.arming.endswith(",holders") else Arming
        kind(notes.add, hook, parsed.arming)
    if parsed.uploading:
        Uploading(notes.add, hook, parsed.uploading)
    if parsed.gate:
        hook(
            "megatron.training.training",
            "train_step",
            Gate(parsed.gate, Cost(notes) if parsed.cost else None).wait,
        )
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path[0] = str(Path(parsed.script).resolve().parent)
    runpy.run_path(parsed.script, run_name="__main__")


if __name__ == "__main__":
    main()

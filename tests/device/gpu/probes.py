"""Checks of `Cuda` on a GPU, each in a process of its own, because a broken device outlives no process:
`python -m tests.device.gpu.probes blocked|behind|failed|speed|adam`. Prints one line of JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from adaptor.checkpoint.hashing import HashingFile
from adaptor.devices.cuda import Cuda
from tests.device.gpu.shared import break_device

GPU = torch.device("cuda", 0)
# What runs behind the kernel that never ends: with one connection to the device, all else would wait for it.
BEHIND = 100
# Of the model whose dump is measured; main params and two moments for each. In tensors of so many.
ELEMENTS = int(os.environ.get("TTP_GPU_ELEMENTS", "1000000000"))
TENSOR = 10_000_000
UPDATES = 3
ARRIVES_S = 5  # a thousand times what the copy takes
LIMIT_S = 300  # for a main thread that hangs: says where


def in_a_thread(act: Any, limit_s: float = 60) -> Any:
    """Return the result of `act`, called in a thread like that of a dump; end the process if it hangs."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    thread.join(limit_s)
    if not results:
        print(json.dumps({"hangs": True}), flush=True)
        os._exit(3)
    return results[0]


def blocked() -> dict[str, Any]:
    device = Cuda(GPU)
    expected = torch.randn(1 << 28)
    tensor = expected.to(GPU)
    parts = {
        "half": tensor[:1000].bfloat16(),
        "column": tensor[:1000].view(10, 100)[:, 3],
        "count": tensor[0].clone(),
    }
    copies = {name: part.cpu() for name, part in parts.items()}
    tensor[:1000].mul(2)  # a kernel is loaded when it is first used, and that waits for all streams
    device.catch_up()
    mark_before = device.mark()
    break_device("blocked")
    for _ in range(BEHIND):
        tensor[:1000].mul(2)
    mark_after = device.mark()
    start = time.monotonic()
    copy = in_a_thread(lambda: device.to_host(tensor))
    took = time.monotonic() - start
    is_same = all(
        torch.equal(in_a_thread(lambda part=part: device.to_host(part)), copies[name])
        for name, part in parts.items()
    )
    return {
        "same": is_same and torch.equal(copy, expected),
        "gigabytes per second": round(expected.nbytes / took / 1e9, 2),
        "unreadable": in_a_thread(device.unreadable),
        "before": device.done(mark_before),
        "after": device.done(mark_after),
        "waited": device.wait(mark_after, 0.2),
        "stream ended": torch.cuda.current_stream().query(),
    }


def behind() -> dict[str, Any]:
    """Check whether a copy to the host waits for a copy that the main thread has queued behind an endless
    kernel, as `loss.item()` behind a collective.
    """
    device = Cuda(GPU)
    tensor = torch.ones(1 << 24, device=GPU)
    place = torch.empty(1, pin_memory=True)
    device.catch_up()
    break_device("blocked")
    place.copy_(tensor[:1], non_blocking=True)
    copies: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: copies.append(device.to_host(tensor)), daemon=True)
    thread.start()
    thread.join(ARRIVES_S)
    return {"arrives": bool(copies)}


def failed() -> dict[str, Any]:
    device = Cuda(GPU)
    tensor = torch.ones(1000, device=GPU)
    device.catch_up()
    break_device("failed")
    try:
        device.catch_up()
        raised = ""
    except RuntimeError as error:
        raised = type(error).__name__
    start = time.monotonic()
    unreadable = in_a_thread(device.unreadable)
    took = time.monotonic() - start

    def copy() -> str:
        try:
            device.to_host(tensor)
        except RuntimeError as error:
            return type(error).__name__
        return ""

    return {
        "raised": raised,
        "unreadable": unreadable,
        "seconds": round(took, 3),
        "copy": in_a_thread(copy),
    }


def speed() -> dict[str, Any]:
    """A dump of a model's optimizer state, as a writer makes it, against `torch.save` of the same tensors."""
    device = Cuda(GPU)
    count = max(1, ELEMENTS // TENSOR)
    state = {
        key: [torch.randn(TENSOR, device=GPU) for _ in range(count)]
        for key in ("param", "exp_avg", "exp_avg_sq")
    }
    device.catch_up()
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TTP_GPU_FOLDER")) as folder:
        start = time.monotonic()
        with (Path(folder) / "torch.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        times["torch.save"] = time.monotonic() - start
        (Path(folder) / "torch.pt").unlink()

        def dump() -> bool:
            world = {key: torch.zeros(count * TENSOR) for key in state}
            with device.beside():
                for key, tensors in state.items():
                    for place, tensor in zip(world[key].split(TENSOR), tensors, strict=True):
                        device.copy(place, tensor)
            times["copy"] = time.monotonic() - start
            with HashingFile(Path(folder) / "ours.pt", lambda count: None) as file:
                torch.save(world, file)  # type: ignore[arg-type]
            return True

        start = time.monotonic()
        in_a_thread(dump, 600)
        times["dump"] = time.monotonic() - start
    return {
        "machine": torch.cuda.get_device_name(0),
        "elements": count * TENSOR,
        **{name: round(value, 2) for name, value in times.items()},
        "ratio": round(times["dump"] / times["torch.save"], 2),
    }


def adam() -> dict[str, Any]:
    """Return the share of a million params that differ between AdamW on the host and on the device after some
    updates; a bitwise replica in host memory needs 0.
    """
    shares_by_kind: dict[str, Any] = {}
    for name, kind in (
        ("loop", {"foreach": False}),
        ("foreach", {"foreach": True}),
        ("fused", {"fused": True}),
    ):
        torch.manual_seed(7)
        host = torch.nn.Parameter(torch.randn(1 << 20))
        parameter = torch.nn.Parameter(host.detach().to(GPU))
        updates = [
            torch.optim.AdamW([weights], lr=1e-3, weight_decay=0.1, **kind) for weights in (host, parameter)
        ]
        shares = []
        for _ in range(UPDATES):
            host.grad = torch.randn(1 << 20)
            parameter.grad = host.grad.to(GPU)
            for update in updates:
                update.step()
            shares.append(float((parameter.detach().cpu() != host.detach()).float().mean()))
        shares_by_kind[name] = shares
    return shares_by_kind


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    probe = {"blocked": blocked, "behind": behind, "failed": failed, "speed": speed, "adam": adam}[
        sys.argv[1]
    ]
    print(json.dumps(probe()), flush=True)
    os._exit(0)  # without waiting for what never ends

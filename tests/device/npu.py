"""What to try first on a real NPU: `python -m tests.device.npu` on a machine with one and torch_npu.

Each line is something that `adaptor.devices.npu` relies on, and `yes`, or what was found instead; the exit
code is 1 where one was. The last of them stops the device, so nothing else may use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from adaptor.devices.npu import Npu
from adaptor.threads import within

LIMIT_S = 60.0
# On the main thread's stream, for longer than the copies of some megabytes take.
BUSY_S = 5.0
TENSORS = {
    "float32": torch.arange(20_000_000.0),
    "bfloat16": torch.arange(77.0).bfloat16(),
    "a count": torch.tensor(7.0),
    "a column": torch.arange(60.0).view(5, 12)[:, 3],
    "a matrix, turned": torch.arange(60.0).view(5, 12).t(),
}


def questions(
    device: Npu, put: Callable[[torch.Tensor], Any], keep_busy: Callable[[], Any]
) -> Iterator[tuple[str, str]]:
    """What is asked, and what is wrong, empty where nothing is.

    Args:
        put: puts a tensor on the device.
        keep_busy: gives this thread's stream work to do, and returns at once.
    """
    there = {name: put(tensor) for name, tensor in TENSORS.items()}
    device.catch_up()
    before = device.mark()
    yield "an event is passed once its work is done", "" if device.wait(before, LIMIT_S) else "not passed"
    for name, tensor in TENSORS.items():
        yield f"{name} is copied bit for bit", _copied(device, there[name], tensor)
    keep_busy()
    after = device.mark()
    wrong = [name for name, tensor in TENSORS.items() if _copied(device, there[name], tensor)]
    yield "copies are made beside a stream that is busy", f"not of {', '.join(wrong)}" if wrong else ""
    yield "the device answers beside it", _said(lambda: device.unreadable(release=False))
    ended = device.done(after)
    yield "none of this has waited for that stream", "it has, or BUSY_S is too short here" if ended else ""
    yield "the device is stopped and goes on", _said(lambda: _released(device))
    yield "and answers then", _said(lambda: device.unreadable(release=False))
    yield "and what it had to do is over", "" if device.wait(after, LIMIT_S) else "not after a minute"


def _released(device: Npu) -> str:
    try:
        device.release()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _copied(device: Npu, tensor: Any, wanted: torch.Tensor) -> str:
    def act() -> str:
        copy = device.to_host(tensor)
        return "" if copy.dtype == wanted.dtype and torch.equal(copy, wanted) else "other numbers arrive"

    return _said(act)


def _said(act: Callable[[], str]) -> str:
    """What it says in a thread of its own, as in a dump."""
    said = within(LIMIT_S, act)
    return f"no answer after {LIMIT_S:g} s" if said is None else said


def random_states(npu: Any) -> Iterator[tuple[str, str]]:
    """They are read and set as the framework does it."""
    state = npu.get_rng_state()
    first = torch.randn(8, device="npu").cpu()
    npu.set_rng_state(state)
    again = torch.equal(torch.randn(8, device="npu").cpu(), first)
    yield "random states lie on the host", "" if state.device.type == "cpu" else str(state.device)
    yield "and are those that they were set to", "" if again else "other numbers are drawn"


def main() -> None:
    try:
        import torch_npu
    except ImportError as error:
        sys.exit(f"torch_npu cannot be imported: {error}")
    npu = torch_npu.npu
    if not npu.is_available():
        sys.exit("torch_npu finds no NPU here")
    place = torch.device("npu", npu.current_device())
    print(f"torch {torch.__version__}, torch_npu {torch_npu.__version__}, {npu.get_device_name(place)}")
    factor = torch.randn(8192, 8192, device=place)

    def keep_busy() -> None:
        start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
        start.record()
        torch.mm(factor, factor)
        end.record()
        end.synchronize()
        for _ in range(int(1000 * BUSY_S / max(start.elapsed_time(end), 0.1))):
            torch.mm(factor, factor)

    wrong = 0
    for asked in (random_states(npu), questions(Npu(place), lambda tensor: tensor.to(place), keep_busy)):
        for what, found in asked:
            wrong += bool(found)
            print(f"{what}: {found or 'yes'}", flush=True)
    os._exit(int(wrong > 0))  # without waiting for what never ends


if __name__ == "__main__":
    main()

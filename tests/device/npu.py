"""First checks on a real NPU: `python -m tests.device.npu` on a machine with an NPU and torch_npu.

Each line is an assumption of `adaptor.devices.npu`, followed by `yes` or the deviation; the exit
code is 1 after a deviation. The last check stops the device, so nothing else may use it.
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
# Busy time of the main thread's stream, longer than copies of some megabytes take.
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
    """Yield each question with the deviation, which is empty if there is none.

    Args:
        put: puts a tensor on the device.
        keep_busy: gives this thread's stream work to do, and returns at once.
    """
    on_device = {name: put(tensor) for name, tensor in TENSORS.items()}
    device.catch_up()
    mark_before = device.mark()
    yield (
        "an event is passed once its work is done",
        "" if device.wait(mark_before, LIMIT_S) else "not passed",
    )
    for name, tensor in TENSORS.items():
        yield f"{name} is copied bit for bit", _copied(device, on_device[name], tensor)
    keep_busy()
    mark_after = device.mark()
    wrong = [name for name, tensor in TENSORS.items() if _copied(device, on_device[name], tensor)]
    yield "copies are made beside a stream that is busy", f"not of {', '.join(wrong)}" if wrong else ""
    yield "the device answers beside it", _answer_in_thread(lambda: device.unreadable(release=False))
    has_ended = device.done(mark_after)
    yield (
        "none of this has waited for that stream",
        "it has, or BUSY_S is too short here" if has_ended else "",
    )
    yield "the device is stopped and goes on", _answer_in_thread(lambda: _released(device))
    yield "and answers then", _answer_in_thread(lambda: device.unreadable(release=False))
    yield "and what it had to do is over", "" if device.wait(mark_after, LIMIT_S) else "not after a minute"


def _released(device: Npu) -> str:
    try:
        device.release()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _copied(device: Npu, tensor: Any, expected: torch.Tensor) -> str:
    def act() -> str:
        copy = device.to_host(tensor)
        return "" if copy.dtype == expected.dtype and torch.equal(copy, expected) else "other numbers arrive"

    return _answer_in_thread(act)


def _answer_in_thread(act: Callable[[], str]) -> str:
    """Return the answer of `act`, run in a thread as in a dump."""
    answer = within(LIMIT_S, act)
    return f"no answer after {LIMIT_S:g} s" if answer is None else answer


def random_states(npu: Any) -> Iterator[tuple[str, str]]:
    """Check that random states are read and set as the framework does."""
    state = npu.get_rng_state()
    first = torch.randn(8, device="npu").cpu()
    npu.set_rng_state(state)
    is_repeated = torch.equal(torch.randn(8, device="npu").cpu(), first)
    yield "random states lie on the host", "" if state.device.type == "cpu" else str(state.device)
    yield "and are those that they were set to", "" if is_repeated else "other numbers are drawn"


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
    for question_set in (
        random_states(npu),
        questions(Npu(place), lambda tensor: tensor.to(place), keep_busy),
    ):
        for question, problem in question_set:
            wrong += bool(problem)
            print(f"{question}: {problem or 'yes'}", flush=True)
    os._exit(int(wrong > 0))  # without waiting for work that never ends


if __name__ == "__main__":
    main()

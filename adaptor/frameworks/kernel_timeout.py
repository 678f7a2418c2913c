"""The time-outs of kernels that wait for another rank: a hang is noticed before a time-out."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from adaptor import context, output
from adaptor.controller.hang_detector import KERNEL_TIMEOUT_SHARE
from adaptor.protocol.environment import WorkerPlace
from adaptor.worker import runtime


class KernelTimeout(NamedTuple):
    """The time-out of kernels that wait for another rank.

    Attributes:
        seconds: the longest wait
        effect: the damage after the longest wait, in words
    """

    seconds: float
    effect: str


# 200e9 cycles in DeepEP's kernels, and 100 s in its loops on the host (`csrc/kernels/legacy/compiled.cuh`).
_DEEP_EP = KernelTimeout(100.0, "DeepEP's kernels end the CUDA context, and the state on the device with it,")
# Of Transformer Engine, where UB_TIMEOUT is not set (`userbuffers-host.cpp`).
_USER_BUFFERS_S = 110.0


def of(options: Any) -> KernelTimeout | None:
    """Return the time-out of the kernels that a job with `options` runs; None: no kernel has a time-out."""
    backend = getattr(options, "moe_flex_dispatcher_backend", None) or "deepep"
    if getattr(options, "moe_token_dispatcher_type", None) == "flex" and backend == "deepep":
        return _DEEP_EP
    if getattr(options, "tp_comm_overlap", False):
        timeout = os.environ.get("UB_TIMEOUT", "")
        seconds = float(timeout) if timeout.isdecimal() and int(timeout) else _USER_BUFFERS_S
        return KernelTimeout(seconds, "Transformer Engine's user buffers go on with wrong numbers")
    return None


def note(options: Any) -> None:
    """Write the time-out of kernels to the board of this rank; print a line if TTP_HANG gets shorter."""
    timeout = of(options)
    if timeout is None:
        return
    board = runtime.get().session.board
    board.kernel_timeout = timeout.seconds
    board.write()
    hang_s, limit_s = context.get().settings.hang_s, KERNEL_TIMEOUT_SHARE * timeout.seconds
    if hang_s > limit_s and context.part(WorkerPlace).rank == 0:
        output.tell(
            f"[ttp] a hang is noticed after {limit_s:g} s in a step, not {hang_s:g} s (TTP_HANG): "
            f"{timeout.effect} when they have waited {timeout.seconds:g} s for another rank"
        )

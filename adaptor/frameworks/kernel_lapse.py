"""Kernels that wait for another rank for a limited time: a hang is noticed before that time is over."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from adaptor import context, output
from adaptor.controller.hang_detector import LAPSE_SHARE
from adaptor.protocol.environment import WorkerPlace
from adaptor.worker import runtime


class KernelLapse(NamedTuple):
    """The end of kernels that wait for another rank.

    Attributes:
        seconds: after which they end
        effect: of their end
    """

    seconds: float
    effect: str


# 200e9 cycles in DeepEP's kernels, and 100 s in its loops on the host (`csrc/kernels/legacy/compiled.cuh`).
_DEEP_EP = KernelLapse(100.0, "DeepEP's kernels end the CUDA context, and the state on the device with it,")
# Of Transformer Engine, where UB_TIMEOUT is not set (`userbuffers-host.cpp`).
_USER_BUFFERS_S = 110.0


def of(options: Any) -> KernelLapse | None:
    """Return the first end of such kernels; None: they wait for ever."""
    backend = getattr(options, "moe_flex_dispatcher_backend", None) or "deepep"
    if getattr(options, "moe_token_dispatcher_type", None) == "flex" and backend == "deepep":
        return _DEEP_EP
    if getattr(options, "tp_comm_overlap", False):
        timeout = os.environ.get("UB_TIMEOUT", "")
        seconds = float(timeout) if timeout.isdecimal() and int(timeout) else _USER_BUFFERS_S
        return KernelLapse(seconds, "Transformer Engine's user buffers go on with wrong numbers")
    return None


def note(options: Any) -> None:
    """Note on the board of this rank when such kernels end; say so where that shortens TTP_HANG."""
    lapse = of(options)
    if lapse is None:
        return
    board = runtime.get().session.board
    board.lapse = lapse.seconds
    board.write()
    hang_s, limit_s = context.get().settings.hang_s, LAPSE_SHARE * lapse.seconds
    if hang_s > limit_s and context.part(WorkerPlace).rank == 0:
        output.tell(
            f"[ttp] a hang is noticed after {limit_s:g} s in a step, not {hang_s:g} s (TTP_HANG): "
            f"{lapse.effect} when they have waited {lapse.seconds:g} s for another rank"
        )

"""The framework's own watchdogs, which end a process some time after a collective fails or hangs.

In a protected job watchdogs would end survivors with the state to save, so the adaptor switches watchdogs off
and watches for hangs in their place. With TTP_HANG=0 nothing else watches for hangs, so watchdogs stay on: a
hanging job must come to an end.

torch reads the variables when a process group is made. By then a job is known to be protected if the
framework's own script has parsed its arguments, if the script has imported the framework of a plug-in, or if
the script has called `adaptor.enable()`. In any other script under ttprun watchdogs stay unchanged.
"""

from __future__ import annotations

import os
import sys

from adaptor import context, output
from adaptor.context import Context
from adaptor.protocol.environment import NEWCOMER, WorkerPlace

OFF = "0"  # the value that `Watchdogs.switch_off` gives to each of the variables
# To end the process would end a holder, and to abort the collective would let the device go on with gradients
# that nobody has reduced. And NCCL's monitor ends a process some minutes after such a failure. 0: nothing.
VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_HCCL_ASYNC_ERROR_HANDLING",
    # With this variable torch acts as if the first variable were set.
    "TORCH_NCCL_DESYNC_DEBUG",
)
# The first NCCL group of a process that takes another's place is at the store of the meeting, where torch
# would look once a second whether another rank asks for a dump of its flight recorder.
_OF_NEWCOMERS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
# The variable that torch elastic sets for workers, unless the user has set it.
_TORCHS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
_WATCHED = ("nccl", "hccl")


class Watchdogs:
    """The watchdogs of this process, a part of its context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._off = False
        self._before: dict[str, str | None] = {}  # the variables' own values, while switched off

    def switch_off(self) -> None:
        """Switch the watchdogs of NCCL and HCCL off; with TTP_HANG=0 they stay on.

        The call has no effect once process groups exist.
        """
        if self._off or not self._context.settings.hang_s or _groups_are_made():
            return
        self._off = True
        for name in VARIABLES:
            switch_value = os.environ.get(name, "0")
            if switch_value != "0" and (name, switch_value) != _TORCHS:
                _say(f"{name} is {switch_value}: set to 0: the watchdog would end the survivors of a fault")
            self._switch_off(name)
        if NEWCOMER in os.environ:
            self._switch_off(_OF_NEWCOMERS)

    def _switch_off(self, name: str) -> None:
        self._before[name] = os.environ.get(name)
        os.environ[name] = OFF

    def restore(self) -> None:
        """Put the variables back, for process groups that are made from now on: the adaptor is disabled."""
        self._off = False
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()

    @property
    def are_off(self) -> bool:
        """Return whether they end nobody: not with TORCH_DISTRIBUTED_DEBUG=DETAIL, whatever was set."""
        from adaptor.devices.cuda import is_detailed  # imports torch

        return self._off and not is_detailed()

    def warn_if_on(self) -> None:
        """Warn, when training begins, if watchdogs are on that would end the survivors of a fault."""
        from torch import distributed

        backend = str(distributed.get_backend()).lower()
        if self.are_off or not any(name in backend for name in _WATCHED):
            return
        if self._off:
            _say(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL keeps the watchdog of NCCL on, which may end survivors of a "
                "fault before they are saved; with INFO it is off"
            )
            return
        if not self._context.settings.hang_s:
            _say(
                "TTP_HANG is 0, so the watchdog of NCCL or HCCL stays what it was: it ends a job that hangs, "
                "but also survivors of a fault, maybe before they are saved; with TTP_HANG=86400 it is off"
            )
            return
        _say(
            "the watchdog of NCCL or HCCL is on, and would end survivors before they are saved: call "
            "adaptor.enable() in the script before torch.distributed.init_process_group"
        )


def _groups_are_made() -> bool:
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and bool(module.is_initialized())


def _say(line: str) -> None:
    if context.part(WorkerPlace).rank == 0:
        output.tell(f"[ttp] {line}")

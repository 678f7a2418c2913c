"""A script's own handlers behind the interface that the control plane knows (`control.session.Trainee`).

The engine chooses the step and who gives which shard, and knows when everyone is done. What is saved, where
and under which name is the script's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.messages import GroupOrder, Share
from adaptor.control.session import DumpRun
from adaptor.devices.device import HOST, Device
from adaptor.mindio import groups
from adaptor.mindio.handlers import Handlers
from adaptor.mindio.replicas import Replicas


@dataclass
class HandledTrainee:
    """A rank of a job that saves by handlers. A step's record is its number.

    barrier     a barrier of all ranks of the job
    resets      the device is stopped and cleaned before a dump (TTP_STOP_CLEAN_BEFORE_DUMP)
    await_rest  returns when the main thread, which was woken, stands still
    """

    rank: int
    replicas: tuple[Replicas, ...]
    handlers: Handlers
    barrier: Callable[[], None]
    goes_back: bool
    device: Device = HOST
    resets: bool = False
    await_rest: Callable[[], None] = lambda: None
    _saving: threading.Lock = field(default_factory=threading.Lock)
    _groups: frozenset[Any] | None = None  # before the first attempt

    @property
    def save(self) -> str:
        return ""

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(share for replicas in self.replicas for share in replicas.shares(self.rank))

    def exchange(self) -> None:
        """Copies are the script's."""
        self.device.catch_up()

    def copy_state(self) -> None:
        """The local copy is the script's, and was made before this."""

    def update_replicas(self) -> None:
        """So are replicas."""

    def take_record(self, step: int) -> int:
        return step

    def take_door(self) -> None:
        """What belongs to a step besides tensors is for the handlers to find."""

    def derive(self, record: int, door: None, updated: bool) -> int:
        return record + 1

    def has_state(self) -> bool:
        return True

    def dump(self, record: int, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        """Call the save handler, once for all groups; return when all of this group have come from theirs."""
        if order is run.groups[0]:
            self._save(record, run)
        ranks = order.ranks
        if len(ranks) > 1:
            # Who fails tells the controller by itself, and does not come here.
            run.connect(ranks).barrier().wait()
        return ()

    def _save(self, step: int, run: DumpRun) -> None:
        kinds = {replicas.group: replicas.kind for replicas in self.replicas}
        # The main thread may hang in a collective; or an earlier attempt, in the handler.
        run.wake()
        with self._saving:  # one at a time
            if run.cancelled():
                raise RuntimeError("a newer attempt has taken the place of this one")
            if self._groups is None:
                self._groups = groups.present()
            groups.drop_all_but(self._groups)
            with self.device.beside():
                if self.resets:
                    self.handlers.stop_device()
                self.await_rest()
                if self.resets:
                    self.handlers.restart_device()
                self.handlers.save_at(step, [(kinds[order.group], order) for order in run.groups])

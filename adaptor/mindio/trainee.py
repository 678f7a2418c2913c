"""Puts a script's own save handlers behind the interface `protocol.state_provider.Trainee`.

The engine chooses the step and the rank that gives each shard, and knows when all have finished. The script
decides what is saved, where, and under which name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from adaptor.devices.device import HOST, Device
from adaptor.mindio.handlers import Handlers
from adaptor.mindio.replicas import StateCopies
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.state_provider import DumpRun


@dataclass
class HandledTrainee:
    """A rank of a job that saves by handlers. A step's record is its number.

    Attributes:
        barrier: a barrier of all ranks of the job
        resets: the device is stopped and cleaned before a dump (TTP_STOP_CLEAN_BEFORE_DUMP)
        await_rest: returns when the woken main thread stands still
    """

    rank: int
    replicas: tuple[StateCopies, ...]
    handlers: Handlers
    barrier: Callable[[], None]
    has_local_copy: bool
    device: Device = HOST
    resets: bool = False
    await_rest: Callable[[], None] = lambda: None
    _saving: threading.Lock = field(default_factory=threading.Lock)
    _groups: frozenset[Any] | None = None  # before the first attempt

    @property
    def save_folder(self) -> str:
        return ""

    @property
    def in_parts(self) -> bool:
        return False

    @property
    def survives(self) -> str:
        return "by handlers of the script, the copies that it has told of"

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(share for replicas in self.replicas for share in replicas.shares(self.rank))

    def exchange(self) -> None:
        """Only catch up with the device: the script makes copies."""
        self.device.catch_up()

    def copy_state(self) -> None:
        """Do nothing: the script has made its local copy before."""

    def update_replicas(self) -> None:
        """Do nothing: the script's own optimizer updates replicas, too."""

    def take_record(self, step: int) -> int:
        return step

    def snapshot_before_update(self) -> None:
        """Return nothing: the script's handlers find everything besides tensors themselves."""

    def derive(self, record: int, door: None, updated: bool) -> int:
        return record + 1

    def has_state(self) -> bool:
        return True

    def dump(self, record: int, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        """Call the save handler, once for all groups; return when all ranks of this group have returned from
        theirs.
        """
        if order is run.groups[0]:
            self._save(record, run)
        ranks = order.ranks
        if len(ranks) > 1:
            # A rank that fails reports that by itself, and does not reach this barrier.
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
                self._groups = _present_groups()
            _drop_groups_except(self._groups)
            with self.device.beside():
                if self.resets:
                    self.handlers.stop_device()
                self.await_rest()
                if self.resets:
                    self.handlers.restart_device()
                self.handlers.save_at(step, [(kinds[order.group], order) for order in run.groups])


def _present_groups() -> frozenset[Any]:
    """Return the process groups of this process."""
    return frozenset(distributed_c10d._world.pg_names) if dist.is_initialized() else frozenset()


def _drop_groups_except(kept: frozenset[Any]) -> None:
    """Destroy the process groups of handlers in an attempt that other ranks could not finish.

    torch names a group made by its members alone (`use_local_synchronization`) by its ranks, and by the
    number of groups of a process. With a group left from an earlier attempt, a rank would wait under another
    name.
    """
    for group in _present_groups() - kept:
        dist.destroy_process_group(group)

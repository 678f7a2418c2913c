"""Puts a script's own save handlers behind the interface `protocol.state_provider.Trainee`.

The engine chooses the step and the rank that gives each shard, and knows when all have finished. The script
decides what is saved, where, and under which name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from adaptor import output, text
from adaptor.devices.device import HOST, Device
from adaptor.mindio.replicas import StateCopies
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.state_provider import DumpRun


@dataclass(frozen=True)
class Handler:
    """A function of the script, and the context for its calls."""

    func: Callable[..., Any]
    ctx: Any = None


@dataclass
class Handlers:
    """The script's callbacks. The main thread rebinds attributes; dump threads only read them.

    Attributes:
        older: the save handler has the older form, `f(save_rank, step, rank_list, args)`
        args: the last value of ttp_set_ckpt_args or tft_set_step_args
    """

    save: Handler | None = None
    rename: Handler | None = None
    exit: Handler | None = None
    stop: Handler | None = None
    clean: Handler | None = None
    older: bool = False
    args: Any = None

    def save_at(self, step: int, orders: Sequence[tuple[int, GroupOrder]]) -> None:
        """Let the script save its part of `step`.

        Args:
            orders: for each optimizer with a shard of this rank: its kind, and the holders.
        """
        assert self.save is not None
        chosen = [(kind, list(dict.fromkeys(order.holders))) for kind, order in sorted(orders, key=_kind)]
        if self.older:
            ((_, ranks),) = chosen
            self.save.func(ranks[0], step, ranks, self._args_of(step))
        else:
            infos = [{"type": kind, "ranks": ranks} for kind, ranks in chosen]
            self.save.func(step, infos, self.args, self.save.ctx)

    def name(self, step: int) -> None:
        """Let the script name the checkpoint. Raises the handler's exception, or for its failure code."""
        if self.rename is None:
            return
        if not self.older:
            self.rename.func(step, self.args)
            return
        code = self.rename.func(self._args_of(step))
        if code not in (0, None):
            raise RuntimeError(f"the rename handler has returned {code!r}")

    def stop_device(self) -> None:
        """Let the script stop its device, if it has registered a stop handler."""
        if self.stop is not None:
            self.stop.func(self.args, self.stop.ctx)

    def restart_device(self) -> None:
        """Let the script clean and restart its device, if it has registered a clean handler."""
        if self.clean is not None:
            self.clean.func(False, self.args, self.clean.ctx)

    def leave(self) -> None:
        """Call the exit handler before the process ends. An exception does not stop the end."""
        if self.exit is None:
            return
        try:
            self.exit.func(self.exit.ctx)
        except (Exception, SystemExit) as error:
            output.tell(f"[ttp] the exit handler has raised {text.describe(error)}", to="stdout")

    def _args_of(self, step: int) -> Any:
        """Return the arguments for a handler of `step`.

        In the older form the first argument is the iteration, from which alone the rename handler knows the
        step. After a passed update the iteration is the step before.
        """
        if isinstance(self.args, tuple | list) and self.args and type(self.args[0]) is int:
            return type(self.args)((step, *self.args[1:]))
        return self.args


def _kind(item: tuple[int, GroupOrder]) -> int:
    return item[0]


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
    save_folder: ClassVar[str] = ""
    in_parts: ClassVar[bool] = False
    survives: ClassVar[str] = "by handlers of the script, the copies that it has told of"
    _saving: threading.Lock = field(default_factory=threading.Lock)
    _groups: frozenset[Any] | None = None  # before the first attempt

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

    def after_evaluation(self) -> None:
        """Do nothing: the script's handlers save what an evaluation changes."""

    def take_record(self, step: int) -> int:
        return step

    def snapshot_before_update(self) -> None:
        """Return nothing: the script's handlers find everything besides tensors themselves."""

    def derive(self, record: int, door: None, updated: bool) -> int:
        return record + 1

    def require_as_derived(self, taken: int, derived: int) -> None:
        """Do nothing: a record is only the number of its step."""

    def has_state(self) -> bool:
        return True

    def dump(self, record: int, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        """Call the save handler, once for all groups; return when all ranks of this group have returned."""
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
    import torch.distributed as dist  # for the script to import first
    from torch.distributed import distributed_c10d

    return frozenset(distributed_c10d._world.pg_names) if dist.is_initialized() else frozenset()


def _drop_groups_except(kept: frozenset[Any]) -> None:
    """Destroy the process groups of handlers in an attempt that other ranks could not finish.

    torch names a group made by its members alone (`use_local_synchronization`) by its ranks, and by the
    number of groups of a process. With a group left from an earlier attempt, a rank would wait under another
    name.
    """
    import torch.distributed as dist

    for group in _present_groups() - kept:
        dist.destroy_process_group(group)

"""Translates the calls of a script, in either form of the interface, into calls of the engine.

The interface has no beginning of a step, and gives no number of an update before its end. So training begins
for the engine when the step is known: when the script reports the loaded step, or else at the end of its
first update; and after each update the next step begins at once.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from adaptor import context, devices, output
from adaptor.context import Context
from adaptor.devices.device import HOST, Device
from adaptor.errors import AdaptorError, ConfigError
from adaptor.mindio.replicas import StateCopies
from adaptor.mindio.trainee import HandledTrainee, Handlers
from adaptor.protocol.messages import Phase
from adaptor.worker import runtime

# Messages of the drivers of Ascend devices about damaged memory, whose content must not be saved.
_DAMAGED = ("UCE ERROR", "HBM MULTI BIT ECC")


def current_device() -> int | None:
    """Return the index of the device of this thread; None without a device."""
    module = _module()
    if context.get().settings.device == "cpu" or not module.is_available():
        return None
    return int(module.current_device())


def _beside_main_thread() -> Device:
    """Return a context for handlers in another thread, to use the device beside the main thread's stream.

    Main thread only.
    """
    index = current_device()
    if index is None:
        return HOST
    import torch

    kind = "npu" if "torch_npu" in sys.modules else "cuda"
    return devices.of([torch.empty(0, device=torch.device(kind, index))])


def _module() -> Any:
    import torch

    return torch.npu if "torch_npu" in sys.modules else torch.cuda  # type: ignore[attr-defined]


def _is_damaged(error: Exception) -> bool:
    """Return whether the error reports damaged memory of the device."""
    return any(phrase in str(error) for phrase in _DAMAGED)


def give_up(rank: int, reason: str) -> None:
    """End this process at once, so that other ranks give its shards."""
    output.tell(f"[ttp] rank {rank}: {reason}: its memory may be damaged, so only other ranks save")
    output.leave(1)


# Less than the 5 s of standstill after which the controller replaces a rank in a dump.
REST_S = 2.0


class Job:
    """The interface's state, a part of the context. The main thread calls everything but the handlers.

    Attributes:
        apart: with an optimizer that mirrors, the distance from a rank to the rank with the copy of its
            shard; 0: no copy
        exported: the framework of the handlers, '' if none is named; its device is stopped and cleaned before
            a dump, as with TTP_STOP_CLEAN_BEFORE_DUMP=1
    """

    def __init__(self, context: Context) -> None:
        self.handlers = Handlers()
        self.replicas: tuple[StateCopies, ...] = ()
        self.apart = 0
        self.exported = ""
        self.has_local_copy = False
        self.never_called: list[str] = []
        self._worker: runtime.Runtime | None = None
        self._optimizer = object()  # stands for all optimizers of the script, which share one window
        self._loaded: int | None = None
        self._rests = threading.Event()  # the main thread is held

    def rank(self, call: str) -> int:
        """Return the rank of this process. Raises ConfigError if `call` comes before the rank is known."""
        return self._joined(call).rank

    def join(self, call: str, rank: int, world_size: int, has_local_copy: bool) -> None:
        """Compare the script's rank and world size with ttprun's; the controller runs already.

        Args:
            call: the function of the interface, for messages.
            has_local_copy: the script will make a local copy.

        Raises:
            ConfigError: rank or world size differ.
            StartError: the process was not started by ttprun.
        """
        worker = runtime.get()
        assert isinstance(worker, runtime.Runtime)  # with the SDK as engine a script finds the SDK
        self._worker = worker
        place_of_rank = (self._worker.rank, int(os.environ["WORLD_SIZE"]))
        if (rank, world_size) != place_of_rank:
            raise ConfigError(
                f"{call}: rank {rank!r} of {world_size!r}, but this process is rank {place_of_rank[0]} of "
                f"{place_of_rank[1]}"
            )
        self.has_local_copy = bool(has_local_copy)
        self._worker.processor.use_handlers(self.handlers)

    def loaded(self, step: int) -> None:
        """Note the step of the state: from now on the state can be saved, the first update included."""
        self._loaded = step

    def start_copy(self) -> None:
        """Begin the script's copy of its optimizer state."""
        self._begin_if_known("tft_start_copy_os")
        self._joined("tft_start_copy_os").session.before_copy()

    def start_update(self, backup_step: int) -> None:
        """Begin the script's update; the script has a copy of `backup_step`, if not -1."""
        self._begin_if_known("tft_start_updating_os")
        session = self._joined("tft_start_updating_os").session
        if backup_step >= 0:
            self.reached(backup_step)
        session.before_update(self._optimizer)
        if session.window.is_open and self.has_local_copy and backup_step < session.board.finished:
            session.board.updating(copied=False)  # no rank asks for the copy

    def end_update(self, step: int) -> None:
        """End the update: the optimizer state is the state of `step`. Does not return while the job saves."""
        call = "tft_end_updating_os"
        session = self._joined(call).session
        if session.trainee is None:
            self._begin(call, step, has_ended=True)
        else:
            finished = session.board.finished
            if not session.window.is_open:
                raise ConfigError(f"{call}({step}) without tft_start_updating_os before it")
            if step <= finished:
                raise ConfigError(
                    f"{call}({step}): step {finished} has ended before, each window has to end a later one; "
                    "leave out what opens others (of MindSpeed --reuse-fp32-param, see docs/mindio.md)"
                )
            session.after_update(self._optimizer)
        session.begin_step(step + 1)
        if session.door.closed:
            self._hold(call)

    def reached(self, step: int) -> None:
        """Note the end of `step`, with an update or without one (an overflow)."""
        worker = self._worker
        if worker is None or worker.session.trainee is None or worker.session.window.is_open:
            return
        if step > worker.session.board.finished:
            worker.session.begin_step(step + 1)

    def guard(
        self, func: Callable[..., Any], *, sets_args: Callable[[], bool] | None = None
    ) -> Callable[..., Any]:
        """Return `func`, the script's training: an exception is reported, and the process stays.

        Args:
            sets_args: returns whether the handlers get the arguments of `func` unchanged; None: they get none
        """

        @functools.wraps(func)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if sets_args is not None:
                self.handlers.args = args if sets_args() else list(args)
            try:
                return func(*args, **kwargs)
            except AdaptorError:
                raise  # the job is refused in one line
            except Exception as error:
                if self._worker is None:
                    raise
                if _is_damaged(error):
                    give_up(self._worker.rank, str(error))
                self._rests.set()
                self._worker.hold_after(error)

        return guarded

    def fail(self, error: str) -> None:
        """Report a fault of this rank, whose state is intact. Does not return."""
        worker = self._joined("tft_report_error")
        worker.raised(error, 1)
        self._hold("tft_report_error")

    def wait(self) -> None:
        """Wait to be ended."""
        self._hold("tft_wait_next_action")

    def await_rest(self) -> None:
        """Wait, in a dump's thread, for the woken main thread: handlers use the state that it changes.

        The main thread is at the closed door, or comes to where it is held, because no collective lets it
        pass. After REST_S seconds handlers are called beside the main thread.
        """
        if self._joined("a save handler").session.board.phase is not Phase.READY:
            self._rests.wait(REST_S)

    def _hold(self, call: str) -> None:
        self._rests.set()
        self._joined(call).session.hold()

    def _joined(self, call: str) -> runtime.Runtime:
        if self._worker is None:
            raise ConfigError(f"{call} was called before ttp_init_processor or tft_init_processor")
        return self._worker

    def _begin_if_known(self, call: str) -> None:
        if self._joined(call).session.trainee is None and self._loaded is not None:
            self._begin(call, self._loaded, has_ended=False)

    def _begin(self, call: str, step: int, *, has_ended: bool) -> None:
        """Begin training with the live state of `step`; `has_ended`: of an update of unknown number."""
        worker = self._joined(call)
        if not self.replicas:
            raise ConfigError(
                f"{call}: who has copies is not known: call tft_set_optimizer_replica before training"
            )
        if self.handlers.save is None:
            raise ConfigError(
                f"{call}: there is no save handler: call tft_register_save_ckpt_handler before training"
            )
        trainee = HandledTrainee(
            rank=worker.rank,
            replicas=self.replicas,
            handlers=self.handlers,
            barrier=_barrier(call) if not self.has_local_copy else _nothing,
            has_local_copy=self.has_local_copy,
            device=_beside_main_thread(),
            resets=bool(self.exported) or os.environ.get("TTP_STOP_CLEAN_BEFORE_DUMP") == "1",
            await_rest=self.await_rest,
        )
        session = worker.session

        def begin() -> None:
            session.begin_training(trainee, [self._optimizer], step - has_ended)
            if has_ended:
                session.board.start(step)

        if self.never_called and worker.rank == 0:
            output.tell(
                "[ttp] these handlers are never called, because nothing is repaired in place:"
                f" {', '.join(self.never_called)}",
                to="stdout",
            )
        # As a window: a freeze comes before or after it.
        session.publishing(begin)
        session.begin_step(step + 1)


def _barrier(call: str) -> Callable[[], None]:
    """Make a barrier of all ranks; every rank calls this at the same time."""
    import torch.distributed as dist

    from adaptor.replica import group

    if os.environ["WORLD_SIZE"] == "1":
        return _nothing
    if not dist.is_initialized():
        raise ConfigError(
            f"{call}: torch.distributed is not initialized: without it ranks may be a step apart, and "
            "nothing could be saved; initialize it, or use a local copy (enable_local_copy)"
        )
    everyone = group.of_everyone()
    return lambda: dist.barrier(group=everyone)


def _nothing() -> None:
    """Do nothing: the barrier of a job with one rank."""


def get() -> Job:
    """Return the state of the interface in this process."""
    return context.part(Job)


class ReplicaOptimizer:
    """Base of a framework's optimizer whose shards have copies on other ranks: update window and dump.

    Attributes:
        current_step: the step of the optimizer state; during an update the next step
        error_dump: a dump has begun: the next save is last words
        save_args: of the dump: `step`, `rank` (the writer) and `rank_list` (the givers of shards)
    """

    current_step = 0
    error_dump = False
    save_args: dict[str, Any]

    def begin_to_update(self, iteration: int) -> None:
        """Begin the change of the state of `iteration`; return when the change may begin."""
        interface = get()
        interface.loaded(iteration)
        interface.reached(iteration)
        self.current_step = iteration
        self.exchange()
        if interface.has_local_copy:
            interface.start_copy()
            self.copy_state()
        interface.start_update(iteration if interface.has_local_copy else -1)
        # However the update ends, from here on the live state is not the state of `iteration`.
        self.current_step = iteration + 1

    def end_to_update(self) -> None:
        """End the change of the state. Does not return while the job saves."""
        self.update_copies()
        get().end_update(self.current_step)

    def exchange(self) -> None:
        """Fetch the parts of this update for copies of other ranks' shards; after an exception the state is
        intact.
        """

    def update_copies(self) -> None:
        """Update this rank's copies of others' shards, without communication."""

    def copy_state(self) -> None:
        """Copy the state that an update changes; a dump of an earlier step reads the copy."""
        raise NotImplementedError

    def givers(self) -> list[int]:
        """Return, for each shard of a dump, its giver among `rank_list`."""
        (replicas,) = get().replicas
        return replicas.givers(self.save_args["rank_list"])

    def set_dump_args(self, rank: int, step: int, rank_list: list[int]) -> None:
        """Prepare a dump of `step`: `rank` writes, the ranks of `rank_list` give shards."""
        self.save_args = {"step": step, "rank": rank, "rank_list": rank_list}
        self.error_dump = True

"""Translates the calls of a script, in either form of the interface, into calls of the engine.

The interface has no beginning of a step, and no number for an update before it has ended. So training begins
for the engine where the step is known: when the script says which one it has loaded, or else when its first
update has ended; and after each update the next step begins at once.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from adaptor import context, output
from adaptor.context import Context
from adaptor.errors import AdaptorError, ConfigError
from adaptor.mindio import device
from adaptor.mindio.handlers import Handlers
from adaptor.mindio.replicas import Replicas
from adaptor.protocol.messages import Phase
from adaptor.worker import runtime

# Less than the 5 s of standstill after which the controller replaces a rank in a dump.
REST_S = 2.0


class Job:
    """The interface's state, a part of the context. The main thread calls everything but the handlers.

    Attributes:
        apart: of an optimizer that mirrors: how many places behind a rank the one is that has the copy of its
            shard; 0: there is none
        exported: the framework whose handlers these are, '' where none was named; its device is stopped and
            cleaned before a dump, as with TTP_STOP_CLEAN_BEFORE_DUMP=1
    """

    def __init__(self, context: Context) -> None:
        self.handlers = Handlers()
        self.replicas: tuple[Replicas, ...] = ()
        self.apart = 0
        self.exported = ""
        self.has_local_copy = False
        self.never_called: list[str] = []
        self._worker: runtime.Runtime | None = None
        self._optimizer = object()  # stands for all of the script's, which open and close one window
        self._loaded: int | None = None
        self._rests = threading.Event()  # the main thread has come to where it is kept

    def rank(self, call: str) -> int:
        """Return the rank of this process. Raises ConfigError if `call` asks before it is known."""
        return self._joined(call).rank

    def join(self, call: str, rank: int, world_size: int, has_local_copy: bool) -> None:
        """Compare who the script says it is with what ttprun says; its controller is there already.

        Args:
            call: the function of the interface, for messages.
            rank: of this process.
            world_size: the number of ranks.
            has_local_copy: whether there is to be a local copy.

        Raises:
            ConfigError: it is somebody else.
            StartError: the process was not started by ttprun.
        """
        worker = runtime.get()
        assert isinstance(worker, runtime.Runtime)  # where the SDK drives, it is what such a script finds
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
        """The state is that of `step`: from now on it can be saved, the first update included."""
        self._loaded = step

    def start_copy(self) -> None:
        """The script is about to copy its optimizer state."""
        self._begin_if_known("tft_start_copy_os")
        self._joined("tft_start_copy_os").session.before_copy()

    def start_update(self, backup_step: int) -> None:
        """The script is about to update its optimizer state; of `backup_step` it has a copy, if not -1."""
        self._begin_if_known("tft_start_updating_os")
        session = self._joined("tft_start_updating_os").session
        if backup_step >= 0:
            self.reached(backup_step)
        session.before_update(self._optimizer)
        if session.window.is_open and self.has_local_copy and backup_step < session.board.finished:
            session.board.updating(copied=False)  # what there is a copy of, if any, nobody asks for

    def end_update(self, step: int) -> None:
        """The optimizer state is that of `step` now. Does not return while the job saves."""
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
        """The script is at the end of `step`, with an update or without one (an overflow)."""
        worker = self._worker
        if worker is None or worker.session.trainee is None or worker.session.window.is_open:
            return
        if step > worker.session.board.finished:
            worker.session.begin_step(step + 1)

    def guard(
        self, func: Callable[..., Any], *, sets_args: Callable[[], bool] | None = None
    ) -> Callable[..., Any]:
        """`func`, the script's training: an exception that leaves it is told, and the process stays.

        Args:
            sets_args: where the handlers are to get the arguments of `func`
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
                if device.is_damaged(error):
                    device.give_up(self._worker.rank, str(error))
                self._rests.set()
                self._worker.hold_after(error)

        return guarded

    def fail(self, error: str) -> None:
        """The script reports a fault of this rank; the state is intact. Does not return."""
        worker = self._joined("tft_report_error")
        worker.raised(error, 1)
        self._hold("tft_report_error")

    def wait(self) -> None:
        """Wait to be ended."""
        self._hold("tft_wait_next_action")

    def await_rest(self) -> None:
        """Wait, in a dump's thread, for the main thread, which was woken: handlers use what it changes.

        It is at the closed door, or comes to where it is kept, for no collective lets it pass. If it takes
        longer than REST_S to come to one, handlers are called beside it.
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
        """The live state is that of `step`; `has_ended`: of an update that nobody knew the number of."""
        worker = self._joined(call)
        if not self.replicas:
            raise ConfigError(
                f"{call}: who has copies is not known: call tft_set_optimizer_replica before training"
            )
        if self.handlers.save is None:
            raise ConfigError(
                f"{call}: there is no save handler: call tft_register_save_ckpt_handler before training"
            )
        # With torch, which importing the names does not need.
        from adaptor.mindio.trainee import HandledTrainee

        trainee = HandledTrainee(
            rank=worker.rank,
            replicas=self.replicas,
            handlers=self.handlers,
            barrier=_barrier(call) if not self.has_local_copy else _nothing,
            has_local_copy=self.has_local_copy,
            device=device.of_this_process(),
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
        # As a window: who freezes this rank finds it before or behind.
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

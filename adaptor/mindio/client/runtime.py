"""The runtime of a worker that the SDK drives: its session, and the reports of failures to the SDK.

The SDK's knowledge of a step, like the board's, must be true at every moment, because its thread may ask for
the state at any moment. So the board marks the live state as changing before the SDK hears of the beginning
of an update, and the board has finished a step before the SDK hears of its end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from adaptor import context, hooks, output, text
from adaptor.checkpoint import disk, manifest, publish
from adaptor.config import Config
from adaptor.devices.device import HOST
from adaptor.errors import CheckpointError, ConfigError, UnsupportedError
from adaptor.mindio.client import REFUSED, load
from adaptor.protocol import naming
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.environment import Generation
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.state_provider import DumpRun, Trainee
from adaptor.worker.runtime import summarize
from adaptor.worker.session import Session
from adaptor.worker.unprotected import UnprotectedTraining
from adaptor.worker.update_window import UpdateWindow

# The SDK ends a process itself, ten seconds after its save.
_ENDS_AFTER_S = 30.0
# For the store of the job's agent, which exists before its workers.
_MEETING_S = 10.0
_EXIT_FAILED = 1
# The ending of the reports of writers (`SaveHandlers`).
_LEFT = ".written"
# gloo's messages about another rank that is gone; its errors have no type of their own.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


class MindioRuntime:
    """The worker's runtime with the SDK as engine: the methods of `worker.runtime.Runtime`, without agent."""

    def __init__(self, settings: Config, environ: Mapping[str, str]) -> None:
        self.rank = int(environ["RANK"])
        self.pid = os.getpid()
        self._world_size = int(environ["WORLD_SIZE"])
        self._settings = settings
        self._restarts = restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # Until the ranks have met and agree on another one.
        self._generation = context.part(Generation)
        self._generation.name = f"{environ.get('TORCHELASTIC_RUN_ID', '')}-{restarts}"
        self._generation.is_restart = restarts > 0
        self._known = False  # to the SDK
        self._memory = BoardMemory([self.rank])  # read by this process alone
        board = Board(self.rank, self._memory.path, self._memory.slots)
        self.session = MindioSession(board, self._connect, self._wait_for_the_sdk)

    def hear_signals(self) -> None:
        """Do nothing: the SDK ignores SIGTERM, so the job does not end before its save."""

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the job in one line, printed by the first rank that refuses."""
        if self._is_first_to_refuse():
            output.tell(f"ttprun: error: {reason}")
        output.leave(REFUSED)

    def _is_first_to_refuse(self) -> bool:
        from torch.distributed import DistError

        try:
            return bool(store_of_the_job(_MEETING_S).add(f"ttp/refused/{self._restarts}", 1) == 1)
        except DistError:  # without an answer the rank prints the line
            return True

    def not_protected(self, reason: str) -> None:
        """Report that no state of the script's training can be saved; training continues."""
        if self.rank == 0:
            output.tell(f"[ttp] NOT PROTECTED: {reason}")

    def raised(self, error: str, exit_code: int, by: BaseException | None = None) -> None:
        """Report an exception that left the script: the SDK lets others save, and this process waits."""
        self.session.window.give_up()
        if not self._known:
            output.leave(exit_code)
        try:
            self.session.window.sdk.tft_report_error(self.session.window.sdk.ReportState.RS_UNKNOWN.value)
        except Exception as gone:  # the SDK's errors have no type of their own
            output.tell(f"[ttp] rank {self.rank}: its failure cannot be reported to mindio_ttp: {gone}")
            output.leave(exit_code)
        threading.Event().wait(_ENDS_AFTER_S)
        output.leave(exit_code)

    def hold_after(self, error: BaseException) -> None:
        """Keep the process, whose state may be saved.

        An exception because another rank is gone is no fault of this rank, but would count as one for the
        SDK; so it is not reported, and the SDK notices the other rank.
        """
        message = summarize(error)
        if self._known and any(phrase in str(error) for phrase in _GONE):
            self.session.window.give_up()
            self._wait_for_the_sdk(message)
        output.tell(text.trace(error))
        self.raised(message, _EXIT_FAILED)

    def finish(self) -> None:
        """End the session after the script."""
        context.part(UnprotectedTraining).end_of_script()
        for hook in hooks.of_worker():
            hook.close()
        if not self._known:
            return
        if self.rank == 0:
            self.session.window.sdk.tft_destroy_controller()
        self.session.window.sdk.tft_destroy_processor()

    def _wait_for_the_sdk(self, message: str) -> NoReturn:
        """Wait until the SDK ends this process after the save; report the failure after a time-out."""
        output.tell(f"[ttp] rank {self.rank}, waiting for mindio_ttp: {message}")
        threading.Event().wait(self._settings.timeout_s)
        self.raised(message, _EXIT_FAILED)
        raise AssertionError("the process has ended")

    def _connect(self, trainee: Trainee, origin: int) -> None:
        """Start the controller on rank 0, then a processor on every rank, and register the copies."""
        import torch.distributed as dist

        from adaptor.replica import group
        from adaptor.replica.group import gather_values

        if os.environ.get("TTP_STOP_CLEAN_BEFORE_DUMP", "0") != "0":
            raise ConfigError(
                f"TTP_STOP_CLEAN_BEFORE_DUMP is {os.environ['TTP_STOP_CLEAN_BEFORE_DUMP']!r}: with "
                "TTP_ENGINE=mindio it must be 0, the device is not stopped before a dump"
            )
        everyone = group.of_everyone()
        loaded = self.session.window.sdk = load()
        gathered = gather_values((trainee.shares, uuid.uuid4().hex), everyone)
        shares = [rank_shares for rank_shares, _ in gathered]
        info = replica_info(self.rank, shares)
        generation = self._generation.name = gathered[0][1]
        controller_address = (_address(os.environ["MASTER_ADDR"]), self._settings.port)
        if self.rank == 0:
            loaded.tft_init_controller(self.rank, self._world_size, trainee.has_local_copy)
            loaded.tft_start_controller(*controller_address, False, "")
        dist.barrier(group=everyone)
        repairs = {"enable_uce": False, "enable_arf": False, "enable_zit": False}
        loaded.tft_init_processor(self.rank, self._world_size, trainee.has_local_copy, False, "", **repairs)
        groups = frozenset(share.group for rank_shares in shares for share in rank_shares)
        saving = SaveHandlers(
            self.rank, self._world_size, self.session, groups, generation, self._settings.timeout_s
        )
        loaded.tft_register_save_ckpt_handler(saving.save)
        loaded.tft_register_rename_handler(saving.rename)
        loaded.tft_start_processor(*controller_address)
        loaded.tft_set_optimizer_replica(self.rank, info)
        dist.barrier(group=everyone)  # the SDK chooses among those that it knows
        self._known = True


def _address(host: str) -> str:
    """Resolve `host`: the SDK takes numeric addresses only."""
    return socket.gethostbyname(host)


class SdkWindow(UpdateWindow):
    """The update window that is reported to the SDK, which stops ranks that may not begin an update.

    Attributes:
        sdk: the SDK's module, once training begins.
    """

    def __init__(self, board: Board, broke: Callable[[str], NoReturn]) -> None:
        super().__init__(board, broke)
        self.sdk: Any = None

    def close(self, step: int) -> None:
        self._board.finish(step)
        self.sdk.tft_end_updating_os(step)

    def _enter(self, trainee: Trainee, step: int) -> None:
        trainee.exchange()
        self._take_snapshot(trainee, step, updated=True)
        self._board.ready(step)
        if trainee.has_local_copy:
            self.sdk.tft_start_copy_os()
            self._copy_state(trainee)
        else:
            self._wait_at_the_barrier(trainee)
        self._board.updating(copied=trainee.has_local_copy)
        self.sdk.tft_start_updating_os(step - 1 if trainee.has_local_copy else -1)


class MindioSession(Session):
    """The `Session` in which the SDK replaces the door.

    Attributes:
        connect: loads the SDK, and registers this rank and its shards, on all ranks at the same time
        broke: called after the barrier broke, with the state of the step before; does not return
    """

    window: SdkWindow

    def __init__(
        self, board: Board, connect: Callable[[Trainee, int], None], broke: Callable[[str], NoReturn]
    ) -> None:
        super().__init__(board, connect, broke, hooks=hooks.of_worker(), window=SdkWindow(board, broke))

    def begin_training(self, trainee: Trainee, inner_optimizers: Iterable[object], origin: int) -> None:
        super().begin_training(trainee, inner_optimizers, origin)
        if origin:  # the SDK knows a step by the update that has made it
            self._tell_of_a_window(origin, finished_before=origin)

    def end_update(
        self, updated: bool, grad_norm: float | None, inner_optimizers: Iterable[object] = ()
    ) -> None:
        finished_before = self.board.finished
        super().end_update(updated, grad_norm, inner_optimizers)
        if not updated and self.board.finished > finished_before:
            self._tell_of_a_window(self.board.finished, finished_before=finished_before)

    def _tell_of_a_window(self, step: int, finished_before: int) -> None:
        """Report an update window without changes: the state is also the state of step `finished_before`."""
        assert self.trainee is not None
        self.window.sdk.tft_start_updating_os(finished_before if self.trainee.has_local_copy else -1)
        self.window.sdk.tft_end_updating_os(step)

    # the SDK's thread

    def is_in_the_copy(self, step: int) -> bool:
        """Return whether the state of `step`, which the SDK asks for, is in the local copy and not live."""
        return self.trainee is not None and self.trainee.has_local_copy and self.from_local_copy(step)

    def wait_for_the_device(self, timeout_s: float) -> None:
        """Wait until the main thread's started updates have ended on the device. Raises TimeoutError."""
        device = HOST if self.trainee is None else self.trainee.device
        if not self.window.wait_for_device(device, time.monotonic() + timeout_s):
            raise TimeoutError(f"the device was not done with an update after {timeout_s:g} s")


class _Left(msgspec.Struct):
    """The report of the writer of a group for the rank that publishes."""

    files: tuple[FileEntry, ...]
    holders: tuple[int, ...]
    writer: int


@dataclass(frozen=True)
class SaveHandlers:
    """The save handlers of a worker, once training has begun.

    The rank that publishes knows the files from reports that their writers leave in the same folder; the
    reports are removed when the checkpoint is published. The SDK knows lists of ranks: the ranks of
    `rank_list` are cut into `replica_cnt` runs of the same length, and the i-th ranks of all runs hold the
    same shard. A rank has one place in such a list (two with experts), so it can hold only one shard of an
    optimizer.

    Attributes:
        groups: all groups of the job, by name
        generation: of the workers, the same on every rank and never repeated
        timeout_s: for waiting for other ranks
    """

    rank: int
    world_size: int
    session: MindioSession
    groups: frozenset[str]
    generation: str
    timeout_s: float

    def save(self, step: int, infos: Sequence[dict[str, Any]], args: Any, ctx: Any) -> None:
        """Write this rank's part of `step`, in a thread of the SDK, for which an exception is a failure."""
        trainee = self.session.trainee
        assert trainee is not None
        self.session.wait_for_the_device(self.timeout_s)
        (share,) = trainee.shares
        order = _order_of(share.group, infos)
        folder = Path(trainee.save_folder) / naming.temporary_name(step, generation=self.generation)
        folder.parent.mkdir(parents=True, exist_ok=True)
        disk.ensure_private(folder)
        run = DumpRun(
            rank=self.rank,
            folder=str(folder),
            attempt=1,
            connect=lambda ranks: self._connect(f"{step}/{order.group}", ranks),
            progress=self.session.board.advance,
            cancelled=lambda: False,
            past=self.session.is_in_the_copy(step),
            remark=lambda subject: self._remark(f"{order.group} of step {step}", subject),
            groups=(order,),
        )
        files = trainee.dump(self.session.record_of(step), order, run)
        if order.writer == self.rank:
            left_files = msgspec.json.encode(_Left(files, order.holders, order.writer))
            disk.write(folder, f"{order.group}{_LEFT}", left_files)

    def _remark(self, of: str, subject: str) -> None:
        if subject:
            output.tell(f"[ttp] {of}: {subject}", to="stdout")

    def rename(self, step: int, args: Any) -> None:
        """Publish the checkpoint; called on one rank, after all ranks have saved.

        Raises:
            CheckpointError: a group has not been written, or the checkpoint cannot be published.
        """
        trainee = self.session.trainee
        assert trainee is not None
        root = Path(trainee.save_folder)
        folder = root / naming.temporary_name(step, generation=self.generation)
        left_by_group = {
            path.name.removesuffix(_LEFT): msgspec.json.decode(disk.read(path, manifest.LARGEST), type=_Left)
            for path in folder.glob(f"*{_LEFT}")
        }
        missing = sorted(self.groups - left_by_group.keys())
        if missing:
            raise CheckpointError(f"{folder}: nobody has written {', '.join(missing)}")
        files = [entry for group in sorted(left_by_group) for entry in left_by_group[group].files]
        groups = {
            name: {"writer": left_file.writer, "holders": left_file.holders}
            for name, left_file in left_by_group.items()
        }
        publish.publish(root, step, files, groups, self.world_size, self.generation)
        output.tell(f"[ttp] step {step} is saved, as mindio_ttp has ordered", to="stdout")

    def _connect(self, name: str, ranks: tuple[int, ...]) -> Any:
        """Make a gloo group of `ranks` that is independent of the framework's groups."""
        from torch.distributed import PrefixStore, ProcessGroupGloo

        store = PrefixStore(f"ttp/{self.generation}/{name}", store_of_the_job(self.timeout_s))
        timeout = timedelta(seconds=self.timeout_s)
        return ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timeout)


def store_of_the_job(timeout_s: float) -> Any:
    """Connect to the store of the workers' rendezvous, which lives in an agent."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def replica_info(rank: int, shares_by_rank: Sequence[Sequence[Share]]) -> list[dict[str, Any]]:
    """Return the argument of `rank` for tft_set_optimizer_replica.

    Args:
        shares_by_rank: per rank of the job its shares.

    Raises:
        UnsupportedError: the SDK has no terms for the shares.
    """
    for holder_rank, shares in enumerate(shares_by_rank):
        if len(shares) != 1:
            raise UnsupportedError(
                f"TTP_ENGINE is 'mindio', but rank {holder_rank} holds {len(shares)} shards: mindio_ttp "
                "knows of one "
                "per rank; use TTP_REPLICA=split, and no experts, or leave TTP_ENGINE out"
            )
    (own_share,) = shares_by_rank[rank]
    holders = [
        [
            holder_rank
            for holder_rank, (share,) in enumerate(shares_by_rank)
            if (share.group, share.index) == (own_share.group, index)
        ]
        for index in range(own_share.count)
    ]
    count = len(holders[0])
    if not all(len(ranks) == count for ranks in holders):
        sizes = ", ".join(str(len(ranks)) for ranks in holders)
        raise UnsupportedError(
            f"TTP_ENGINE is 'mindio', but the shards of {own_share.group} have {sizes} holders: mindio_ttp "
            "needs "
            "as many for each"
        )
    ranks = [ranks[copy] for copy in range(count) for ranks in holders]
    return [{"rank_list": ranks, "replica_cnt": count, "replica_shift": own_share.count}]


def _order_of(group: str, infos: Sequence[dict[str, Any]]) -> GroupOrder:
    """Return the order for a rank of `group` from a save handler's arguments: the i-th rank gives shard i."""
    (info,) = infos
    ranks = tuple(info["ranks"])
    return GroupOrder(group, ranks, ranks[0])

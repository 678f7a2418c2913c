"""The runtime of a worker that the SDK drives: its session, and the reports of failures to the SDK."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Mapping
from typing import NoReturn

from adaptor import context, hooks, output, text
from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.mindio.client import engine
from adaptor.mindio.client.sdk_session import MindioSession, SaveHandlers, replica_info, store_of_the_job
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.environment import Generation
from adaptor.protocol.state_provider import Trainee
from adaptor.worker.runtime import summarize
from adaptor.worker.unprotected import UnprotectedTraining

# The SDK ends a process itself, ten seconds after its save.
_ENDS_AFTER_S = 30.0
# For the store of the job's agent, which exists before its workers.
_MEETING_S = 10.0
_EXIT_FAILED = 1
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
        output.leave(engine.REFUSED)

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
        loaded = self.session.window.sdk = engine.load()
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

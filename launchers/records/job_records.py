"""Writes what operators read of a job, on the node with the controller, and serves it from there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from adaptor.config import Config
from adaptor.controller.controller import Controller
from adaptor.controller.membership import Membership
from adaptor.controller.plan import groups_of
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records import notifier
from adaptor.launchers.records.incident_report import IncidentReport
from adaptor.launchers.records.job_files import JobFiles
from adaptor.launchers.records.job_server import JobServer
from adaptor.launchers.records.log import tell_error
from adaptor.launchers.records.time_uses import StepTimer, TimeUses
from adaptor.operations.records import Status, utc
from adaptor.protocol.messages import BoardRecord, Share


class JobRecords:
    """The records of a job, on one node.

    They are for people: an error in writing them is told, and ends nothing.

    Args:
        config: the settings.
        job: the id that the user gave to the job; '' where there is none.
        max_restarts: how many restarts the job may make.
        workers: of this node.
        newest_copy: returns the newest step that is sure in host memory; None: there is none.

    Attributes:
        files: those of the job.
        report: of its incidents.
        server: serves the files (TTP_SERVE).
    """

    def __init__(
        self,
        config: Config,
        job: str,
        max_restarts: int,
        workers: Workers,
        newest_copy: Callable[[], int | None],
    ) -> None:
        self._workers = workers
        self.files = JobFiles(config.log_path, job)
        self.report = IncidentReport(self.files, notifier.of_job(config))
        self.server = JobServer(config, lambda: self.files.folder)
        self._status = JobStatus(self.files, self.report, max_restarts, newest_copy)

    def name_script(self, script: str) -> None:
        """Name the script of the job in the status from now on."""
        self._status.script = script

    def begin(self, generation: int) -> None:
        """A generation of workers begins, of this number."""
        self.report.begin(generation)
        self._status.begin()

    def look(
        self,
        boards: Sequence[BoardRecord],
        host: ControllerHost,
        node: int,
        generation: int,
        spare_nodes: int,
    ) -> None:
        """Take a reading of the boards of this node, on which the controller is; never raise.

        Args:
            boards: of the ranks of this node.
            host: of the controller.
            node: this one.
            generation: of workers, from 1 on.
            spare_nodes: how many wait here.
        """
        try:
            if node:
                self.server.take_over()
            self._look_at_uses()
            self._status.look(boards, host.controller, node, host.nodes, generation, spare_nodes)
            self.report.record_progress(max((board.finished for board in boards), default=-1))
        except Exception as error:
            tell_error("the status of the job is not written", error)

    def look_at_last_moments(self, host: ControllerHost | None) -> None:
        """Read the last step of the workers, and the save behind it, before their boards go; never raise.

        Args:
            host: of the controller; None: it is on another node.
        """
        if host is None:
            return
        try:
            self._look_at_uses()
            newest = self._workers.newest_step()
            self._status.note_last_step(newest)
            self.report.record_progress(newest)
        except Exception as error:
            tell_error("the status of the job does not have the last step", error)

    def _look_at_uses(self) -> None:
        reading = self._workers.spent()
        if reading is not None:
            self._status.look_at_uses(reading)

    def close(self) -> None:
        """Write the last status, and close all."""
        self._status.end()
        self.report.close()
        self.server.close()


# How often the file is replaced.
STATUS_S = 1.0

State = Literal["starting", "training", "incident", "restarting"]


class JobStatus:
    """Writes the status of a job while the controller is on this node.

    Each second it reads counts only, never each rank: it runs on the thread that decides.

    Args:
        files: the files of the job.
        report: of the same job.
        max_restarts: how many restarts the job may make.
        newest_copy: returns the newest step that is sure in host memory; None: there is none.
    """

    def __init__(
        self,
        files: JobFiles,
        report: IncidentReport,
        max_restarts: int,
        newest_copy: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._files = files
        self._report = report
        self._max_restarts = max_restarts
        self._newest_copy = newest_copy
        self._copy: tuple[int | None, float] = (None, 0.0)  # the step, and when it was first seen
        self._host = socket.gethostname()
        self._last: Status | None = None
        self._written = 0.0  # when it was written last, on the monotonic clock
        self._step = -1
        self._step_time = 0.0
        self._timer = StepTimer()
        self._uses = TimeUses()
        self._save = ""  # the save folder; ranks that are started again say it when they begin to train
        self.script = ""
        self._holders: tuple[object, int | None] = (None, None)  # of which members, and how many
        self._trains = 0  # the newest generation whose ranks were all seen to train

    def begin(self) -> None:
        """A generation of workers begins."""
        self._uses.begin()

    def look_at_uses(self, reading: Sequence[float]) -> None:
        """Take a reading of what the first worker of this node spends its time on (`Board.spend`)."""
        self._uses.look(reading)

    def look(
        self,
        boards: Sequence[BoardRecord],
        controller: Controller,
        node: int,
        nodes: int,
        generation: int,
        spare_nodes: int,
    ) -> None:
        """Take a reading of the boards of this node; write the status if a second is over.

        Args:
            boards: of the ranks of this node.
            controller: which decides for the job.
            node: this one.
            nodes: how many there are.
            generation: of workers, from 1 on.
            spare_nodes: how many wait here.
        """
        time_now = time.time()
        step = max((board.finished for board in boards), default=-1)
        if step != self._step and step >= 0:
            self._step, self._step_time = step, time_now
        members, state = controller.membership, _state_of(controller)
        training = len(members.layouts)
        self._timer.look(step, time.monotonic(), counts=state == "training")
        if training == members.world_size and generation > self._trains:
            self._trains = generation
            self._report.record_training(load_s=self._uses.load)
        words = self._report.open_words
        is_known = self._last is not None and (self._last.state, self._last.open_incident) == (state, words)
        if is_known and time.monotonic() - self._written < STATUS_S:
            return
        self._written = time.monotonic()
        self._save = members.save or self._save
        why_not = next(iter(members.unprotected.values()), "")
        copied = self._newest_copy()
        if copied != self._copy[0]:
            self._copy = (copied, time_now)
        self._last = Status(
            time=utc(time_now),
            job=self._files.job,
            state=state,
            generation=generation,
            node=node,
            host=self._host,
            pid=os.getpid(),
            term=controller.term,
            restarts=generation - 1,
            max_restarts=self._max_restarts,
            nodes=nodes,
            nodes_lost=len(members.lost),
            ranks=members.world_size,
            ranks_training=training,
            ranks_ended=len(members.dead),
            step=self._step if self._step >= 0 else None,
            step_time=utc(self._step_time) if self._step >= 0 else None,
            protected=False if why_not else True if training == members.world_size else None,
            why_not=why_not,
            incidents=self._report.incidents,
            last_incident=self._report.last_id,
            open_incident=words,
            save=self._save,
            script=self.script,
            lost_nodes=sorted(members.lost),
            shard_holders=self._count_holders(members, generation) if state == "training" else None,
            step_times=self._timer.times(),
            spare_nodes=spare_nodes,
            spent=self._uses.totals(),
            host_copy_step=copied,
            host_copy_time=None if copied is None else utc(self._copy[1]),
            failed_saves=self._report.failed_saves,
            failed_save=self._report.failed_save,
        )
        self._files.write_status(self._last)

    def _count_holders(self, members: Membership, generation: int) -> int | None:
        """Return the holders of the shard that has the fewest; None where that is not known yet.

        With many ranks it takes long: the writer's thread counts, once for each generation and incident.
        """
        key = (generation, self._report.incidents)
        counted, holders = self._holders
        if counted != key:
            self._holders = (key, None)
            shares = {rank: layout.shares for rank, layout in members.layouts.items()}
            self._files.calculate(partial(self._keep_holders, key, shares))
            return None
        return holders

    def _keep_holders(self, key: object, shares: Mapping[int, tuple[Share, ...]]) -> None:
        self._holders = (key, _fewest_holders(shares))

    def note_last_step(self, step: int) -> None:
        """Note the newest step that is finished when the workers have ended; -1: none is known."""
        if step > self._step:
            self._step, self._step_time = step, time.time()

    def end(self) -> None:
        """Write that ttprun ends, if this node has written the status."""
        if self._last is not None:
            utc_now = utc(time.time())
            self._files.write_status(
                msgspec.structs.replace(
                    self._last,
                    time=utc_now,
                    state="ended",
                    open_incident="",
                    step=self._step if self._step >= 0 else None,
                    step_time=utc(self._step_time) if self._step >= 0 else None,
                    incidents=self._report.incidents,
                    last_incident=self._report.last_id,
                    spent=self._uses.totals(),
                ),
                always=True,
            )


def _state_of(controller: Controller) -> State:
    if controller.verdict is not None:
        return "restarting"
    if controller.incident is not None:
        return "incident"
    members = controller.membership
    return "training" if len(members.layouts) == members.world_size else "starting"


def _fewest_holders(shares: Mapping[int, tuple[Share, ...]]) -> int | None:
    """Return how many ranks hold that shard which the fewest hold; None where there is none."""
    groups = groups_of(shares).values()
    return min((len(ranks) for group in groups for ranks in group.owners.values()), default=None)

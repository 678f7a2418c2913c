"""Writes what operators read of a job, on the node with the controller, and serves it from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaptor.config import Config
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records import notifier
from adaptor.launchers.records.incident_report import IncidentReport
from adaptor.launchers.records.job_files import JobFiles
from adaptor.launchers.records.job_server import JobServer
from adaptor.launchers.records.job_status import JobStatus
from adaptor.launchers.records.log import tell_error
from adaptor.protocol.messages import BoardRecord


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

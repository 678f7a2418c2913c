"""The hooks of the part for operators: a process that serves the files of a job, and notices of incidents."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from adaptor import text
from adaptor.config import Config
from adaptor.errors import AdaptorError, ConfigError
from adaptor.hooks import AgentHooks
from adaptor.launchers.operations import job_server
from adaptor.launchers.operations.job_server import JobServer
from adaptor.launchers.operations.notifier import Notifier, secret, targets
from adaptor.operations.settings import OperationsSettings
from adaptor.protocol.records import Notice


class OperationsHooks(AgentHooks):
    """TTP_SERVE and TTP_NOTIFY."""

    def __init__(self, settings: Config) -> None:
        super().__init__(settings)
        self._own = settings.of(OperationsSettings)
        self._server = JobServer(settings)
        self._notifier = Notifier()
        self._generations = 0

    def check(self, parsed: argparse.Namespace, engine: str) -> None:
        if not engine:
            job_server.require(self.settings)
            self._notifier = Notifier(targets(self._own), secret(self._own))

    def begins(self, node: int, nodes: int) -> None:
        self._generations += 1

    def has_controller(self, folder: Path, *, took_over: bool) -> None:
        """Serve the files of the job from this node; before the first workers a failure ends ttprun."""
        if took_over:
            self._server.take_over(folder)
            return
        try:
            self._server.start(folder)
        except (AdaptorError, OSError, RuntimeError) as error:
            if self._generations == 1:
                raise ConfigError(f"TTP_SERVE is {text.say(error)}") from None
            self._server.tell_why(error)

    def notify(self, make: Callable[[], Notice]) -> None:
        self._notifier.submit(make)

    def close(self) -> None:
        self._notifier.close()
        self._server.close()

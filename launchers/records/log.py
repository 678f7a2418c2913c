"""The log of the agent, with times in UTC: a file, made on demand; stdout, if requested."""

from __future__ import annotations

import logging
import logging.handlers
import os
import socket
import time
from functools import partial
from pathlib import Path

from adaptor import output, text
from adaptor.config import Config

_log = logging.getLogger("adaptor")


def tell_error(subject: str, error: BaseException) -> None:
    """Print an internal error of ttprun with its traceback, and log it.

    The traceback reads source files, and their disk may hang: call this after the decision.

    Args:
        subject: the beginning of the line.
    """
    page = f"{subject}: {text.trace(error)}"
    output.tell(f"[ttp] {page}")
    _log.error("%s", page)


class Log:
    """The handler of the logger `adaptor`, until it is closed.

    A separate thread writes the log file: its folder may be removed during training, its disk may hang.
    """

    def __init__(self, config: Config) -> None:
        name = f"ttp-agent-{socket.gethostname()}-{os.getpid()}.log"
        self._logger = _log
        self._logger.setLevel(config.log_level)
        self._logger.propagate = False
        self._file = _QueuedFile(Path(config.log_path) / name)
        self._handlers: list[logging.Handler] = [self._file]
        if config.log_stdout:
            self._handlers.append(_Stdout())
        for handler in self._handlers:
            handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
            self._logger.addHandler(handler)

    def close(self) -> None:
        """Write the remaining records, for a bounded time."""
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()
        self._logger.propagate = True


class _Formatter(logging.Formatter):
    """Writes times as 2026-01-31T12:00:00.000Z."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class _Quiet(logging.Handler):
    """A handler that drops records it cannot format: logging itself would print, and might block."""

    def handleError(self, record: logging.LogRecord) -> None:
        return


class _Stdout(_Quiet):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            output.tell(self.format(record), to="stdout")
        except Exception:
            self.handleError(record)


class _WatchedFile(_Quiet, logging.handlers.WatchedFileHandler):
    """A file that is opened again after it was moved or removed."""


class _QueuedFile(_Quiet):
    """Queues records for a `Writer`, whose thread opens and writes the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._writer = output.Writer("ttp-log")
        self._writer.start()
        self._file: _WatchedFile | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = logging.makeLogRecord({"msg": self.format(record)})
        except Exception:
            self.handleError(record)
            return
        self._writer.submit(partial(self._write, line))

    def _write(self, line: logging.LogRecord) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # the folder may have been removed
        if self._file is None:
            self._file = _WatchedFile(self._path, encoding="utf-8", errors="backslashreplace")
        self._file.emit(line)

    def close(self) -> None:
        self._writer.submit(self._close_file)
        self._writer.close()
        super().close()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

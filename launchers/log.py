"""The agent's log: a file that is made when there is something to say, and stdout if asked for."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

from adaptor.config import Config


class Log:
    """Where what is said to the logger `adaptor` goes, until it is closed."""

    def __init__(self, config: Config) -> None:
        name = f"ttp-agent-{socket.gethostname()}-{os.getpid()}.log"
        self._logger = logging.getLogger("adaptor")
        self._logger.setLevel(config.log_level)
        self._logger.propagate = False
        self._handlers: list[logging.Handler] = [
            logging.FileHandler(Path(config.log_path) / name, delay=True)
        ]
        if config.log_stdout:
            self._handlers.append(logging.StreamHandler(sys.stdout))
        for handler in self._handlers:
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            self._logger.addHandler(handler)

    def close(self) -> None:
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()

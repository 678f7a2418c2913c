"""The progress of the demo on the terminal: a line for each stage."""

from __future__ import annotations

import sys
import time
from typing import TextIO

SILENCE = 15.0  # seconds between two lines of one stage, without a terminal


class DemoError(Exception):
    """The demo cannot continue; the message is a line with the log to read."""


class Progress:
    """Prints `[2/7] title: detail`; on a terminal the line of the current stage is rewritten."""

    def __init__(self, stages: int, out: TextIO = sys.stdout) -> None:
        self._stages = stages
        self._out = out
        self._live = out.isatty()
        self._stage = 0
        self._title = ""
        self._began = 0.0
        self._shown = 0  # characters of the live line
        self._printed_at = 0.0

    def begin(self, title: str) -> None:
        self._stage += 1
        self._title = title
        self._began = time.monotonic()
        self._shown = 0
        self._printed_at = -SILENCE
        self.update("...")

    def update(self, detail: str) -> None:
        """Replace the detail of the current line; without a terminal, print it only after a silence."""
        time_now = time.monotonic()
        if self._live:
            self._overwrite(self._line(detail, time_now - self._began))
        elif time_now - self._printed_at >= SILENCE:
            self._printed_at = time_now
            print(self._line(detail, time_now - self._began), file=self._out, flush=True)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._live:
            self._overwrite("")
            print("\r", end="", file=self._out)
        print(f"      {text}", file=self._out, flush=True)

    def done(self, detail: str) -> None:
        line = self._line(detail, time.monotonic() - self._began)
        if self._live:
            self._overwrite(line)
            print(file=self._out, flush=True)
        else:
            print(line, file=self._out, flush=True)

    def _line(self, detail: str, seconds: float) -> str:
        return f"[{self._stage}/{self._stages}] {self._title}: {detail}  ({seconds:.0f} s)"

    def _overwrite(self, line: str) -> None:
        print("\r" + line.ljust(self._shown), end="", file=self._out, flush=True)
        self._shown = len(line)

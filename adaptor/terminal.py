"""Prints the answers of `ttp`, with colours on a terminal if rich is installed; hears Ctrl-C reliably."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from adaptor import text

# The exit codes of commands: success; a finding; bad usage, or nothing to read.
OK, FINDING, USAGE = 0, 1, 2
Answer = Callable[[argparse.Namespace], int]
# Adds a command to `ttp`: its name, the function that answers, and its help text.
Add = Callable[[str, Answer, str], argparse.ArgumentParser]

_CLEAR = "\x1b[H\x1b[2J"
_CLOSED = 141  # as of a program that SIGPIPE has ended

# Styles of words of answers; a later style wins.
_STYLES = (
    (r"^(job|at|step|protection|ranks|restarts|incidents|controller|save folder|host) {2,}", "bold"),
    (r"^(OK|protection +protected)\b", "green"),
    (r"\b(intact|recovered|saved)\b", "green"),
    (r"^WARN\b.*|\bsizes are right\b", "yellow"),
    (r"^(FAIL|REFUSED)\b.*|\b(damaged|unreadable|changed|missing|lost)\b", "red"),
    (r"\b(NOT PROTECTED|silent for|not protected)\b.*", "bold red"),
    (r"^(goodput|verdict)\b.*", "bold"),
)


def show(lines: Iterable[str], *, is_repeated: bool = False) -> None:
    """Print lines to stdout, at once."""
    lines = list(lines)
    if is_repeated and sys.stdout.isatty():
        print(_CLEAR, end="")
    if not (sys.stdout.isatty() and _in_colour(lines)):
        print("\n".join(lines), flush=True)


def exit_code_of(answer: Callable[[], int | None], program: str) -> int:
    """Return the result of `answer`, after all its output is written.

    If the reader of the output has gone, as behind `| head`, the command ends silently; for a full disk it
    prints one line.

    Args:
        answer: prints to stdout.
        program: the name in the line.
    """
    try:
        code = answer() or 0
        sys.stdout.flush()
        return code
    except OSError as error:
        # Python flushes stdout again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _CLOSED
        print(f"{program}: error: {text.encodable(text.say(error))}", file=sys.stderr)
        return USAGE


def _in_colour(lines: Iterable[str]) -> bool:
    """Print lines by rich; return False if rich is not installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        colored_text = Text(line)
        for pattern, style in _STYLES:
            colored_text.highlight_regex(pattern, style)
        console.print(colored_text)
    return True


class CtrlC:
    """Makes Ctrl-C end a command that runs until Ctrl-C, such as `ttp serve`; a context.

    Python raises KeyboardInterrupt wherever the main thread is. In a destructor or a callback the exception
    is dropped, and during the release of a lock (`threading.Condition`) another error takes its place: the
    command would go on. Invariant: a lost Ctrl-C is raised again in the command's next round. If Ctrl-C is
    ignored, as in the background of a shell, the context changes nothing.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._is_heard = False

    def raise_again(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C has come; call in each round of the command."""
        if self._has_come:
            raise KeyboardInterrupt

    def __enter__(self) -> CtrlC:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hear)
            self._is_heard = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        raise KeyboardInterrupt

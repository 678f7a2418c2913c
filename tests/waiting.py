"""Waits for other processes: for their files and their end; the only place of the tests that polls.

A test waits for an event itself where there is one. The kernel wakes `written` (inotify) when a folder
changes, and `ended` (pidfd) when a process ends. `until` polls; use it only for states that neither the
kernel nor the product reports:

- the state of a process that is no child of the test (/proc/PID): stopped, its name, threads, files;
- ports, shared memory and control groups, which the kernel frees a moment after a process ends;
- the state of a product's thread in the test's own process, if the product itself never waits for it.
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# Seconds after which a wait has failed: far longer than any wait on a busy machine.
LONG_S = 60.0
PAUSE_S = 0.005
# linux/inotify.h: a file was written to or closed after that, moved in or out, made, removed.
_MODIFY, _CLOSE_WRITE, _MOVED, _CREATE, _DELETE = 0x2, 0x8, 0xC0, 0x100, 0x200
_CHANGES = _MODIFY | _CLOSE_WRITE | _MOVED | _CREATE | _DELETE
_libc = ctypes.CDLL(None, use_errno=True)


def captured(
    command: str | Sequence[str | Path], *, code: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its output as text; `code`: the expected exit code, None: any."""
    completed = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert code in (None, completed.returncode), f"{completed.returncode}: {completed.stderr}"
    return completed


def until(
    condition: Callable[[], Any], description: str, *, pause_s: float = PAUSE_S, within_s: float = LONG_S
) -> None:
    """Poll `done` until it is true; only for events that nobody reports (see above).

    The pause grows to a twentieth of the time waited so far: a long wait takes little CPU time from the
    awaited processes.

    Args:
        done: cheap and without side effects.
        what: the awaited condition, for the message.
        pause_s: seconds between two calls, at least.
        within_s: seconds until the wait fails.

    Raises:
        AssertionError: the condition was not true in time.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < within_s, f"not so after {within_s:g} s: {description}"
        time.sleep(max(pause_s, waited / 20))


def written(
    folder: Path, condition: Callable[[], Any], description: str, *, within_s: float = LONG_S
) -> None:
    """Wait until `done()` is true; it is called after each change of `folder` and its subfolders.

    Args:
        folder: an existing folder; linked folders are not watched.
        done: reads files of the folder.
        what: the awaited condition, for the message.
        within_s: seconds until the wait fails.

    Raises:
        AssertionError: the condition was not true in time.
        OSError: the folder cannot be watched.
    """
    deadline = time.monotonic() + within_s
    watch = _call(_libc.inotify_init1, os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        ready = select.poll()
        ready.register(watch, select.POLLIN)
        while True:
            _add(watch, folder)  # before the question: nothing that happens after it is missed
            if condition():
                return
            remaining_s = deadline - time.monotonic()
            assert remaining_s > 0, f"not so after {within_s:g} s: {description}"
            if ready.poll(remaining_s * 1000):
                os.read(watch, 1 << 16)
    finally:
        os.close(watch)


def exist(*files: Path) -> None:
    """Wait until the files, all of one folder, exist.

    Raises:
        AssertionError: the files did not exist within `LONG_S`.
    """
    (folder,) = {file.parent for file in files}
    names = ", ".join(file.name for file in files)
    written(folder, lambda: all(file.exists() for file in files), f"{names} in {folder}")


def ended(pids: Iterable[int]) -> None:
    """Wait until the processes have ended, even if their parents have not read their status.

    Raises:
        AssertionError: a process runs after `LONG_S`.
    """
    deadline = time.monotonic() + LONG_S
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready = select.poll()
            ready.register(process, select.POLLIN)
            remaining_s = max(0.0, deadline - time.monotonic())
            assert ready.poll(remaining_s * 1000), f"process {pid} runs after {LONG_S:g} s"
        finally:
            os.close(process)


def _add(watch: int, folder: Path) -> None:
    """Watch a folder and all of its subfolders; a folder can be added twice."""
    _call(_libc.inotify_add_watch, watch, os.fsencode(folder), _CHANGES)
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            try:
                _call(_libc.inotify_add_watch, watch, os.fsencode(Path(parent, name)), _CHANGES)
            except FileNotFoundError:  # it was removed meanwhile, of which its own folder tells
                continue


def _call(function: Any, *arguments: object) -> int:
    result = int(function(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), *(a for a in arguments if isinstance(a, bytes)))
    return result

"""Starts a launcher whose workers have torch imported when they are born: `warm.py ttprun|torchrun ...`.

Of the CPU time of a tiny job four fifths are the imports of torch in every worker. Here the launcher
imports, once, what every framework imports (not the framework, not the adaptor), and each worker is a fork of
a process that has done so, in place of a new interpreter. The launcher, its workers, and what they run are
the real ones; a worker is the launcher's own child, in a session of its own, with the environment that it
was given.

A fork is only safe of a process with one thread, so it is not the launcher that forks, but the *starter*: a
process that does nothing else. What it forks is handed to the launcher by the kernel, as an orphan to the
nearest ancestor that takes orphans.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What Megatron-LM imports of torch and of others in its first second.
PRELOADED = (
    "einops",
    "numpy",
    "psutil",
    "regex",
    "sentencepiece",
    "torch",
    "torch._dynamo",
    "torch.distributed._tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.utils.cpp_extension",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "yaml",
)
LAUNCHERS = {"ttprun": "adaptor.launchers.ttprun", "torchrun": "torch.distributed.run"}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class _Worker(subprocess.Popen):  # type: ignore[type-arg]
    """What torch takes for a new interpreter."""

    starter: socket.socket

    def _execute_child(self, args: Any, *rest: Any) -> None:
        environment = rest[5]  # executable, preexec_fn, close_fds, pass_fds, cwd, env
        assert args[:2] == (sys.executable, "-u"), args
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            _send(self.starter, [list(args[2:]), environment])
            self.pid = _receive(self.starter)
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True


def _send(connection: socket.socket, what: Any) -> None:
    words = json.dumps(what).encode()
    connection.sendall(len(words).to_bytes(4, "big") + words)


def _receive(connection: socket.socket) -> Any:
    """What comes next. Raises EOFError when the other side has gone."""
    with connection.makefile("rb", buffering=0) as stream:
        length = int.from_bytes(_exactly(stream, 4), "big")
        return json.loads(_exactly(stream, length))


def _exactly(stream: Any, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = stream.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


def _start_workers(connection: socket.socket) -> Callable[[], None]:
    """The starter's life. Returns in a worker: what it is to do."""
    launcher = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(0)
    os.setsid()  # Ctrl-C is not for it
    while True:
        try:
            words, environment = _receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        told, tell = os.pipe()
        wait, go = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                connection.close()
                os.close(go)
                os.write(tell, str(os.getpid()).encode())
                os.read(wait, 1)  # its end: now the launcher is the parent
                for end in (told, tell, wait):
                    os.close(end)
                os.setsid()
                os.environ.clear()
                os.environ.update(environment)
                return lambda: _run(words)
            os._exit(0)
        os.waitpid(middle, 0)
        _send(connection, int(os.read(told, 32)))
        for end in (told, tell, wait, go):
            os.close(end)


def _run(words: list[str]) -> None:
    """As `python` with these words would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _launch(name: str, starter: socket.socket) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    _Worker.starter = starter
    subprocess_handler.Popen = _Worker  # type: ignore[misc]
    sys.path[0] = str(Path(sys.executable).parent)
    sys.argv = [str(Path(sys.executable).with_name(name)), *sys.argv[2:]]
    sys.exit(importlib.import_module(LAUNCHERS[name]).main())


def main() -> Callable[[], None]:
    for module in PRELOADED:
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads after the imports: a fork is not safe"
    gc.freeze()  # a collection would write to, and so copy, every page that is shared
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        return _start_workers(theirs)
    theirs.close()
    return lambda: _launch(sys.argv[1], ours)


if __name__ == "__main__":
    # Nothing of this module is on the stack of what runs, besides this line.
    main()()

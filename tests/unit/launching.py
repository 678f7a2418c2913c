"""Starts ttprun in tests as forks of one process (the zygote) that has imported ttprun and torch."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adaptor import config, output
from tests import timing
from tests.faults.warm import Warm
from tests.ports import free_ports
from tests.unit.nodes import ROOT
from tests.waiting import captured

ONE = ["--standalone", "--monitor-interval", "0.05", "--nproc-per-node", "1"]
TWO = [*ONE[:-1], "2"]
# What a script sees, one JSON object for each rank.
LOOK = """
import json, os, sys
from pathlib import Path
seen = {
    "argv": sys.argv,
    "name": __name__,
    "file": globals().get("__file__"),
    "spec": getattr(__spec__, "name", None),
    "package": __package__,
    "loader": type(__loader__).__name__,
    "code": sys._getframe().f_code.co_filename,
    "path": sys.path[0],
    "paths": sys.path,
    "modules": [name for name in sys.modules if name.partition(".")[0] in ("adaptor", "torch", "wrapt")],
    "env": {name: value for name, value in os.environ.items() if "TTP" in name or name == "WORLD_SIZE"},
    "main": sys.modules["__main__"].__dict__ is globals(),
}
Path(os.environ["SEEN"] + os.environ["RANK"]).write_text(json.dumps(seen))
"""


@dataclass(frozen=True)
class Ended:
    code: int
    log: str

    @property
    def last_line(self) -> str:
        return self.log.strip().splitlines()[-1]


class Launcher:
    """Runs ttprun in a folder, with nothing of ours in its environment."""

    def __init__(self, zygote: subprocess.Popen[str] | None, folder: Path) -> None:
        self.folder = folder
        self._zygote = zygote
        self._log = folder / "log"
        prefixes = ("TTP", "TORCHELASTIC", "RANK", "WORLD_SIZE", "MASTER_")
        self._env = {k: v for k, v in os.environ.items() if not any(name in k for name in prefixes)}
        self._env.update(PYTHONPATH=str(ROOT), SEEN=str(folder / "seen"), OMP_NUM_THREADS="1")

    def _ask(self, **line: Any) -> int:
        assert self._zygote is not None
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(line) + "\n")
        self._zygote.stdin.flush()
        answer, *used = self._zygote.stdout.readline().split()
        for seconds in map(float, used):
            timing.charge(seconds)
            _charged.append(seconds)
        return int(answer)

    def start(self, *argv: str, prelude: str = "", **env: str) -> int:
        self._log.touch()  # who reads it may be faster than ttprun
        return self._ask(
            argv=argv, cwd=str(self.folder), env={**self._env, **env}, log=str(self._log), prelude=prelude
        )

    def wait(self, pid: int, code: int | None = None) -> Ended:
        """Wait until a ttprun has ended; return its result. `code`: the expected exit code; None: any."""
        result = Ended(self._ask(wait=pid), self.log)
        assert code in (None, result.code), f"{result.code}: {result.log}"
        return result

    def run(self, *argv: str, prelude: str = "", code: int | None = None, **env: str) -> Ended:
        return self.wait(self.start(*argv, prelude=prelude, **env), code)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def seen(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"seen{rank}").read_text())  # type: ignore[no-any-return]


_charged: list[float] = []  # CPU seconds of the zygote's forks


@functools.cache
def _started_zygote() -> subprocess.Popen[str]:
    """Return the zygote of this process, shared by all test files."""
    process = Warm(
        [sys.executable, str(Path(__file__).with_name("zygote.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    process = _started_zygote()
    yield process
    if process.poll() is None:
        process.communicate()
        timing.charge(-sum(_charged))  # with its end the kernel counts them, too


@pytest.fixture
def launcher(zygote: subprocess.Popen[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, tmp_path)


def says_all(path: Path) -> bool:
    return path.exists() and path.read_text().endswith(" ")


# A shell that has started the tests in the background may have had it ignored, for all that they start, too.
HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
# A call of `interrupt` is Ctrl-C in a destructor, whose KeyboardInterrupt Python drops.
DROPPED = """
class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def interrupt():
    Destroyed()
"""


def interrupted_in_import(program_of: str, module: str) -> str:
    """Return a program whose `main` gets Ctrl-C while it imports `module`."""
    return (
        "import _signal, sys\n"  # `signal` is one of those that may not be there yet
        # A shell may have had it ignored.
        "_signal.signal(_signal.SIGINT, _signal.default_int_handler)\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: _signal.raise_signal(_signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        f"from {program_of} import main\n"
        "sys.exit(main())\n"
    )


def run_here(
    folder: Path, *command: str, code: int | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    prefixes = ("TTP", "TORCHELASTIC", "PYTHONPATH")
    clean = {name: value for name, value in os.environ.items() if not any(word in name for word in prefixes)}
    env = {**clean, "OMP_NUM_THREADS": "1", "SEEN": str(folder / "seen"), **env}
    return captured(command, code=code, cwd=folder, env=env)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the lines of the adaptor on stdout since the last call."""
    output.drain()
    return capsys.readouterr().out


WAIT = "import threading\nthreading.Event().wait(600)"


def starts(result: Ended) -> int:
    """Return how many times the script, which prints `start`, has run."""
    return result.log.splitlines().count("start")


def start_two(
    zygote: subprocess.Popen[str], folder: Path, text: str, host: int = 0, prelude: tuple[str, str] = ("", "")
) -> tuple[list[Launcher], list[int]]:
    """Start two agents with a worker each; the store is with agent `host`; each runs its `prelude` first."""
    port, store = free_ports(2)
    nodes, started = [], []
    for number in (0, 1):
        (folder / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, folder / f"node{number}"))
        rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store}")
        host_or_not = ("--rdzv-conf", f"is_host={number == host}")
        options = ("--max-restarts", "2", "--ttp-port", str(port), "--monitor-interval", "0.05")
        script = node.script(text)
        started.append(node.start(*rendezvous, *host_or_not, *options, script, prelude=prelude[number]))
    return nodes, started


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes of ttprun to the environment."""
    for setting in config.settings():
        monkeypatch.setenv(setting.variable, "")
        monkeypatch.delenv(setting.variable)

"""Output for people never waits, never raises and never changes the exit of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from adaptor import output, threads
from tests.unit.threads import LONG_S
from tests.waiting import captured

ROOT = Path(__file__).parents[2]


def run(program: str, stdout: int | None = None, stderr: int | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", program], stdout=stdout, stderr=stderr, env=environment)


def stderr_of(program: str) -> str:
    """Run a program that must succeed; return its stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return captured([sys.executable, "-c", program], code=0, env=environment, timeout=LONG_S).stderr


def test_lines_are_written_in_their_order_before_the_process_ends() -> None:
    program = "from adaptor.output import tell\nfor n in range(100): tell(f'{n} \\udce9', to='stdout')"
    with run(program, stdout=subprocess.PIPE) as process:
        printed, _ = process.communicate(timeout=LONG_S)
    assert printed.decode() == "".join(f"{n} \\udce9\n" for n in range(100))


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("state", ["closed pipe", "full disk", "not there"])
def test_a_stream_that_cannot_be_written_changes_nothing(stream: str, state: str) -> None:
    program = f"from adaptor.output import tell\ntell('x' * 100_000, to={stream!r})\nraise SystemExit(7)"
    if state == "not there":
        program = f"import os, sys\nsys.{stream} = None\nos.close({1 + (stream == 'stderr')})\n{program}"
    reader, writer = os.pipe()
    os.close(reader)
    place = os.open("/dev/full", os.O_WRONLY) if state == "full disk" else writer
    process = run(program, **{stream: place})  # type: ignore[arg-type]
    os.close(writer)
    assert process.wait(LONG_S) == 7


def test_a_pipe_that_nobody_reads_holds_nobody_up() -> None:
    """Neither who tells, nor the end of the process."""
    reader, writer = os.pipe()
    program = (
        "from adaptor import output\n"
        "for _ in range(20_000): output.tell('x' * 100)\n"
        "open('/dev/fd/1', 'wb').write(b'told')\n"
    )
    with run(program, stdout=subprocess.PIPE, stderr=writer) as process:
        printed, _ = process.communicate(timeout=LONG_S)
        assert (printed, process.returncode) == (b"told", 0)
    os.close(reader)
    os.close(writer)


def test_nothing_is_written_beside_a_thread_that_has_too_much_to_write() -> None:
    """If the writing thread then fills the pipe, a second writer would hang for ever."""
    program = (
        "import threading\n"
        "from adaptor import output\n"
        "held = threading.Event()\n"
        "output._streams['stderr'].submit(held.wait)\n"
        "while output._streams['stderr'].waiting < output._MOST: output.tell('in order')\n"
        "output.tell('beside it')\n"
        "held.set()\n"
    )
    assert set(stderr_of(program).splitlines()) == {"in order"}


def test_without_another_thread_a_line_is_written_all_the_same() -> None:
    program = (
        "import threading\n"
        'def refuse(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = refuse\n"
        "from adaptor.output import tell\n"
        "tell('said')\n"
    )
    assert stderr_of(program) == "said\n"


def test_a_fork_tells_by_itself() -> None:
    program = (
        "import os\n"
        "from adaptor.output import drain, tell\n"
        "tell('parent')\n"
        "drain()\n"
        "if os.fork() == 0:\n"
        "    tell('child')\n"
        "else:\n"
        "    os.wait()\n"
    )
    assert stderr_of(program) == "parent\nchild\n"


def test_one_that_fails_does_not_end_the_others() -> None:
    writer = output.Writer("test")
    event = threading.Event()
    writer.submit(lambda: 1 / 0)
    writer.submit(event.set)
    assert event.wait(LONG_S)
    assert writer.close(LONG_S)


def test_a_job_that_hangs_is_waited_for_only_so_long() -> None:
    writer, go = output.Writer("test"), threading.Event()
    writer.submit(go.wait)
    assert not writer.drain(0.01)
    go.set()
    assert writer.close(LONG_S)


class _AfterAStop(threading.Event):
    """An event set by a thread that is stopped with its process just after another thread begins to wait.

    Attributes:
        waits: the seconds of each wait
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        if len(self.waits) > 1:
            self.set()
        return self.is_set()  # the first time, because the time was over when the process went on


def test_time_in_a_stopped_process_is_no_waiting_time() -> None:
    event = _AfterAStop()
    assert threads.wait(event, 2.0) > 1.0
    assert sum(event.waits) < 1.0
    never = threading.Event()
    assert threads.wait(never, 0.15) < 0.0
    assert threads.wait(never, 0.0) < 0.0


@pytest.mark.parametrize("handler", ["StreamHandler", "_StderrHandler"])
def test_a_librarys_log_to_stderr_goes_to_the_output(handler: str) -> None:
    """The stream of the second kind of handler cannot be set; dill, which torch imports if installed, has
    such a handler.
    """
    program = (
        "import logging\n"
        "from adaptor import output\n"
        f"logging.getLogger('dill').addHandler(logging.{handler}())\n"
        "output.divert_logging()\n"
        "(handler,) = logging.getLogger('dill').handlers\n"
        "assert handler.stream is output._TOLD\n"
        "logging.getLogger('dill').warning('heard')\n"
    )
    assert stderr_of(program) == "heard\n"

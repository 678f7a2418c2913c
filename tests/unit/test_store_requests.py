"""Requests to a store that does not answer at the start of a command or a job are repeated."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from adaptor import threads
from adaptor.checkpoint import tracker
from adaptor.errors import StoreError
from adaptor.launchers.agent.processes import STORE
from adaptor.store import push
from adaptor.store.client import open_store
from adaptor.store.store_requests import RETRY_S, BusyError, Retrying
from tests.unit.fault_proxy import FaultProxy, faults, server, url
from tests.unit.launching import HEARS_CTRL_C
from tests.unit.object_store import save
from tests.waiting import captured

__all__ = ["faults", "server", "url"]
WAITS = f"; it is asked again for {RETRY_S:g} s (Ctrl-C ends that)\n"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _fails(until: float, clock: Clock, request_times: list[float]) -> Callable[[], str]:
    def request() -> str:
        request_times.append(clock.now)
        clock.now += 4  # the client's time for a closed port
        if clock.now < until:
            raise BusyError("no answer")
        return "done"

    return request


def test_a_request_is_repeated_for_a_minute_with_one_line() -> None:
    clock, lines, request_times = Clock(), list[str](), list[float]()
    retrying = Retrying(lines.append, 60, clock, clock.sleep)
    assert retrying.ask(_fails(62, clock, request_times)) == "done"
    assert lines == ["no answer; it is asked again for 60 s (Ctrl-C ends that)"]
    assert request_times == [5 * number for number in range(len(request_times))]


def test_retrying_ends_when_the_store_stays_away() -> None:
    clock, lines, request_times = Clock(), list[str](), list[float]()
    retrying = Retrying(lines.append, 60, clock, clock.sleep)
    with pytest.raises(BusyError, match=r"^no answer \(it was asked for 60 s\)$"):
        retrying.ask(_fails(1000, clock, request_times))
    assert clock.now == 64
    assert len(lines) == 1


def test_a_refused_request_is_not_repeated() -> None:
    clock, lines = Clock(), list[str]()

    def refused() -> None:
        raise StoreError("refused")

    with pytest.raises(StoreError, match=r"^refused$"):
        Retrying(lines.append, 60, clock, clock.sleep).ask(refused)
    assert (clock.now, lines) == (0, [])


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        with process:
            process.kill()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, faults: FaultProxy) -> Iterator[str]:
    """An endpoint without a listener; the environment has credentials."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{nobody.getsockname()[1]}"


def _start(started: list[subprocess.Popen[str]], endpoint: str, *command: object) -> subprocess.Popen[str]:
    """Start a Python program; return the process once it reports that it waits for the store."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TTP_STORE_ENDPOINT": endpoint},
    )
    started.append(process)
    assert process.stderr is not None
    assert process.stderr.readline().endswith(WAITS)
    return process


@pytest.mark.parametrize("action", ["pull", "push", "verify", "prune"])
def test_a_command_goes_on_when_the_store_answers(
    action: str,
    faults: FaultProxy,
    url: str,
    server: str,
    tmp_path: Path,
    started: list[subprocess.Popen[str]],
) -> None:
    save(tmp_path / "one", 12)
    url = f"{url}-{action}"
    if action != "push":
        push.push(open_store(url, server), tmp_path / "one", 12)
    faults.begin(lambda number, method, path: "503")
    parameters = {"pull": [tmp_path / "two"], "push": [tmp_path / "one"], "prune": ["--keep", "1"]}
    command = ["-m", "adaptor.launchers.cli.ttp", "store", action, url, *parameters.get(action, [])]
    process = _start(started, faults.url, *command)
    faults.begin()
    output = process.communicate()
    assert process.returncode == 0, output
    assert output[1] == ""
    assert action != "pull" or tracker.tracked_step(tmp_path / "two") == 12


def test_a_job_goes_on_when_the_store_answers(
    faults: FaultProxy, url: str, server: str, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """For the job's --load and for the check of its --ttp-store."""
    save(tmp_path / "one", 12)
    push.push(open_store(url, server), tmp_path / "one", 12)
    for arguments, answer in (
        (["pull", url, faults.url, tmp_path / "two", "null", "null"], "12\n"),
        (["probe", url, faults.url], ""),
    ):
        faults.begin(lambda number, method, path: "503")
        process = _start(started, "", STORE, *arguments)
        faults.begin()
        assert process.stdout is not None
        assert process.stdout.read() == answer
        assert process.wait() == 0
    assert tracker.tracked_step(tmp_path / "two") == 12


def test_ctrl_c_ends_the_wait_for_a_port_that_is_closed(
    closed: str, url: str, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    program = f"{HEARS_CTRL_C}\nfrom adaptor.launchers.cli.ttp import main; raise SystemExit(main())"
    process = _start(started, closed, "-c", program, "store", "pull", url, tmp_path / "two")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, "ttp store: interrupted; the same command goes on\n")


@pytest.mark.parametrize("action", ["pull", "probe"])
def test_the_wait_ends_with_ttprun(
    action: str, closed: str, url: str, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    parameters = [tmp_path / "two", "null", "null"] if action == "pull" else []
    process = _start(started, "", STORE, action, url, closed, *parameters)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait() == 1


def test_a_read_only_question_is_not_repeated(closed: str, url: str) -> None:
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "store", "list", url]
    environment = {**os.environ, "TTP_STORE_ENDPOINT": closed}
    completed = captured(command, env=environment, code=2)
    (line,) = completed.stderr.splitlines()
    assert line.endswith(f"no answer from {closed}; is the address right, and does the server run?")


def test_results_come_in_order_and_a_few_calls_run_ahead() -> None:
    lock, started_calls = threading.Lock(), 0

    def call(number: int) -> int:
        nonlocal started_calls
        with lock:
            started_calls += 1
        return number

    taken = []
    for future in threads.in_order([partial(call, number) for number in range(20)], "a-test", 3):
        taken.append(future.result())
        with lock:
            assert started_calls <= len(taken) + 2
    assert taken == list(range(20))


def test_closing_starts_no_more_calls_and_waits_for_none() -> None:
    release, first_started, later_calls = threading.Event(), threading.Event(), []

    def first_call() -> None:
        first_started.set()
        release.wait()

    with contextlib.closing(
        threads.in_order([first_call, partial(later_calls.append, 1)], "a-test", 1)
    ) as coming:
        first = next(coming)
        assert first_started.wait(60)
    assert not first.done()
    release.set()
    first.result(60)
    assert later_calls == []


def test_calls_run_on_the_caller_s_thread_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert threads.call(lambda: 1) == 1
    assert threads.begin(lambda: 2, "a-test").result() == 2
    assert [future.result() for future in threads.in_order([lambda: 3, lambda: 4], "a-test")] == [3, 4]

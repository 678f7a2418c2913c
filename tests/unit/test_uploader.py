"""The process beside `ttprun` that sends checkpoints to a store, with a real store and without a job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

from adaptor import output
from adaptor.config import load
from adaptor.errors import ConfigError
from adaptor.launchers.agent.processes import STORE
from adaptor.launchers.store import hooks
from adaptor.launchers.store.hooks import JobUploads
from adaptor.protocol import naming
from adaptor.store import catalog, large_file, push
from adaptor.store.client import PIECE, open_store
from adaptor.store.local_checkpoints import Saved
from adaptor.store.local_checkpoints import choose as due
from adaptor.store.settings import StoreSettings
from tests import waiting
from tests.unit import object_store
from tests.unit.fault_proxy import Fault, FaultProxy, faults, server, url
from tests.unit.object_store import save
from tests.waiting import captured

__all__ = ["faults", "server", "url"]


@pytest.mark.parametrize(
    ("steps", "last", "every", "at_end", "expected"),
    [
        ([], None, 1, True, None),
        ([10], None, 100, False, [10]),
        ([20], 10, 1, False, [20]),
        ([20], 10, 100, False, None),
        ([20], 10, 100, True, [20]),
        ([20, 30], 10, 20, False, [30]),
        ([20, 30, 40], 10, 10, False, [20, 30, 40]),
        ([-12, 13], 10, 100, False, [12]),
        ([60, 30], 50, 20, False, [30]),
        ([30, 40], 50, 20, False, [30]),
        ([-30], 50, 20, False, [30]),
    ],
)
def test_the_checkpoint_that_is_due(
    steps: list[int], last: int | None, every: int, at_end: bool, expected: list[int] | None
) -> None:
    """A negative number stands for last words; the last expected checkpoint is sent, the others are
    skipped.
    """
    saved = [Saved(abs(step), step < 0) for step in steps]
    chosen = due(saved, last, every, at_end=at_end)
    assert (chosen and [entry.step for entry in (*chosen.skipped, chosen.saved)]) == expected


class Sender:
    """The sending process with its output."""

    def __init__(self, url: str, endpoint: str, save: Path, **settings: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(STORE), "send"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **object_store.CREDENTIALS},
        )
        self.tell(
            {
                "url": url,
                "endpoint": endpoint,
                "save": str(save),
                "every": 1,
                "keep": 0,
                "rate": 0,
                **settings,
            }
        )

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def ends(self) -> str:
        """Wait for the end of the process; return its unread output."""
        assert self.process.stdout is not None
        unread = self.process.stdout.read()
        assert self.process.wait() == 0
        return unread


@pytest.fixture
def start() -> Iterator[Callable[..., Sender]]:
    """Start processes, as `Sender` does, that do not outlive the test."""
    with contextlib.ExitStack() as stack:

        def started(*arguments: Any, **settings: int) -> Sender:
            sender = Sender(*arguments, **settings)
            stack.enter_context(sender.process)
            stack.callback(sender.process.kill)
            return sender

        yield started


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "save"


def test_saves_are_sent_and_old_checkpoints_removed(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    store = open_store(url, server)
    sender = start(url, server, root, keep=2)
    for step in (10, 20, 30):
        save(root, step)
        assert f"step {step} is in {url}" in sender.line()
    sender.tell({"within_s": None})
    assert sender.ends() == ""
    assert catalog.steps(store) == [20, 30]
    # The next start of the job goes on after them.
    sender = start(url, server, root, keep=2, every=15)
    save(root, 40)
    save(root, 45)
    assert "step 45 is in" in sender.line()
    save(root, 50)
    sender.tell({"within_s": None})
    assert "step 50 is in" in sender.line(), "the newest one at the end"
    assert sender.ends() == ""


@pytest.mark.parametrize(
    ("between", "line"),
    [((20, 30), "steps 20, 30, because {} their turn"), ((20,), "step 20, because {} its turn")],
)
def test_a_slow_store_gets_the_newest(
    between: tuple[int, ...],
    line: str,
    url: str,
    server: str,
    faults: FaultProxy,
    root: Path,
    start: Callable[..., Sender],
) -> None:
    url = f"{url}-{len(between)}"
    faults.begin(lambda number, method, path: "hold before" if "mp_rank_01" in path else "")
    save(root, 10)
    sender = start(url, faults.url, root)
    assert faults.held.wait(60)
    for step in (*between, 40):
        save(root, step)
    faults.fault = lambda number, method, path: ""
    faults.release.set()
    assert "step 10 is in" in sender.line()
    assert f" {line.format('step 40 was saved before')} came" in sender.line()
    assert "step 40 is in" in sender.line()
    sender.tell({"within_s": None})
    assert sender.ends() == ""
    assert catalog.steps(open_store(url, server)) == [10, 40]


def test_last_words_go_first(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    """Last words arrive while an older checkpoint is sent, with one piece that has to wait ten minutes."""
    save(root, 10, first=3 * PIECE)
    faults.begin(lambda number, method, path: "hold before" if "partNumber=1" in path else "")
    sender = start(url, faults.url, root, rate=PIECE // 600)
    assert faults.held.wait(60)
    save(root, 12, last_words=True)
    faults.fault = lambda number, method, path: ""
    faults.release.set()
    assert f"step 10 is not sent to {url}: the last words of step 12 are sent in its place" in sender.line()
    sender.tell({"within_s": None})
    assert "step 12 is in" in sender.line()
    assert sender.ends() == ""
    store = open_store(url, server)
    assert [entry.saved_manifest.step for entry in catalog.newest_first(store, None, [])] == [12]
    assert store.multipart is not None
    assert store.multipart.begun() == [], "what was left leaves nothing behind"


def test_a_large_file_is_gone_on_with_by_the_next_job(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    """The first was told to end, and had no time to send all of it."""
    save(root, 10, first=4 * PIECE)
    faults.begin(lambda number, method, path: "hold before" if "partNumber=4" in path else "")
    sender = start(url, faults.url, root)
    assert faults.held.wait(60)
    store = open_store(url, faults.url).identity
    noted = lambda: [set(file.parts) for file in large_file.all_of(root, store)]  # noqa: E731
    waiting.until(lambda: noted() == [{1, 2, 3}], "the others are there")
    sender.tell({"within_s": 0})
    assert "TTP_GRACE is over" in sender.ends()
    faults.begin()
    sender = start(url, faults.url, root)
    assert "step 10 is in" in sender.line()
    sender.tell({"within_s": None})
    assert sender.ends() == ""
    assert faults.parts == [(4, PIECE)]


def test_a_store_that_is_down_is_said_once_and_tried_again(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    faults.begin(lambda number, method, path: "403" if method == "PUT" else "")
    save(root, 10)
    sender = start(url, faults.url, root)
    assert "no step of this job is in" in (line := sender.line())
    assert "does not allow these credentials to write" in line
    requests_before = len(faults.requests)
    waiting.until(lambda: len(faults.requests) > requests_before + 4, "it is tried again")
    faults.fault = lambda number, method, path: ""
    assert "step 10 is in" in sender.line()
    faults.fault = lambda number, method, path: "403" if method == "PUT" else ""
    save(root, 20)
    assert "only step 10 of this job is in" in sender.line()
    sender.tell({"within_s": None})
    last_lines = sender.ends()
    assert last_lines.startswith(f"[ttp] step 20 is only in {root}, not in {url}: ")
    assert "does not allow these credentials" in last_lines


def test_a_store_that_stays_down_does_not_keep_the_job_from_its_end(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    """As many attempts have failed before the end as are made at the end."""
    faults.begin(lambda number, method, path: "403" if method == "PUT" else "")
    save(root, 10)
    sender = start(url, faults.url, root)
    sent = lambda: [path for method, path in faults.requests if method == "PUT"]  # noqa: E731
    waiting.until(lambda: len(sent()) >= 3, "three attempts")
    sender.tell({"within_s": None})
    assert f"step 10 is only in {root}" in sender.ends()
    assert len(sent()) <= 7


def test_saves_after_a_step_back_are_sent_and_stay(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    """The folder and the store have later steps of the attempt before."""
    store = open_store(url, server)
    for step in (10, 20, 30, 40):
        save(root, step)
        push.push(store, root, step)
    sender = start(url, server, root, keep=2)
    save(root, 50)
    assert "step 50 is in" in sender.line()
    (root / naming.TRACKER).write_text("10")  # as the framework does with --ckpt-step
    save(root, 20, "another1")
    assert "step 20 is in" in sender.line()
    assert "holds steps 40, 50 of an earlier attempt, later than step 20" in sender.line()
    save(root, 25, "another1", last_words=True)
    assert "step 25 is in" in sender.line()
    sender.tell({"within_s": None})
    assert sender.ends() == ""
    assert catalog.steps(store) == [20, 25, 40, 50]


def test_saves_after_a_step_back_are_sent_by_the_next_process_too(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    """The folder and the store have later steps of the attempt before when the process begins."""
    store = open_store(url, server)
    for step in (10, 20, 30, 40):
        save(root, step)
        push.push(store, root, step)
    (root / naming.TRACKER).write_text("20")
    save(root, 25, "another1", last_words=True)
    sender = start(url, server, root)
    sender.tell({"within_s": None})
    later_line, sent = sender.ends().splitlines()
    assert f"holds step 40, later than step 25 of {root}" in later_line
    assert "step 25 is in" in sent
    assert catalog.steps(store) == [10, 20, 25, 30, 40]


def test_a_checkpoint_that_is_removed_while_it_is_sent_does_not_count(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    """With --save-retain-interval Megatron removes a step after the save of the next step."""
    faults.begin(lambda number, method, path: "hold before" if "mp_rank_01" in path else "")
    folder = save(root, 10)
    sender = start(url, faults.url, root, every=20)
    assert faults.held.wait(60)
    shutil.rmtree(folder)
    for step in (20, 30):
        save(root, step)
    faults.fault = lambda number, method, path: ""
    faults.release.set()
    removed = f"{folder}/mp_rank_02/{naming.MODEL_FILE}: cannot be read (No such file or directory)"
    assert sender.line() == (
        f"[ttp] no step of this job is in {url} so far: {removed}; the step was removed before all of it was"
        " sent: with --save-retain-interval let TTP_STORE_EVERY be a multiple of that interval, so that what"
        " is sent stays"
    )
    assert "step 20 is in" in sender.line(), "20 steps after one that is in the store 30 would be due"
    sender.tell({"within_s": None})
    assert "step 30 is in" in sender.line()
    assert sender.ends() == ""


def test_earlier_uploads_are_found_when_the_store_answers_again(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    save(root, 10)
    push.push(open_store(url, server), root, 10)
    refused: list[str] = []

    def first_list(number: int, method: str, path: str) -> Fault:
        if method == "GET" and not refused:
            refused.append(path)
            return "403"
        return ""

    faults.begin(first_list)
    save(root, 20)
    sender = start(url, faults.url, root, every=100)
    assert "no step of this job is in" in sender.line()
    sender.tell({"within_s": None})
    assert "step 20 is in" in sender.line()
    assert sender.ends() == ""


@pytest.mark.parametrize("ended_by", ["grace", "killed"])
def test_a_checkpoint_that_cannot_be_sent_in_time_is_reported(
    ended_by: str, url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    faults.begin(lambda number, method, path: "hold before" if "mp_rank_01" in path else "")
    save(root, 10)
    sender = start(url, faults.url, root)
    assert faults.held.wait(60)
    if ended_by == "grace":
        sender.tell({"within_s": 0.1})
    else:
        assert sender.process.stdin is not None
        sender.process.stdin.close()
    reason = "TTP_GRACE is over" if ended_by == "grace" else "ttprun has ended"
    command = f"TTP_STORE_ENDPOINT={faults.url} ttp store push {url} {root} --step 10"
    assert (
        sender.ends()
        == f"[ttp] step 10 is only in {root}, not in {url}: {reason}; this sends it: {command}\n"
    )
    assert catalog.places(open_store(url, server), 10)[0] == []


def test_a_store_with_later_steps_is_named(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    sender = start(url, server, root.with_name("other"))
    save(root.with_name("other"), 90)
    assert "step 90 is in" in sender.line()
    sender.process.kill()
    save(root, 10)
    sender = start(url, server, root)
    assert "holds step 90, later than step 10" in sender.line()
    assert "step 10 is in" in sender.line()
    sender.tell({"within_s": None})
    assert sender.ends() == ""


def test_an_incomplete_later_step_is_not_named(
    url: str, server: str, faults: FaultProxy, root: Path, start: Callable[..., Sender]
) -> None:
    """An upload that ended with its job leaves an incomplete step; the printed command starts the upload
    anew.
    """
    open_store(url, server).put("iter_0000090/0f3a5c21-14e73ed6254e7994/__0_0.distcp", b"1")
    save(root, 10)
    sender = start(url, server, root)
    assert "step 10 is in" in sender.line()
    sender.tell({"within_s": None})
    assert sender.ends() == ""


def _held_in_the_middle(
    url: str, faults: FaultProxy, root: Path
) -> tuple[JobUploads, subprocess.Popen[bytes]]:
    """Begin to send a checkpoint; return when the store holds back a request of it."""
    faults.begin(lambda number, method, path: "hold before" if "mp_rank_01" in path else "")
    save(root, 10)
    uploads = JobUploads(
        dataclasses.replace(load({}).of(StoreSettings), store=url, store_endpoint=faults.url)
    )
    uploads.begin(root)
    assert faults.held.wait(60)
    process = uploads._process
    assert process is not None
    return uploads, process


def test_an_uploader_that_is_killed_is_started_again(
    url: str, server: str, faults: FaultProxy, root: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    uploads, process = _held_in_the_middle(url, faults, root)
    faults.fault = lambda number, method, path: ""
    process.kill()
    faults.release.set()
    waiting.until(lambda: uploads._process not in (process, None), "it is started again")
    uploads.close()
    store = open_store(url, server)
    assert [entry.saved_manifest.step for entry in catalog.newest_first(store, None, [])] == [10]
    printed = capfd.readouterr()
    assert f"the process that sends checkpoints to {url} has ended by SIGKILL; it is started again" in (
        printed.out + printed.err
    )


def test_an_uploader_killed_after_the_end_leaves_a_command_for_the_rest(
    url: str, server: str, faults: FaultProxy, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when the memory of the machine is exhausted; the printed command works."""
    root = root.with_name("a folder")
    uploads, process = _held_in_the_middle(url, faults, root)
    ends = threading.Thread(target=uploads.close)
    ends.start()
    assert uploads._ends.wait(waiting.LONG_S)
    process.kill()
    ends.join()
    faults.fault = lambda number, method, path: ""
    faults.release.set()
    output.drain()
    printed = capfd.readouterr().err.strip()
    message, _, command = printed.partition(": TTP_STORE_ENDPOINT=")
    assert message.endswith(
        "has ended by SIGKILL; the newest one may be on this machine only; this sends what the store does not"
        " have"
    )
    ttp = f" {sys.executable} -m adaptor.launchers.cli.ttp "
    command = f"TTP_STORE_ENDPOINT={command}".replace(" ttp ", ttp)
    captured(["sh", "-c", command], code=0)
    assert [
        entry.saved_manifest.step for entry in catalog.newest_first(open_store(url, server), None, [])
    ] == [10]


class _ClosedAfterTheEnd:
    """The pipe to an uploader, whose watcher comes no further before the job has ended."""

    def __init__(self, pipe: IO[bytes] | None, uploads: JobUploads) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._uploads = uploads

    def close(self) -> None:
        assert self._uploads._ends.wait(waiting.LONG_S)
        self._pipe.close()


def test_an_uploader_that_is_killed_right_before_the_end_is_started_once_more(
    url: str, server: str, faults: FaultProxy, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "FIRST_WAIT_S", waiting.LONG_S)
    uploads, process = _held_in_the_middle(url, faults, root)
    faults.fault = lambda number, method, path: ""
    process.stdin = cast(IO[bytes], _ClosedAfterTheEnd(process.stdin, uploads))
    process.kill()
    waiting.until(lambda: uploads._process is None, "it is seen that it has ended")
    faults.release.set()
    uploads.close()
    assert [
        entry.saved_manifest.step for entry in catalog.newest_first(open_store(url, server), None, [])
    ] == [10]


def test_a_signal_for_the_whole_job_does_not_end_an_uploader_that_starts(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """A running uploader ignores such signals; until then they are blocked."""
    script = root.parent / "started.py"
    script.write_text(
        "import os, signal, sys\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[0] + '.lived', 'w').close()\n"
        "sys.stdin.read()\n"
    )
    monkeypatch.setattr(hooks, "STORE", script)
    uploads = JobUploads(dataclasses.replace(load({}).of(StoreSettings), store="s3://bucket/run7"))
    uploads.begin(root)
    waiting.until(Path(f"{script}.lived").exists, "it has begun to ignore the signal")
    uploads.stop()


def test_a_folder_name_that_is_not_utf_8_is_reported(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Otherwise nothing would be sent, and no line would say so."""
    uploads = JobUploads(dataclasses.replace(load({}).of(StoreSettings), store="s3://bucket/run7"))
    uploads.begin(root / os.fsdecode(b"\xff"))
    uploads.close()
    output.drain()
    stderr = capfd.readouterr().err
    assert "[ttp] no checkpoint is sent to s3://bucket/run7 any more: UnicodeEncodeError: " in stderr


def test_a_process_without_more_threads_sends_nothing_and_goes_on(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "ttp-upload":
            raise RuntimeError("can't start new thread")
        start(thread)

    uploads = JobUploads(dataclasses.replace(load({}).of(StoreSettings), store="s3://bucket/run7"))
    monkeypatch.setattr(threading.Thread, "start", refuses)
    uploads.begin(root)
    uploads.begin(root)
    uploads.close()
    assert output.drain(60)
    printed = capfd.readouterr()
    line = "[ttp] no checkpoint is sent to s3://bucket/run7 yet: can't start new thread\n"
    assert (printed.out + printed.err).count(line) == 1


def test_a_start_that_hangs_holds_up_nobody(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, goes_on, started = threading.Event(), threading.Event(), []
    popen = subprocess.Popen

    def hanging(*arguments: Any, **keywords: Any) -> subprocess.Popen[bytes]:
        hangs.set()
        assert goes_on.wait(60)
        started.append(popen(*arguments, **keywords))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", hanging)
    uploads = JobUploads(dataclasses.replace(load({}).of(StoreSettings), store="s3://bucket/run7"))
    uploads.begin(root)
    assert hangs.wait(60)
    assert uploads._lock.acquire(blocking=False)
    thread, uploads._thread = uploads._thread, None  # what `stop` does, without its wait
    uploads._lock.release()
    goes_on.set()
    assert thread is not None
    thread.join()
    assert started[0].wait() == -signal.SIGKILL


def test_it_ends_where_another_node_takes_over(url: str, server: str, faults: FaultProxy, root: Path) -> None:
    uploads, process = _held_in_the_middle(url, faults, root)
    uploads.stop()
    waiting.ended([process.pid])
    assert "ttp-upload" not in {thread.name for thread in threading.enumerate()}
    uploads.close()


def test_a_store_that_refuses_starts_nothing(
    url: str, server: str, faults: FaultProxy, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(load({}).of(StoreSettings), store=url, store_endpoint=faults.url)
    hooks.require_writable(settings)
    assert open_store(url, server).objects("") == {}, "the probe is removed"
    faults.begin(lambda number, method, path: "403")
    with pytest.raises(ConfigError, match=r"TTP_STORE: s3://.*does not allow these credentials to write"):
        hooks.require_writable(settings)
    with pytest.raises(ConfigError, match="there is no bucket nowhere"):
        hooks.require_writable(
            dataclasses.replace(settings, store="s3://nowhere/run7", store_endpoint=server)
        )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY is set, but AWS_ACCESS_KEY_ID is not"):
        hooks.require_writable(settings)

"""The process beside `ttprun` that sends logs and other outputs to a store, with a real store."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adaptor.config import load
from adaptor.errors import ConfigError
from adaptor.launchers.store import hooks
from adaptor.launchers.store.hooks import OutputUploads
from adaptor.protocol import naming
from adaptor.store import outputs
from adaptor.store.client import PIECE, open_store
from adaptor.store.outputs import OutputUploader
from adaptor.store.settings import OutputSettings, StoreSettings
from tests import waiting
from tests.unit.fault_proxy import FaultProxy, faults, server, url

__all__ = ["faults", "server", "url"]

QUICK_S = 0.02


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `logs`, from which a job is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs" / "job").mkdir(parents=True)
    (tmp_path / "logs" / "job" / "agent.log").write_text("begins\n")
    return tmp_path / "logs"


class UploaderThread:
    def __init__(self, url: str, endpoint: str, *folders: str, look_s: float) -> None:
        self.lines: list[str] = []
        order = OutputSettings(url, endpoint, folders, rate=10**9, node=3)
        self.uploader = OutputUploader(order, self.lines.append, look_s)
        self._thread = threading.Thread(target=self.uploader.run)
        self._store = open_store(url, endpoint)
        self._thread.start()

    def content(self, name: str) -> bytes | None:
        """Return the store's content of a file of node 3."""
        stat = self._store.stat(f"outputs/node3/{name}")
        return None if stat is None else self._store.get(f"outputs/node3/{name}", stat.bytes)

    def names(self) -> list[str]:
        return sorted(name.removeprefix("outputs/node3/") for name in self._store.objects("outputs"))

    def end(self) -> list[str]:
        self.uploader.end()
        self._thread.join(waiting.LONG_S)
        assert not self._thread.is_alive()
        return self.lines


@contextmanager
def running(*arguments: str, look_s: float = QUICK_S) -> Iterator[UploaderThread]:
    uploader = UploaderThread(*arguments, look_s=look_s)
    try:
        yield uploader
    finally:
        uploader.end()


def test_files_are_sent_again_when_they_change(url: str, faults: FaultProxy, logs: Path) -> None:
    with running(url, faults.url, "logs") as uploader:
        waiting.until(lambda: uploader.content("logs/job/agent.log") == b"begins\n", "it is sent")
        with (logs / "job" / "agent.log").open("a") as file:
            file.write("goes on\n")
        (logs / "later").mkdir()
        (logs / "later" / "result.json").write_text("{}")
        waiting.until(lambda: uploader.content("logs/later/result.json") == b"{}", "a new file is sent")
        (line,) = uploader.end()
        assert uploader.content("logs/job/agent.log") == b"begins\ngoes on\n"
        assert line == f"[ttp] logs: 2 files (17 bytes) are in {url}/outputs/node3"


def test_checkpoints_and_non_files_are_left_out(tmp_path: Path, logs: Path) -> None:
    for name in (naming.final_name(7), naming.temporary_name(7), naming.aside_name(7, 1)):
        (logs / name).mkdir()
        (logs / name / naming.MODEL_FILE).touch()
    os.mkfifo(logs / "pipe")
    (logs / "link").symlink_to("/etc/hostname")
    (logs / naming.LEASE).touch()
    (logs / "a\nb").write_text("x")
    large = os.urandom(PIECE + 1)
    (logs / "large").write_bytes(large)
    store = tmp_path / "store"
    store.mkdir()
    with running(f"file://{store}", "", str(logs), "not there", look_s=waiting.LONG_S) as uploader:
        refused, line = uploader.end()
    assert "a\\nb' is not sent to" in refused
    assert "an object cannot have this name" in refused
    folder = str(logs).lstrip("/")
    assert uploader.names() == [f"{folder}/job/agent.log", f"{folder}/large"]
    assert uploader.content(f"{folder}/large") == large
    assert line.startswith(
        f"[ttp] 1 of 3 files of {logs}, not there (1 bytes) are not in file://{store}/outputs"
    )


def test_files_in_the_store_are_not_sent_again(tmp_path: Path, logs: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (logs / "other").write_text("before")
    with running(f"file://{store}", "", "logs"):
        pass
    sent = store / "outputs/node3/logs"
    numbers = {path: path.stat().st_ino for path in (sent / "job/agent.log", sent / "other")}
    (logs / "other").write_text("behind")
    with running(f"file://{store}", "", "logs"):
        pass
    assert (sent / "job/agent.log").stat().st_ino == numbers[sent / "job/agent.log"]
    assert (sent / "other").read_text() == "behind"


def test_a_file_that_grows_is_not_sent_without_a_pause(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is so long that only the end of the job sends the file again."""
    monkeypatch.setattr(outputs, "_SHARE", 1e-9)
    store = tmp_path / "store"
    store.mkdir()
    (logs / "grows").write_bytes(bytes(1000))
    with running(f"file://{store}", "", "logs") as uploader:
        waiting.until(lambda: uploader.content("logs/grows") is not None, "it is sent")
        (logs / "grows").write_bytes(bytes(2000))
        (logs / "mark").touch()
        waiting.until(lambda: uploader.content("logs/mark") is not None, "there was another look")
        assert uploader.content("logs/grows") == bytes(1000)
        uploader.end()
        assert uploader.content("logs/grows") == bytes(2000)


def test_a_store_that_refuses_is_one_line(url: str, faults: FaultProxy, logs: Path) -> None:
    with running(url, faults.url, "logs") as uploader:
        waiting.until(lambda: uploader.content("logs/job/agent.log"), "it is sent")
        faults.fault = lambda number, method, path: "403" if method == "PUT" else ""
        (logs / "job" / "agent.log").write_text("more\n")
        refused, line = uploader.end()
    assert refused.startswith(f"[ttp] {url} does not get logs: ")
    assert refused.endswith("it is tried again")
    assert line.startswith(f"[ttp] 1 of 1 files of logs (5 bytes) are not in {url}/outputs/node3: ")


def test_the_process_of_a_node(
    url: str, faults: FaultProxy, logs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process starts before a save folder is known, is restarted, and sends the rest at the end."""
    settings = dataclasses.replace(
        load({}).of(StoreSettings), store=url, store_endpoint=faults.url, store_also=("logs",)
    )
    uploads = OutputUploads(settings)
    uploads.place(2, 4)
    uploads.begin_outputs()
    store = open_store(url, faults.url)
    name = "outputs/node2/logs/job/agent.log"
    waiting.until(lambda: store.stat(name), "it is sent", pause_s=0.1)
    process = uploads._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    waiting.until(lambda: uploads._process not in (process, None), "it is started again")
    (logs / "job" / "agent.log").write_text("ends\n")
    uploads.close()
    assert store.get(name, 100) == b"ends\n"
    output = capfd.readouterr()
    assert f"the process that sends outputs to {url} has ended by SIGKILL; it is started again" in (
        output.out + output.err
    )


@pytest.mark.parametrize(
    ("variable", "value"), [("TTP_STORE_EVERY", "100"), ("TTP_STORE_KEEP", "3"), ("TTP_STORE_RATE", "5000")]
)
def test_a_setting_of_a_store_without_a_store(variable: str, value: str) -> None:
    settings = load({variable: value}).of(StoreSettings)
    line = f"^{variable} is {value} and TTP_STORE is not set: .*, or leave out {variable}$"
    with pytest.raises(ConfigError, match=line):
        hooks.require_writable(settings)
    hooks.require_writable(load({}).of(StoreSettings))


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    settings = dataclasses.replace(load({}).of(StoreSettings), store_also=("logs",))
    with pytest.raises(ConfigError, match="TTP_STORE_ALSO is logs and TTP_STORE is not set: give the URL"):
        hooks.require_writable(settings)
    (tmp_path / "file").touch()
    also = (str(tmp_path / "file"),)
    with pytest.raises(ConfigError, match=r"TTP_STORE_ALSO is .*/file: it is no folder"):
        hooks.require_writable(dataclasses.replace(settings, store=f"file://{tmp_path}", store_also=also))

"""Notices of incidents to real servers and commands that work, fail or hang."""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from adaptor import config, output
from adaptor.errors import ConfigError
from adaptor.launchers.cli import ttprun
from adaptor.launchers.operations import hooks, job_server
from adaptor.launchers.operations.hooks import NotDeliveredError, Notifier
from adaptor.launchers.records.notices import notice_of_end
from adaptor.operations.settings import NoticeTarget, OperationsSettings
from tests import operator_files, waiting
from tests.unit.launching import Launcher, launcher, zygote  # noqa: F401
from tests.unit.test_operations import SAVED, RecordedJob
from tests.unit.threads import LONG_S

SECRET = "a-word-that-nobody-guesses"
NOTICE = notice_of_end("gpt", 2, "2026-01-31T12:00:00+00:00")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow slow answers: the machine may be busy."""
    monkeypatch.setattr(hooks, "LIMIT_S", LONG_S)
    monkeypatch.setattr(output, "DRAIN_S", LONG_S)


@pytest.fixture
def _hasty(_patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "LIMIT_S", 2.0)
    monkeypatch.setattr(output, "DRAIN_S", 2.0)


class Receiver(ThreadingHTTPServer):
    """Answers each POST with `code`; `got` holds the bodies and headers in order."""

    daemon_threads = True

    def __init__(self, code: int = 200) -> None:
        self.code = code
        self.got: queue.Queue[tuple[bytes, Message]] = queue.Queue()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/services/a-secret-path"

    def notice(self) -> Any:
        """Wait for the next notice, and check it against the schema."""
        received = json.loads(self.got.get(timeout=LONG_S)[0])
        operator_files.assert_notice(received)
        return received


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.put((body, self.headers))
        self.send_response(self.server.code)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def receives(code: int = 200) -> Iterator[Receiver]:
    with Receiver(code) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def hangs() -> Iterator[str]:
    """A server whose kernel accepts connections and that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/hook"


def command(text: str) -> NoticeTarget:
    return NoticeTarget("exec", shlex.join([sys.executable, "-c", text]))


def test_json_is_signed() -> None:
    with receives() as server:
        hooks.deliver(NoticeTarget("json", server.url), NOTICE, SECRET)
        hooks.deliver(NoticeTarget("json", server.url), NOTICE)
        body, headers = server.got.get_nowait()
        assert "X-TTP-Signature" not in server.got.get_nowait()[1]
    operator_files.assert_notice(json.loads(body))
    signed = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    assert headers["X-TTP-Signature"] == f"sha256={signed}"
    assert (headers["Content-Type"], json.loads(body)["type"]) == ("application/json", "ended")


def test_slack_gets_a_text() -> None:
    with receives() as server:
        hooks.deliver(NoticeTarget("slack", server.url), NOTICE, SECRET)
        body, headers = server.got.get_nowait()
    assert json.loads(body) == {"text": "gpt: ttprun has ended, 2 incidents"}
    assert "X-TTP-Signature" not in headers


@pytest.mark.parametrize("code", [500, 404, 302, 307])
def test_an_error_status_is_a_failure(code: int) -> None:
    with receives(code) as server, pytest.raises(NotDeliveredError, match=f"it answered {code}"):
        hooks.deliver(NoticeTarget("json", server.url), NOTICE)


def test_a_closed_port_is_a_failure() -> None:
    with hangs() as url:
        pass
    with pytest.raises(NotDeliveredError, match="Connection refused"):
        hooks.deliver(NoticeTarget("json", url), NOTICE)


@pytest.mark.usefixtures("_hasty")
def test_a_missing_answer_is_a_failure() -> None:
    with hangs() as url, pytest.raises(NotDeliveredError, match="timed out"):
        hooks.deliver(NoticeTarget("json", url), NOTICE)


def test_a_command_has_the_notice_on_its_stdin(tmp_path: Path) -> None:
    out = tmp_path / "it's here"
    hooks.deliver(command(f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"), NOTICE)
    operator_files.assert_notice(json.loads(out.read_text()))
    with pytest.raises(NotDeliveredError, match="it ended with status 3"):
        hooks.deliver(command("raise SystemExit(3)"), NOTICE)
    with pytest.raises(NotDeliveredError, match="it cannot be started"):
        hooks.deliver(NoticeTarget("exec", str(tmp_path / "absent")), NOTICE)


@pytest.mark.usefixtures("_hasty")
def test_a_hanging_command_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, pids = tmp_path / "hook", tmp_path / "pids"
    communicate = subprocess.Popen.communicate

    def once_it_hangs(process: Any, *arguments: Any) -> Any:
        waiting.written(tmp_path, lambda: pids.exists() and pids.read_text().endswith("\n"), "it hangs")
        return communicate(process, *arguments)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_it_hangs)
    hook.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {pids}\nwait\n")
    hook.chmod(0o755)
    with pytest.raises(NotDeliveredError, match="it had not ended after 2 s"):
        hooks.deliver(NoticeTarget("exec", str(hook)), NOTICE)
    waiting.ended(map(int, pids.read_text().split()))


@pytest.mark.usefixtures("_hasty")
def test_a_target_that_hangs_holds_up_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    with hangs() as url, receives(500) as broken, receives() as fine:
        to = [NoticeTarget("slack", url), NoticeTarget("json", broken.url), NoticeTarget("json", fine.url)]
        notifier = Notifier(to)
        for _ in range(100):
            notifier.submit(lambda: NOTICE)
        for _ in range(5):
            assert fine.notice()["type"] == "ended"
        notifier.close()
    assert output.drain(LONG_S)
    lines = capfd.readouterr().err
    host = broken.url.removesuffix("/services/a-secret-path")
    assert f"[ttp] TTP_NOTIFY {host}: the notice 'ended' was not delivered: it answered 500\n" in lines
    assert "a-secret-path" not in lines
    assert notifier.dropped >= 100 - 64 - 2, "the queue of one that hangs is bounded"


def test_a_command_that_fails_is_shown_without_its_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    notifier = Notifier([NoticeTarget("exec", "/bin/false --token a-secret-word")])
    notifier.submit(lambda: NOTICE)
    notifier.close()
    assert output.drain(LONG_S)
    stderr = capfd.readouterr().err
    assert "[ttp] TTP_NOTIFY exec:/bin/false: the notice 'ended' was not delivered: " in stderr
    assert "a-secret-word" not in stderr


def test_a_secret_given_instead_of_its_path_is_not_shown() -> None:
    word = "a-secret-word/of-somebody"
    with pytest.raises(ConfigError, match="it must be the path of a file") as refused:
        hooks.secret(config.load({"TTP_NOTIFY_SECRET": word}).of(OperationsSettings))
    assert word not in str(refused.value)
    with pytest.raises(ConfigError, match="it must be the path of a file") as refused:
        job_server.require(config.load({"TTP_SERVE": "8000", "TTP_SERVE_TOKEN": word}))
    assert word not in str(refused.value)


def test_an_incident_and_how_it_goes_on(tmp_path: Path) -> None:
    with receives() as server:
        job = RecordedJob(tmp_path, Notifier([NoticeTarget("json", server.url)]).submit)
        job.rank_1_is_killed(100.0)
        received = server.notice()
        assert (received["type"], received["job"], received["incident"]["verdict"]) == (
            "incident",
            "job_7",
            "saved",
        )
        assert received["text"].startswith(f"job_7: {SAVED.line}; ")
        assert received["incident"]["events"] == []
        job.report.record_next_action("restart 1 of 3")
        job.report.begin(2)
        job.report.record_start()
        job.starts(110.0)
        job.report.record_progress(41)
        received = server.notice()
        assert received["text"] == "job_7: training goes on, 7 steps lost; restart 1 of 3"
        assert (received["type"], received["incident"]["phases"]["load"]) == ("resumed", 2.0)
        job.report.close()
        assert server.notice()["text"] == "job_7: ttprun has ended, 0 incidents"


def test_targets_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "targets"
    path.write_text("# of our group\nslack:https://hooks.example/a\n\nexec:true\n")
    path.chmod(0o600)
    settings = config.load({"TTP_NOTIFY": f"file:{path}"}).of(OperationsSettings)
    assert hooks.targets(settings) == [
        NoticeTarget("slack", "https://hooks.example/a"),
        NoticeTarget("exec", "true"),
    ]
    path.write_text("slack:https://hooks.example/a\nhttps//hooks.example/secret\n")
    with pytest.raises(ConfigError, match=r"targets, line 2: it must be https://") as refused:
        hooks.targets(settings)
    assert "secret" not in str(refused.value)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        hooks.targets(settings)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--ttp-notify", "hooks"), "TTP_NOTIFY is 'hooks': it must be https://..., slack:https://..., "),
        (("--ttp-notify", "htp://a/secret"), "TTP_NOTIFY holds a text (not shown): it must be https://"),
        (("--ttp-notify", "https://"), "TTP_NOTIFY holds a text (not shown): it must be https://"),
        (("--ttp-notify", "https://a:b@c/secret"), "TTP_NOTIFY holds a text (not shown): it must be "),
        (("--ttp-notify", "https://a:99999/secret"), "TTP_NOTIFY holds a text (not shown): it must be "),
        (("--ttp-notify", "exec:no-such-program -x"), "TTP_NOTIFY is exec:no-such-program: there is no"),
        (("--ttp-notify", "file:absent"), "TTP_NOTIFY absent: it cannot be read"),
        (("--ttp-notify-secret", "absent"), "TTP_NOTIFY_SECRET: it must be the path of a file"),
    ],
)
def test_invalid_targets_start_nothing(
    arguments: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TTP_NOTIFY", "TTP_NOTIFY_SECRET"):
        monkeypatch.setenv(name, "")  # ttprun sets the variables from its flags
    (tmp_path / "script.py").touch()
    assert ttprun.main([*arguments, "script.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ttprun: error: {line}")
    assert (len(error.splitlines()), "secret" in error.replace("SECRET", "")) == (1, False)


@pytest.mark.integration
def test_a_job_notifies_and_ends_as_it_would_without(launcher: Launcher) -> None:  # noqa: F811
    """One target answers, the other hangs."""
    with receives() as server, hangs() as url:
        targets, secret = launcher.folder / "targets", launcher.folder / "secret"
        targets.write_text(f"{server.url}\n{url}\n")
        secret.write_text(SECRET)
        for path in (targets, secret):
            path.chmod(0o600)
        flags = ("--ttp-notify", f"file:{targets}", "--ttp-notify-secret", str(secret))
        script = launcher.script(
            "import os, sys\nsys.exit(5 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
        )
        result = launcher.run("--max-restarts", "1", *flags, "--rdzv-id", "gpt", script, code=0)
        assert (
            f"TTP_NOTIFY {url.removesuffix('/hook')}: the notice 'incident' was not delivered: " in result.log
        )
        received = [server.notice() for _ in range(2)]  # the last notice may still be in flight
        assert server.got.empty()
    assert [(sent["type"], sent["job"]) for sent in received] == [("incident", "gpt"), ("ended", "gpt")]
    assert received[0]["incident"]["blamed"] == 0

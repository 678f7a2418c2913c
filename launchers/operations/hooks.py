"""The hooks of the part for operators: a process that serves the files of a job, and notices of incidents.

Notices go to the targets of TTP_NOTIFY, from the node with the controller. Each target has a queue and a
thread, after the verdict: a target that hangs or fails costs only its notices, with one line for each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import hmac
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from email.message import Message
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO

import msgspec

from adaptor import output, text, threads
from adaptor.config import Config
from adaptor.errors import AdaptorError, ConfigError
from adaptor.hooks import AgentHooks
from adaptor.launchers.operations import job_server
from adaptor.launchers.operations.job_server import JobServer
from adaptor.operations import access, settings
from adaptor.operations.settings import NoticeTarget, OperationsSettings
from adaptor.protocol.records import Notice

# The time limit of a target for a notice.
LIMIT_S = 2.0
SIGNATURE = "X-TTP-Signature"
# A notice takes at most LIMIT_S, so a full queue is an hour of a target that hangs.
_MOST_WAITING = 64


class OperationsHooks(AgentHooks):
    """TTP_SERVE and TTP_NOTIFY."""

    def __init__(self, settings: Config) -> None:
        super().__init__(settings)
        self._own = settings.of(OperationsSettings)
        self._server = JobServer(settings)
        self._notifier = Notifier()
        self._generations = 0

    def check(self, parsed: argparse.Namespace, engine: str) -> None:
        if not engine:
            job_server.require(self.settings)
            self._notifier = Notifier(targets(self._own), secret(self._own))

    def begins(self, node: int, nodes: int) -> None:
        self._generations += 1

    def has_controller(self, folder: Path, *, took_over: bool) -> None:
        """Serve the files of the job from this node; before the first workers a failure ends ttprun."""
        if took_over:
            self._server.take_over(folder)
            return
        try:
            self._server.start(folder)
        except (AdaptorError, OSError, RuntimeError) as error:
            if self._generations == 1:
                raise ConfigError(f"TTP_SERVE is {text.say(error)}") from None
            self._server.tell_why(error)

    def notify(self, make: Callable[[], Notice]) -> None:
        self._notifier.submit(make)

    def close(self) -> None:
        self._notifier.close()
        self._server.close()


def targets(config: OperationsSettings) -> list[NoticeTarget]:
    """Return the targets of notices; a file named by TTP_NOTIFY is read now.

    Raises:
        ConfigError: the file, its content, the secret or the program is wrong.
    """
    target = config.notify
    if target is None:
        return []
    notice_targets = [target] if target.kind != "file" else _read(Path(target.where))
    for notice_target in notice_targets:
        if (
            notice_target.kind == "exec"
            and shutil.which(program := shlex.split(notice_target.where)[0]) is None
        ):
            raise ConfigError(f"TTP_NOTIFY is exec:{program}: there is no such program on this node")
    return notice_targets


def secret(config: OperationsSettings) -> str:
    """Return the secret that signs notices; '' without one. Raises ConfigError."""
    if not config.notify_secret:
        return ""
    try:
        return access.read_word(Path(config.notify_secret), "TTP_NOTIFY_SECRET")
    except AdaptorError as error:
        raise ConfigError(str(error)) from None


def _read(path: Path) -> list[NoticeTarget]:
    try:
        lines = access.read_private(path, "TTP_NOTIFY").splitlines()
    except AdaptorError as error:
        raise ConfigError(str(error)) from None
    notice_targets = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            target = settings.target(line.strip())
        except ValueError:
            target = None
        if target is None or target.kind == "file":  # the message omits the line, which may be a secret
            raise ConfigError(
                f"TTP_NOTIFY {path}, line {number}: it must be {settings.TARGETS}, and no other file"
            )
        notice_targets.append(target)
    return notice_targets


class Notifier:
    """Sends notices to each target.

    Args:
        secret: signs notices to a target of JSON; '' for none.
    """

    def __init__(self, to: Sequence[NoticeTarget] = (), secret: str = "") -> None:
        self._secret = secret
        self._closed = False
        self._writers = [(target, output.Writer("ttp-notify")) for target in to]
        for _, writer in self._writers:
            writer.start()

    def submit(self, make: Callable[[], Notice]) -> None:
        """Send the notice that `make` returns, called in the thread of each target; never waits."""
        for target, writer in self._writers:
            if writer.waiting < _MOST_WAITING:
                writer.submit(partial(self._send, target, make))
            else:
                writer.dropped += 1

    @property
    def dropped(self) -> int:
        """Return the number of notices that were not queued, because the queue was full."""
        return sum(writer.dropped for _, writer in self._writers)

    def close(self) -> None:
        """Wait for notices in progress, at most `output.DRAIN_S` seconds; the rest is not sent."""
        until = time.monotonic() + output.DRAIN_S
        for _, writer in self._writers:
            writer.close(max(0.0, until - time.monotonic()))
        self._closed = True

    def _send(self, target: NoticeTarget, make: Callable[[], Notice]) -> None:
        if self._closed:
            return
        # In a thread of its own, not of the reserve: it may hang.
        notice = make()
        sending = threads.start(partial(deliver, target, notice, self._secret), "ttp-notify-send")
        try:
            if sending is not None:
                sending.result(LIMIT_S)
                return
            problem = "no thread can be had"
        except concurrent.futures.TimeoutError:
            problem = f"no answer within {LIMIT_S:g} s"
        except NotDeliveredError as error:
            problem = str(error)
        except Exception as error:
            problem = text.describe(error)
        if not self._closed:
            output.tell(f"[ttp] TTP_NOTIFY {target}: the notice {notice.type!r} was not delivered: {problem}")


class NotDeliveredError(Exception):
    """A target has not accepted a notice; the message is the reason, without the target."""


def deliver(target: NoticeTarget, notice: Notice, secret: str = "") -> None:
    """Deliver a notice. The caller limits the time: a name server may hang.

    Args:
        target: the target.
        notice: the notice.
        secret: signs the body for a target of JSON; '' for no signature.

    Raises:
        NotDeliveredError: the target has not accepted the notice.
    """
    body = msgspec.json.encode(notice)
    if target.kind == "exec":
        _run(shlex.split(target.where), body)
        return
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"ttp-adaptor/{metadata.version('ttp-adaptor')}",
    }
    if target.kind == "slack":
        body = json.dumps({"text": notice.text}).encode()
    elif secret:
        headers[SIGNATURE] = signature(secret, body)
    _post(urllib.request.Request(target.where, body, headers, method="POST"))


def signature(secret: str, body: bytes) -> str:
    """Return the header that proves to a receiver that the sender has the secret."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a notice is for the named target, and a redirected POST would become a GET."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def _post(request: urllib.request.Request) -> None:
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=LIMIT_S):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise NotDeliveredError(f"it answered {error.code}") from None
    except urllib.error.URLError as error:
        raise NotDeliveredError(str(getattr(error.reason, "strerror", None) or error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotDeliveredError(str(error) or type(error).__name__) from None


def _run(command: list[str], body: bytes) -> None:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise NotDeliveredError(f"it cannot be started ({error.strerror})") from None
    try:
        process.communicate(body, LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its child processes
        process.wait()
        raise NotDeliveredError(f"it had not ended after {LIMIT_S:g} s") from None
    if process.returncode:
        raise NotDeliveredError(f"it ended with status {process.returncode}")

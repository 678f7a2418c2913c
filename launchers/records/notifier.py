"""Sends notices of incidents to the targets of TTP_NOTIFY, from the node with the controller.

Each target has a queue and a thread, after the verdict: a target that hangs or fails costs only its notices,
with one line for each.
"""

from __future__ import annotations

import shlex
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from adaptor import endpoints, output, text
from adaptor.config import Config
from adaptor.endpoints import NoticeTarget
from adaptor.errors import AdaptorError, ConfigError
from adaptor.operations import access, notices
from adaptor.operations.records import Notice

# A notice takes at most LIMIT_S, so a full queue is an hour of a target that hangs.
_MOST_WAITING = 64


def targets(config: Config) -> list[NoticeTarget]:
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


def secret(config: Config) -> str:
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
            target = endpoints.target(line.strip())
        except ValueError:
            target = None
        if target is None or target.kind == "file":  # the message omits the line, which may be a secret
            raise ConfigError(
                f"TTP_NOTIFY {path}, line {number}: it must be {endpoints.TARGETS}, and no other file"
            )
        notice_targets.append(target)
    return notice_targets


def of_job(config: Config) -> Notifier:
    """Return the notifier of the settings. Raises ConfigError."""
    return Notifier(targets(config), secret(config))


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
        problems: list[str] = [f"no answer within {notices.LIMIT_S:g} s"]
        notice = make()
        sends = threading.Thread(target=_try, args=(target, notice, self._secret, problems), daemon=True)
        try:
            sends.start()
        except RuntimeError as error:  # no more threads for this process
            problems = [str(error)]
        else:
            sends.join(notices.LIMIT_S)
        if problems and not self._closed:
            output.tell(
                f"[ttp] TTP_NOTIFY {target}: the notice {notice.type!r} was not delivered: {problems[0]}"
            )


def _try(target: NoticeTarget, notice: Notice, secret: str, problems: list[str]) -> None:
    """Deliver a notice; leave the reason of a failure in `problems`, nothing after success."""
    try:
        notices.deliver(target, notice, secret)
    except Exception as error:
        problems[:] = [
            text.describe(error) if not isinstance(error, notices.NotDeliveredError) else str(error)
        ]
    else:
        problems.clear()

"""The settings for operators: the address at which a job is served, and the targets of notices."""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from adaptor.setting_values import NotShownError, Setting, path

_HOST = re.compile(r"[\w.-]{1,253}")


class HostPort(NamedTuple):
    """An address of this machine: a name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def address(text: str) -> HostPort | None:
    """Return the address named by `[HOST:]PORT`; the default HOST is 127.0.0.1; None for ''.

    Raises:
        ValueError: the text names no address.
    """
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) < 1 << 16:
        raise ValueError
    if not colon:
        return HostPort("127.0.0.1", int(port))
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif not _HOST.fullmatch(host):
        raise ValueError
    return HostPort(host, int(port))


TARGETS = "https://..., slack:https://..., exec:COMMAND or file:PATH"


class NoticeTarget(NamedTuple):
    """The targets of notices of incidents.

    Attributes:
        kind: json, slack: an URL; exec: a command line; file: a file with a target in each line
    """

    kind: str
    where: str

    def __str__(self) -> str:
        """Return the printable part: paths of URLs and arguments of commands may be secrets and are left
        out.
        """
        if self.kind == "exec":
            return f"exec:{shlex.split(self.where)[0]}"
        if self.kind not in ("json", "slack"):
            return f"{self.kind}:{self.where}"
        parts = urlsplit(self.where)
        return f"{parts.scheme}://{parts.netloc}"


def target(text: str) -> NoticeTarget | None:
    """Return the target named by a text; None for ''.

    Raises:
        ValueError: the text names no target.
    """
    if not text:
        return None
    kind, _, target_place = text.partition(":")
    if kind == "exec":
        if not shlex.split(target_place):
            raise ValueError
        return NoticeTarget(kind, target_place)
    if kind == "file":
        if not target_place:
            raise ValueError
        return NoticeTarget(kind, target_place)
    if kind != "slack":
        kind, target_place = "json", text
    parts = urlsplit(target_place)
    parts.port  # noqa: B018  # raises where it is none
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError
    if not target_place.isascii() or not target_place.isprintable() or " " in target_place:
        raise ValueError
    return NoticeTarget(kind, target_place)


def notice_target(text: str) -> NoticeTarget | None:
    """Do not print a text that is no target: an URL of Slack is a secret."""
    try:
        return target(text)
    except ValueError:
        raise (NotShownError if "/" in text else ValueError) from None


@dataclass(frozen=True)
class OperationsSettings:
    """The settings for operators (`Config.of`)."""

    serve: HostPort | None
    serve_token: str
    notify: NoticeTarget | None
    notify_secret: str


SETTINGS = (
    Setting(
        "serve",
        "TTP_SERVE",
        "",
        "[HOST:]PORT",
        address,
        "the node with the controller serves the page, metrics and files of the job at [HOST:]PORT, "
        "read-only; without HOST on 127.0.0.1. Another HOST needs TTP_SERVE_TOKEN, TTP_TLS_CERT and "
        "TTP_TLS_KEY",
        group="For operators",
        needs_agent=True,
    ),
    Setting(
        "serve_token",
        "TTP_SERVE_TOKEN",
        "",
        "the path of a file",
        path,
        "a file with the word that clients of TTP_SERVE must send, which its owner alone can read",
        group="For operators",
    ),
    Setting(
        "notify",
        "TTP_NOTIFY",
        "",
        TARGETS,
        notice_target,
        "where notices of incidents, of training that goes on, and of the end are sent: JSON to an URL, a"
        " message to Slack, JSON on the stdin of a command, or several of these, one in each line of a file",
        group="For operators",
        needs_agent=True,
    ),
    Setting(
        "notify_secret",
        "TTP_NOTIFY_SECRET",
        "",
        "the path of a file",
        path,
        "a file with a word, which its owner alone can read: it signs notices of JSON (HMAC-SHA256)",
        group="For operators",
    ),
)

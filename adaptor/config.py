"""All settings of the adaptor: one table, read once, one frozen result.

Every setting is an environment variable and a `ttprun` flag; the flag wins. `ttprun` writes what it was
given back into the environment of the workers, so that a worker reads the same values.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adaptor.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """What the user chose. Times are seconds."""

    enabled: bool
    timeout_s: float
    grace_s: float
    hang_s: float
    port: int
    tls: str
    tls_cert: str
    tls_key: str
    tls_ca: str
    device: str
    engine: str
    replica: str
    local_copy: bool
    provide_mindio: bool
    log_path: str
    log_level: str
    log_stdout: bool


@dataclass(frozen=True)
class Setting:
    """One row of the table: where a field of `Config` comes from and what it may be."""

    field: str
    variable: str
    default: str
    allowed: str
    parse: Callable[[str], Any]
    help: str

    @property
    def flag(self) -> str:
        return "--ttp-" + self.variable.removeprefix("TTP_").removesuffix("_TTP").lower().replace("_", "-")


def _truth(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("true", "1"):
        return True
    if lowered in ("false", "0"):
        return False
    raise ValueError


def _number(low: float, high: float, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def _zero_or(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: 0.0 if text.strip() == "0" else parse(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def _folder(text: str) -> str:
    if not text:
        raise ValueError
    return text


_PEM = "a PEM file"

SETTINGS = (
    Setting(
        "enabled",
        "ENABLE_TTP",
        "True",
        "True, 1, False or 0",
        _truth,
        "False is plain torchrun and the plain framework",
    ),
    Setting(
        "timeout_s",
        "TTP_OT",
        "120",
        "a number of seconds from 10 to 3600",
        _number(10, 3600, float),
        "how long an incident may last, besides the time in which the save makes progress",
    ),
    Setting(
        "grace_s",
        "TTP_GRACE",
        "25",
        "a number of seconds from 1 to 3600",
        _number(1, 3600, float),
        "how long a save may take when ttprun is told to end (SIGTERM, Ctrl-C), before it ends all the same",
    ),
    Setting(
        "hang_s",
        "TTP_HANG",
        "120",
        "0, or a number of seconds from 1 to 86400",
        _zero_or(_number(1, 86400, float)),
        "a step that takes longer than this and than three of the slowest recent ones is a hang; 0: none is",
    ),
    Setting(
        "port",
        "TTP_PORT",
        "8000",
        "a port from 1 to 65535",
        _number(1, 65535, int),
        "where the controller listens for agents of other nodes; taken: the next free one",
    ),
    Setting(
        "tls",
        "TTP_TLS",
        "mutual",
        "mutual or plain",
        _one_of("mutual", "plain"),
        "agents on several machines speak TLS 1.3, both with certificates; plain: unencrypted, inside "
        "a trusted network",
    ),
    Setting("tls_cert", "TTP_TLS_CERT", "", _PEM, str, "the certificate of this node"),
    Setting("tls_key", "TTP_TLS_KEY", "", _PEM, str, "the private key of TTP_TLS_CERT, without a passphrase"),
    Setting("tls_ca", "TTP_TLS_CA", "", _PEM, str, "who has signed the certificates of all nodes"),
    Setting(
        "device",
        "TTP_DEVICE",
        "",
        "cpu, or nothing for the accelerator that the framework finds",
        _one_of("", "cpu"),
        "cpu runs the framework's torch.cuda calls on the CPU and its collectives on gloo",
    ),
    Setting(
        "engine",
        "TTP_ENGINE",
        "builtin",
        "builtin or mindio",
        _one_of("builtin", "mindio"),
        "who notices a fault and chooses what is saved; mindio: the installed mindio_ttp, see docs/mindio.md",
    ),
    Setting(
        "replica",
        "TTP_REPLICA",
        "auto",
        "auto, split, mirror or none",
        _one_of("auto", "split", "mirror", "none"),
        "where second copies of optimizer shards live; auto is split where the data-parallel size is even, "
        "else mirror",
    ),
    Setting(
        "local_copy",
        "TTP_LOCAL_COPY",
        "False",
        "True, 1, False or 0",
        _truth,
        "True: each rank copies its optimizer state before an update, in place of a barrier of all ranks",
    ),
    Setting(
        "provide_mindio",
        "TTP_PROVIDE_MINDIO",
        "False",
        "True, 1, False or 0",
        _truth,
        "True: for a script that was adapted to MindIO TTP by hand; importing mindio_ttp, which is not "
        "installed, finds the adaptor's, and no framework is patched",
    ),
    Setting("log_path", "TTP_LOG_PATH", "logs", "a folder", _folder, "where logs and incident reports go"),
    Setting(
        "log_level",
        "TTP_LOG_LEVEL",
        "INFO",
        "DEBUG, INFO, WARNING or ERROR",
        lambda text: _one_of("DEBUG", "INFO", "WARNING", "ERROR")(text.upper()),
        "how much the log file holds",
    ),
    Setting(
        "log_stdout", "TTP_LOG_STDOUT", "0", "True, 1, False or 0", _truth, "the log goes to stdout, too"
    ),
)


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read all settings.

    Raises:
        ConfigError: a value makes no sense; the message names the variable, the value and what it may be.
    """
    source = os.environ if environ is None else environ
    values = {}
    for setting in SETTINGS:
        text = source.get(setting.variable, setting.default)
        try:
            values[setting.field] = setting.parse(text)
        except ValueError:
            raise ConfigError(f"{setting.variable} is {text!r}: it must be {setting.allowed}") from None
    made = Config(**values)
    _require_one_kind_of_connection(made)
    _require_one_engine(made)
    return made


# Of 1. What a user mistypes is above it; the variables of MindIO's SDK, of our own and of Kubernetes (for a
# service that is called ttp) are below 0.75.
_ALIKE = 0.85


def refuse_misspelt(environ: Mapping[str, str]) -> None:
    """A variable that is almost one of ours would do nothing, and nobody would notice.

    Raises:
        ConfigError: there is one; the message names it, its value and the one that was meant.
    """
    settings = {_in_order(setting.variable): setting.variable for setting in SETTINGS}
    for name in sorted(environ):
        if "TTP" not in name.upper().split("_") or name in settings.values():
            continue
        for meant in difflib.get_close_matches(_in_order(name), settings, 1, _ALIKE):
            raise ConfigError(
                f"{name} is {environ[name]!r}: there is no such setting; {settings[meant]} is one"
            )


def _in_order(name: str) -> str:
    """TTP_ENABLE is as good a guess as ENABLE_TTP."""
    return "_".join(sorted(name.upper().split("_")))


def _require_one_engine(made: Config) -> None:
    if made.engine == "builtin":
        return
    if made.provide_mindio:
        raise ConfigError(
            "TTP_ENGINE is 'mindio', but TTP_PROVIDE_MINDIO is True: one of them is for an installed"
            " mindio_ttp, the other for none; leave one out"
        )
    if made.tls_cert:
        raise ConfigError(
            f"TTP_ENGINE is 'mindio', but TTP_TLS_CERT is {made.tls_cert!r}: connections of mindio_ttp are"
            " not encrypted; inside a trusted network leave out the certificates, and set TTP_TLS=plain"
        )


def _require_one_kind_of_connection(made: Config) -> None:
    files = {"TTP_TLS_CERT": made.tls_cert, "TTP_TLS_KEY": made.tls_key, "TTP_TLS_CA": made.tls_ca}
    given = [name for name, path in files.items() if path]
    missing = [name for name, path in files.items() if not path]
    if given and missing:
        raise ConfigError(
            f"{given[0]} is {files[given[0]]!r}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: "
            f"TLS needs all three of {', '.join(files)}"
        )
    if given and made.tls == "plain":
        raise ConfigError(
            f"TTP_TLS is 'plain', but {given[0]} is {files[given[0]]!r}: "
            "leave out TTP_TLS, or the certificates"
        )

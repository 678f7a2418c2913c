"""Settings and their values: each function reads a text, and raises ValueError where it makes no sense."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptor import endpoints
from adaptor.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A row of `config.SETTINGS`: the variable behind a field of `Config`, and its allowed values.

    Attributes:
        repeats: the flag may be given several times; the variable has its values with a line break between
        same_on_all_nodes: it decides for the whole job: nodes with different values are refused before
            workers start (launchers/rendezvous/agreement.py)
    """

    field: str
    variable: str
    default: str
    allowed: str
    parse: Callable[[str], object]
    help: str
    repeats: bool = False
    same_on_all_nodes: bool = False

    @property
    def flag(self) -> str:
        """Return the flag of ttprun."""
        return "--ttp-" + self.variable.removeprefix("TTP_").removesuffix("_TTP").lower().replace("_", "-")


def truth(text: str) -> bool:
    """Return whether a text says True or 1; False or 0."""
    lowered = text.strip().lower()
    if lowered in ("true", "1"):
        return True
    if lowered in ("false", "0"):
        return False
    raise ValueError


def number(low: float, high: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads a number of this `kind` from `low` to `high`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def zero_or(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads 0, or what `parse` reads."""
    return lambda text: 0.0 if text.strip() == "0" else parse(text)


def auto_or(parse: Callable[[str], float]) -> Callable[[str], float | None]:
    """Return what reads `auto` as None, or what `parse` reads."""
    return lambda text: None if text == "auto" else parse(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return what takes one of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def path(text: str) -> str:
    """Refuse the text of a key or certificate where the path of its file belongs."""
    if "\n" in text or "-----" in text:
        raise NotShownError
    return text


def new_file(text: str) -> str:
    """Refuse a file that cannot be there: the job would end without it."""
    if text and (not text.strip() or Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise ValueError
    return text


def store_url(text: str) -> str:
    """Refuse credentials in the URL: it is shown in messages. The rest is checked where it is opened."""
    if "@" in text:
        raise NotShownError
    return text


@dataclass(frozen=True)
class Pull:
    """The objects below a URL, and the folder that they are brought to."""

    url: str
    folder: str


def pulls(text: str) -> tuple[Pull, ...]:
    """Return what `s3://bucket/data=/cache/data` says, several of them with white space between.

    The folder is what follows the last `=`: prefixes such as `date=2026` have others.
    """
    parts = re.split(r"\s+(?=[^\s/=]*://)", text.strip()) if text.strip() else []
    if any("@" in re.sub("^[^/]*://", "", word).partition("/")[0] for word in parts):
        raise NotShownError
    pulls_found = []
    for word in parts:
        url, _, folder = word.rpartition("=")
        if "://" not in url or not folder or "://" in folder or not word.isprintable():
            raise ValueError
        pulls_found.append(Pull(url, folder))
    return tuple(pulls_found)


def rate(text: str) -> int:
    """Return the bytes of a second that a text such as 200M says."""
    match = re.fullmatch(r"([0-9]{1,12})([kKMG]?)", text.strip())
    if match is None:
        raise ValueError
    return int(match[1]) * {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]]


def endpoint(text: str) -> str:
    """Refuse credentials in the URL: it is shown in messages."""
    if "@" in text:
        raise NotShownError
    if text and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise ValueError
    return text.rstrip("/")


class NotShownError(ValueError):
    """A value makes no sense, and may be a secret."""


def notice_target(text: str) -> endpoints.NoticeTarget | None:
    """Do not show what is no target: an URL of Slack is a secret."""
    try:
        return endpoints.target(text)
    except ValueError:
        raise (NotShownError if "/" in text else ValueError) from None


def folders(text: str) -> tuple[str, ...]:
    """Return the folders of a text, one in each line."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def folder(text: str) -> str:
    """Refuse an empty name."""
    if not text:
        raise ValueError
    return text


@dataclass(frozen=True)
class Reshape:
    """The tensor and pipeline parallel sizes that a model gets where those of the arguments do not fit.

    Attributes:
        tp, pp: 0 and 0: they are chosen (`auto`)
    """

    tp: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp}" if self.tp else "auto"


def reshape(text: str) -> Reshape | None:
    """Return what `no`, `auto` or `tp=2,pp=1` says."""
    if text in ("no", "auto"):
        return Reshape() if text == "auto" else None
    match = re.fullmatch(r"tp=([1-9][0-9]{0,4}),pp=([1-9][0-9]{0,4})", text)
    if match is None:
        raise ValueError
    return Reshape(int(match[1]), int(match[2]))


def require_one_kind_of_connection(tls: str, files: Mapping[str, str]) -> None:
    """Refuse some of the three files of TLS, and all of them with TTP_TLS=plain.

    Args:
        tls: the value of TTP_TLS.
        files: their variables and paths; '' where there is none.

    Raises:
        ConfigError: names the variables.
    """
    given = [name for name, path in files.items() if path]
    missing = [name for name, path in files.items() if not path]
    if given and missing:
        raise ConfigError(
            f"{given[0]} is {files[given[0]]!r}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: "
            f"TLS needs all three of {', '.join(files)}"
        )
    if given and tls == "plain":
        raise ConfigError(
            f"TTP_TLS is 'plain', but {given[0]} is {files[given[0]]!r}: "
            "leave out TTP_TLS, or the certificates"
        )

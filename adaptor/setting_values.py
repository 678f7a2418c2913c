"""Settings and their values: each function parses a text, and raises ValueError for a text without sense."""

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
        repeats: the flag may be given several times; the variable has its values with line breaks between
        same_on_all_nodes: the value holds for the whole job: nodes with different values are refused before
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
    """Return a parser of numbers of this `kind` from `low` to `high`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def zero_or(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return a parser of 0, and of the texts of `parse`."""
    return lambda text: 0.0 if text.strip() == "0" else parse(text)


def auto_or(parse: Callable[[str], float]) -> Callable[[str], float | None]:
    """Return a parser of `auto` as None, and of the texts of `parse`."""
    return lambda text: None if text == "auto" else parse(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def path(text: str) -> str:
    """Refuse the text of a key or certificate in the place of a file's path."""
    if "\n" in text or "-----" in text:
        raise NotShownError
    return text


def new_file(text: str) -> str:
    """Refuse a file that cannot exist: the job would end without the file."""
    if text and (not text.strip() or Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise ValueError
    return text


def store_url(text: str) -> str:
    """Refuse credentials in the URL: messages show the URL. The rest is checked when the store is opened."""
    if "@" in text:
        raise NotShownError
    return text


@dataclass(frozen=True)
class Pull:
    """The objects below a URL, and their local folder."""

    url: str
    folder: str


def pulls(text: str) -> tuple[Pull, ...]:
    """Return the pulls of a text such as `s3://bucket/data=/cache/data`, separated by white space.

    The folder follows the last `=`: prefixes such as `date=2026` contain further ones.
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
    """Return the bytes per second of a text such as 200M."""
    match = re.fullmatch(r"([0-9]{1,12})([kKMG]?)", text.strip())
    if match is None:
        raise ValueError
    return int(match[1]) * {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]]


def endpoint(text: str) -> str:
    """Refuse credentials in the URL: messages show the URL."""
    if "@" in text:
        raise NotShownError
    if text and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise ValueError
    return text.rstrip("/")


class NotShownError(ValueError):
    """A value makes no sense, and may be a secret."""


def notice_target(text: str) -> endpoints.NoticeTarget | None:
    """Do not print a text that is no target: an URL of Slack is a secret."""
    try:
        return endpoints.target(text)
    except ValueError:
        raise (NotShownError if "/" in text else ValueError) from None


def folders(text: str) -> tuple[str, ...]:
    """Return the folders of a text, one folder in each line."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def folder(text: str) -> str:
    """Refuse an empty name."""
    if not text:
        raise ValueError
    return text


@dataclass(frozen=True)
class Reshape:
    """The tensor and pipeline parallel sizes of a model if the sizes of the arguments do not fit.

    Attributes:
        tp, pp: 0 and 0: chosen by the adaptor (`auto`)
    """

    tp: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp}" if self.tp else "auto"


def reshape(text: str) -> Reshape | None:
    """Return the value of `no`, `auto` or `tp=2,pp=1`."""
    if text in ("no", "auto"):
        return Reshape() if text == "auto" else None
    match = re.fullmatch(r"tp=([1-9][0-9]{0,4}),pp=([1-9][0-9]{0,4})", text)
    if match is None:
        raise ValueError
    return Reshape(int(match[1]), int(match[2]))


def require_one_kind_of_connection(tls: str, files: Mapping[str, str]) -> None:
    """Refuse an incomplete set of the three files of TLS, and any of the files with TTP_TLS=plain.

    Args:
        tls: the value of TTP_TLS.
        files: their variables and paths; '' for a missing file.

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

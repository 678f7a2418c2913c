"""Settings and their values: each function parses a text, and raises ValueError for a text without sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptor.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A setting: the variable behind a field of `Config`, and its allowed values.

    Attributes:
        repeats: the flag may be given several times; the variable has its values with line breaks between
        same_on_all_nodes: the value holds for the whole job: nodes with different values are refused before
            workers start (launchers/rendezvous/agreement.py)
        needs_agent: it needs the adaptor's own agent and controller (TTP_ENGINE=builtin)
        group: the title in `ttprun --help`, for a setting of an optional part
        inline: returns the text that workers get in place of the user's
        require: takes the `Config`; raises ConfigError if the value contradicts other settings
    """

    field: str
    variable: str
    default: str
    allowed: str
    parse: Callable[[str], object]
    help: str
    repeats: bool = False
    same_on_all_nodes: bool = False
    needs_agent: bool = False
    group: str = ""
    inline: Callable[[str], str] | None = None
    require: Callable[[Any], None] | None = None

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


# The allowed texts of a setting, and their parser.
Values = tuple[str, Callable[[str], object]]
TRUTH: Values = "True, 1, False or 0", truth


def one_of(*choices: str) -> Values:
    """Return `choices` in words, and their parser."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return f"{', '.join(choices[:-1])} or {choices[-1]}", parse


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


class NotShownError(ValueError):
    """A value makes no sense, and may be a secret."""


def folder(text: str) -> str:
    """Refuse an empty name."""
    if not text:
        raise ValueError
    return text


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

"""The values of TTP_PROFILE and TTP_DUMP: which steps of which ranks are recorded, and which data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from adaptor.errors import ConfigError
from adaptor.setting_values import Setting

# The statistics of a tensor, in the order of computation and output.
Statistic = Literal["min", "max", "mean", "norm", "nan", "inf"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
_PAIR = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)
_LONGEST_FILE = 1 << 16  # bytes; it becomes a variable of the environment
_MOST_MIB = 1 << 20
_SHOWN = 80  # characters of a value in a line that refuses it


@dataclass(frozen=True)
class Ranges:
    """Whole numbers, in the form `0,8-15`.

    Raises:
        ValueError: the text is no such list.
    """

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Ranges:
        """Return the ranges in a text such as `0,10-12`. Raises ValueError."""
        pairs = []
        for part in text.split(","):
            match = _PAIR.fullmatch(part)
            if match is None:
                raise ValueError(f"{part.strip()!r} is no number and no range like 10-12")
            low = int(match[1])
            high = int(match[2] or low)
            if high < low:
                raise ValueError(f"the range {part.strip()} ends before it begins")
            pairs.append((low, high))
        return cls(tuple(pairs))

    def __contains__(self, number: int) -> bool:
        return any(low <= number <= high for low, high in self.pairs)

    def __str__(self) -> str:
        return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in self.pairs)

    @property
    def first(self) -> int:
        """Return the lowest number."""
        return min(low for low, _ in self.pairs)

    @property
    def last(self) -> int:
        """Return the highest number."""
        return max(high for _, high in self.pairs)


@dataclass(frozen=True)
class Profile:
    """TTP_PROFILE: the steps from the first to the last of `steps`, on each rank of `ranks`, in one trace."""

    steps: Ranges
    ranks: Ranges


@dataclass(frozen=True)
class DumpRequest:
    """TTP_DUMP: values of the tensors of each step of `steps`, on each rank of `ranks`.

    Attributes:
        modules: patterns of names of modules and parameters, as of files: `decoder.layers.0.*`
        stats: the statistics of each tensor; empty: the tensors themselves
        limit: the largest number of MiB per rank
    """

    steps: Ranges
    ranks: Ranges
    modules: tuple[str, ...]
    stats: tuple[Statistic, ...]
    limit: int


class _DumpContent(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of TTP_DUMP."""

    steps: int | str | list[int]
    ranks: int | str | list[int] = 0
    modules: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("*",)
    stats: Annotated[tuple[Statistic, ...], msgspec.Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET
    tensors: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MOST_MIB)] = 1024


def profile(text: str) -> Profile | None:
    """Return the request of a text such as `steps=10-12,ranks=0`, None for an empty text.

    Raises:
        ConfigError: the text is invalid; the message names the error.
    """
    if not text.strip():
        return None
    values: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        key, is_pair, value = part.partition("=")
        if is_pair:
            name = key.strip()
            if name not in ("steps", "ranks"):
                raise _refusal("TTP_PROFILE", text, f"it has no {name!r}, only steps and ranks")
            if name in values:
                raise _refusal("TTP_PROFILE", text, f"it has {name} twice")
            values[name] = value
        elif name:
            values[name] += f",{part}"
        else:
            raise _refusal("TTP_PROFILE", text, "it must be like steps=10-12,ranks=0")
    try:
        if "steps" not in values:
            raise ValueError("steps are missing, as in steps=10-12,ranks=0")
        steps = Ranges.parse(values["steps"])
        if len(steps.pairs) > 1:
            raise ValueError(
                "steps must be one number or one range: a trace has steps that follow each other"
            )
        return Profile(_steps(steps), Ranges.parse(values.get("ranks", "0")))
    except ValueError as error:
        raise _refusal("TTP_PROFILE", text, str(error)) from None


def dump(text: str) -> DumpRequest | None:
    """Return the request of the JSON file `text`, or of the JSON in `text` if it begins with `{`.

    Raises:
        ConfigError: the request is unreadable or invalid; the message names the error.
    """
    if not text.strip():
        return None
    try:
        content = msgspec.json.decode(_content(text), type=_DumpContent)
        if content.tensors and content.stats is not msgspec.UNSET:
            raise ValueError('it has "stats" and "tensors": leave out one of them')
        stats = () if content.tensors else STATISTICS
        return DumpRequest(
            steps=_steps(_ranges(content.steps)),
            ranks=_ranges(content.ranks),
            modules=content.modules,
            stats=stats if content.stats is msgspec.UNSET else content.stats,
            limit=content.limit,
        )
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        reason = "the file is no text"
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        reason = str(error)
    raise _refusal("TTP_DUMP", text, reason)


def inline(text: str) -> str:
    """Return the content of the JSON file `text`, which workers get in place of the name.

    A worker that starts later then needs no file.
    """
    return _content(text) if text.strip() else text


def _content(text: str) -> str:
    if text.lstrip().startswith("{"):
        return text
    path = Path(text)
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > _LONGEST_FILE:
        raise ValueError(f"the file has more than {_LONGEST_FILE} bytes")
    return path.read_text(encoding="utf-8")


def _ranges(value: int | str | list[int]) -> Ranges:
    return Ranges.parse(",".join(map(str, value)) if isinstance(value, list) else str(value))


def _steps(steps: Ranges) -> Ranges:
    if steps.first < 1:
        raise ValueError("steps begin at 1")
    return steps


def _refusal(variable: str, text: str, reason: str) -> ConfigError:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    reason = " ".join(reason.splitlines())
    return ConfigError(f"{variable} is {shown!r}: {reason if len(reason) < 400 else reason[:400] + '...'}")


@dataclass(frozen=True)
class RecordingSettings:
    """The settings of recordings (`Config.of`)."""

    profile: Profile | None
    dump: DumpRequest | None


SETTINGS = (
    Setting(
        "profile",
        "TTP_PROFILE",
        "",
        "like steps=10-12,ranks=0",
        profile,
        "like steps=10-12,ranks=0: a trace of these steps by torch.profiler, on these ranks (0 by default), "
        "in the log folder",
        group="Logs and recordings",
    ),
    Setting(
        "dump",
        "TTP_DUMP",
        "",
        "a JSON file",
        dump,
        "a JSON file (steps, ranks, modules, stats or tensors, limit): values of what modules compute in "
        "these steps, and of gradients, in the log folder",
        group="Logs and recordings",
        inline=inline,
    ),
)

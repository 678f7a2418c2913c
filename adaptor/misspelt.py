"""Names that are almost those of settings: variables and flags."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from adaptor.config import SETTINGS
from adaptor.errors import ConfigError

# The similarity, of 1, from which a name counts as mistyped. Variables of MindIO's SDK, our own internal ones
# and those of Kubernetes (for a service that is called ttp) are at most 0.8.
_ALIKE = 0.85
# A flag that does not exist is refused in any case, so the name that was meant may differ more.
_ALIKE_FLAGS = 0.7
_PREFIX = "--ttp-"


def refuse(environ: Mapping[str, str]) -> None:
    """Refuse a variable whose name is almost that of a setting: it would be ignored without notice.

    Raises:
        ConfigError: there is one; the message names it and the one that was meant.
    """
    variables = [setting.variable for setting in SETTINGS]
    for name in sorted(environ):
        if "TTP" not in name.upper().split("_") or name in variables:
            continue
        if meant := _nearest(name.upper(), variables, _ALIKE):
            # Without its value: it is not ours, and may be a secret.
            raise ConfigError(f"{name} is set: there is no such setting; {meant} is one")


def flag_meant(flag: str, flags: Iterable[str]) -> str:
    """Return the one of `flags` that a misspelt `flag` is most like; '' where it is like none."""
    prefix = _PREFIX if flag.startswith(_PREFIX) else ""  # the same letters in all would make all alike
    words = {_words(each, prefix): each for each in flags if each.startswith(prefix)}
    return words.get(_nearest(_words(flag, prefix), words, _ALIKE_FLAGS), "")


def _words(flag: str, prefix: str) -> str:
    return flag.removeprefix(prefix).lstrip("-").replace("-", "_")


def _nearest(name: str, names: Iterable[str], least: float) -> str:
    """Return the one of `names` that is most like `name`; '' where none is at least so much like it."""
    likeness, nearest = max((_likeness(name, each), each) for each in names)
    return nearest if likeness >= least else ""


def _likeness(name: str, variable: str) -> float:
    """Return how alike they are, of 1, as they stand or with their words in order: TTP_LOCALCOPY is found as
    TTP_LOCAL_COPY, TTP_ENABLE as ENABLE_TTP."""
    pairs = ((name, variable), (_in_order(name), _in_order(variable)))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _in_order(name: str) -> str:
    return "_".join(sorted(name.split("_")))

"""Misspelt names of settings: variables and flags."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from adaptor import config
from adaptor.errors import ConfigError

# The least similarity, of 1, of a misspelt variable. Variables of MindIO's SDK, internal variables of the
# adaptor and variables of Kubernetes (for a service with the name ttp) have at most 0.8.
_ALIKE = 0.85
# An unknown flag is refused in any case, so the suggestion may differ more.
_ALIKE_FLAGS = 0.7
_PREFIX = "--ttp-"


def refuse(environ: Mapping[str, str]) -> None:
    """Refuse a variable with almost the name of a setting: such a variable would be ignored without notice.

    Raises:
        ConfigError: `environ` has such a variable; the message names the variable and the setting.
    """
    variables = [setting.variable for setting in config.settings()]
    for name in sorted(environ):
        if "TTP" not in name.upper().split("_") or name in variables:
            continue
        if meant := _nearest(name.upper(), variables, _ALIKE):
            # Without the value, which may be a secret of another program.
            raise ConfigError(f"{name} is set: there is no such setting; {meant} is one")


def flag_meant(flag: str, flags: Iterable[str]) -> str:
    """Return the flag in `flags` most similar to a misspelt `flag`; "" if none is similar."""
    prefix = _PREFIX if flag.startswith(_PREFIX) else ""  # a common prefix would make all flags similar
    words_of_flags = {_words(option, prefix): option for option in flags if option.startswith(prefix)}
    return words_of_flags.get(_nearest(_words(flag, prefix), words_of_flags, _ALIKE_FLAGS), "")


def _words(flag: str, prefix: str) -> str:
    return flag.removeprefix(prefix).lstrip("-").replace("-", "_")


def _nearest(name: str, names: Iterable[str], least: float) -> str:
    """Return the name in `names` most similar to `name`; "" if none has the similarity `least`."""
    likeness, nearest = max((_likeness(name, candidate), candidate) for candidate in names)
    return nearest if likeness >= least else ""


def _likeness(name: str, variable: str) -> float:
    """Return the similarity of two names, of 1, with their words in the given or in alphabetical order.

    So TTP_LOCALCOPY is similar to TTP_LOCAL_COPY, and TTP_ENABLE to ENABLE_TTP.
    """
    pairs = ((name, variable), (_in_order(name), _in_order(variable)))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _in_order(name: str) -> str:
    return "_".join(sorted(name.split("_")))

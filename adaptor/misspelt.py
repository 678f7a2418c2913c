"""Variables that are almost settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from adaptor.config import SETTINGS
from adaptor.errors import ConfigError

# The similarity, of 1, from which a name counts as mistyped. Variables of MindIO's SDK, our own internal ones
# and those of Kubernetes (for a service that is called ttp) are at most 0.8.
_ALIKE = 0.85


def refuse(environ: Mapping[str, str]) -> None:
    """Refuse a variable whose name is almost that of a setting: it would be ignored without notice.

    Raises:
        ConfigError: there is one; the message names it and the one that was meant.
    """
    variables = [setting.variable for setting in SETTINGS]
    for name in sorted(environ):
        if "TTP" not in name.upper().split("_") or name in variables:
            continue
        likeness, meant = max((_likeness(name.upper(), variable), variable) for variable in variables)
        if likeness >= _ALIKE:
            # Without its value: it is not ours, and may be a secret.
            raise ConfigError(f"{name} is set: there is no such setting; {meant} is one")


def _likeness(name: str, variable: str) -> float:
    """Return how alike they are, of 1, as they stand or with their words in order: TTP_LOCALCOPY is found as
    TTP_LOCAL_COPY, TTP_ENABLE as ENABLE_TTP."""
    pairs = ((name, variable), (_in_order(name), _in_order(variable)))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _in_order(name: str) -> str:
    return "_".join(sorted(name.split("_")))

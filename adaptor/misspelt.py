"""Variables that are almost settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from adaptor.config import SETTINGS
from adaptor.errors import ConfigError

# The similarity, of 1, from which a name counts as mistyped. Variables of MindIO's SDK, our own internal ones
# and those of Kubernetes (for a service that is called ttp) are below 0.75.
_ALIKE = 0.85


def refuse(environ: Mapping[str, str]) -> None:
    """Refuse a variable whose name is almost that of a setting: it would be ignored without notice.

    Raises:
        ConfigError: there is one; the message names it and the one that was meant.
    """
    settings = {_in_order(setting.variable): setting.variable for setting in SETTINGS}
    for name in sorted(environ):
        if "TTP" not in name.upper().split("_") or name in settings.values():
            continue
        for meant in difflib.get_close_matches(_in_order(name), settings, 1, _ALIKE):
            # Without its value: it is not ours, and may be a secret.
            raise ConfigError(f"{name} is set: there is no such setting; {settings[meant]} is one")


def _in_order(name: str) -> str:
    """Return `name` with its words sorted, so that TTP_ENABLE is found as ENABLE_TTP."""
    return "_".join(sorted(name.upper().split("_")))

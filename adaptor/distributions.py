"""Another distribution with the import name of this one: each overwrites files of the other."""

from __future__ import annotations

import sys
from importlib import metadata

from adaptor.errors import ConfigError

OURS = "ttp-adaptor"
_SAME_NAME = "adaptor"  # of the package index; it is about language models


def conflict() -> str:
    """Return the line about the other distribution, '' where it is not installed.

    Raises:
        ConfigError: its `adaptor/__init__.py` stands in the place of ours, or has gone along with it.
    """
    try:
        other = f"{_SAME_NAME} {metadata.version(_SAME_NAME)}"
    except metadata.PackageNotFoundError:
        other = ""
    remedy = f"uninstall both, then install {OURS} again"
    if not hasattr(sys.modules["adaptor"], "enable"):
        who = f"the distribution {other} has replaced it" if other else "another distribution took it along"
        raise ConfigError(f"adaptor/__init__.py is not that of {OURS}, {who}: {remedy}")
    if not other:
        return ""
    return (
        f"the distribution {other} is installed, which has the import name of {OURS}: each overwrites files"
        f" of the other; {remedy}"
    )

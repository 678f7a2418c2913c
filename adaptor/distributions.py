"""How to install the adaptor, and whether another distribution with the same import name is installed.

The adaptor is on no package index, and anybody may register its name there. No message names the adaptor in a
`pip install`.
"""

from __future__ import annotations

import sys
from importlib import metadata

from adaptor.errors import ConfigError

OURS = "ttp-adaptor"
_SAME_NAME = "adaptor"  # a project of the package index that has nothing to do with this one


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f"run pip install '.[{extra}]' in the folder of the adaptor's sources"


def conflict() -> str:
    """Return the line about the other distribution, '' if not installed.

    Raises:
        ConfigError: our `adaptor/__init__.py` was overwritten, or was removed when the other was uninstalled.
    """
    try:
        other_version = f"{_SAME_NAME} {metadata.version(_SAME_NAME)}"
    except metadata.PackageNotFoundError:
        other_version = ""
    remedy = "uninstall both, then install the adaptor again: pip install . in the folder of its sources"
    if not hasattr(sys.modules["adaptor"], "enable"):
        location = (
            f"the distribution {other_version} has replaced it"
            if other_version
            else "it was removed together with another distribution"
        )
        raise ConfigError(f"adaptor/__init__.py is not that of {OURS}, {location}: {remedy}")
    if not other_version:
        return ""
    return (
        f"the distribution {other_version} is installed, which has the import name of {OURS}: each "
        "overwrites files"
        f" of the other; {remedy}"
    )

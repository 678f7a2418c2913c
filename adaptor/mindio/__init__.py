"""The interface of MindIO TTP on this engine, for scripts that were adapted to MindIO TTP by hand.

A script imports the package `provided/mindio_ttp`, which holds names only. `interface` has the functions in
both forms, `job` translates their calls for the engine, `trainee` dumps by the script's handlers. The
functions and their limits: docs/mindio.md.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from adaptor.errors import ConfigError

NAME = "mindio_ttp"
_FOLDER = str(Path(__file__).with_name("provided"))


def provide() -> None:
    """Let `import mindio_ttp` import the package here; repeated calls have no effect.

    Raises:
        ConfigError: another mindio_ttp is installed, which would save in place of this engine.
    """
    if _FOLDER in sys.path:
        return
    installed = importlib.util.find_spec(NAME)
    if installed is not None:
        raise ConfigError(
            f"TTP_PROVIDE_MINDIO is True, but {NAME} is installed ({installed.origin or 'a folder'}): "
            "uninstall it, or leave TTP_PROVIDE_MINDIO out and use the ttprun that came with it"
        )
    sys.path.append(_FOLDER)  # last: never before an installed one


def withdraw() -> None:
    """Undo `provide`; imported names stay."""
    if _FOLDER not in sys.path:
        return
    sys.path.remove(_FOLDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]

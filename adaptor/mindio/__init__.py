"""The interface of MindIO TTP on this engine, for scripts that were adapted to it by hand.

`provided/mindio_ttp` is what such a script imports; it holds names only. Behind them: `older` and `newer` are
the two forms of the interface, `job` is what both do on the engine, `trainee` what a dump does with the
script's handlers. Which function does what, and which does not: docs/mindio.md.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from adaptor.errors import ConfigError

NAME = "mindio_ttp"
_FOLDER = str(Path(__file__).with_name("provided"))


def provide() -> None:
    """Let `import mindio_ttp` find this package's; twice is once.

    Raises:
        ConfigError: one is installed. It would save beside this engine, which then has nothing to save.
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
    """Undo `provide`; names that were imported stay what they are."""
    if _FOLDER not in sys.path:
        return
    sys.path.remove(_FOLDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]

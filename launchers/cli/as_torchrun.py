"""Runs `ttprun` in the place of torchrun, where a framework itself starts torchrun (TTP_TORCHRUN=1).

torch imports the entry points of the group `torchrun.handlers` when its launcher is imported: in the program
`torchrun` and in `python -m torch.distributed.run`, before they read their flags. In other processes that
import `torch.distributed.elastic` the module does nothing, and imports nothing else of the adaptor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

VARIABLE = "TTP_TORCHRUN"
# The working directory is not on the path, as for the installed program.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path)\n"
    "from adaptor.launchers.cli.entry import main; sys.exit(main())"
)


def handler() -> Callable[[object], NoReturn]:
    """Replace the process by `ttprun` if the process is torchrun and TTP_TORCHRUN is set.

    Returns:
        A rendezvous backend factory for torch, which makes no backend.
    """
    if VARIABLE in os.environ and _is_torchrun() and _is_wanted(os.environ[VARIABLE]):
        environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
        os.execve(sys.executable, [sys.executable, "-c", _PROGRAM, *sys.argv[1:]], environment)
    return _refuse


def _is_torchrun() -> bool:
    from adaptor.protocol.environment import AGENT

    if AGENT in os.environ:  # a torchrun that the script of a rank starts belongs to that script
        return False
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path(sys.argv[0]).name == "torchrun" or getattr(spec, "name", "") == "torch.distributed.run"


def _is_wanted(text: str) -> bool:
    from adaptor.setting_values import truth

    try:
        return truth(text)
    except ValueError:
        sys.exit(f"torchrun: error: {VARIABLE} is {text!r}: it must be True, 1, False or 0")


def _refuse(_parameters: object) -> NoReturn:
    raise ValueError("ttp is no rendezvous backend: TTP_TORCHRUN=1 lets ttprun take the place of torchrun")

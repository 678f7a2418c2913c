"""Runs ttprun as a spare node; the first to take a place is killed before it connects to the controller."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import wrapt

sys.path.append(str(Path(__file__).resolve().parents[2]))

from adaptor.launchers.cli import ttprun
from adaptor.launchers.spares import spare_node


def _is_first() -> bool:
    """Return whether no other spare node of the job has taken a place."""
    try:
        (Path(os.environ["TTP_LOG_PATH"]) / "first_place").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> int:
    def dies(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        taken = wrapped(*args, **kwargs)
        if taken is not None and _is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        return taken

    wrapt.wrap_function_wrapper(spare_node, "wait", dies)
    return ttprun.main()


if __name__ == "__main__":
    sys.exit(main())

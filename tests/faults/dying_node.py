"""Runs ttprun as a node and kills the node just before the restart of its workers.

At the kill the previous controller has ended, and the agent has not connected to the next controller.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import wrapt

sys.path.append(str(Path(__file__).resolve().parents[2]))

from adaptor.launchers.agent.elastic_agent import SurvivorsAgent
from adaptor.launchers.cli import ttprun


def main() -> int:
    starts = 0

    def dies(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        nonlocal starts
        starts += 1
        if starts == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(SurvivorsAgent, "_start_workers", dies)
    return ttprun.main()


if __name__ == "__main__":
    sys.exit(main())

"""Runs ttprun as a spare node; when the first one takes a place, it is killed, or node 0 is.

The first argument says which. The spare node's agent has not connected to the controller yet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import wrapt

sys.path.append(str(Path(__file__).resolve().parents[2]))

from adaptor.launchers.cli import ttprun
from adaptor.launchers.spares import spare_node
from adaptor.protocol import naming

SPARE, NODE_0 = "the-spare-node", "node-0"


def _is_first() -> bool:
    """Return whether no other spare node of the job has taken a place."""
    try:
        (Path(os.environ["TTP_LOG_PATH"]) / "first_place").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _pid_of_node_0() -> int:
    """Return the process that has the lease of the save folder."""
    lease = Path(sys.argv[sys.argv.index("--save") + 1]) / naming.LEASE
    return int(json.loads(lease.read_text())["pid"])


def main() -> int:
    killed = sys.argv.pop(1)

    def dies(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        taken = wrapped(*args, **kwargs)
        if taken is not None and _is_first():
            os.kill(os.getpid() if killed == SPARE else _pid_of_node_0(), signal.SIGKILL)
        return taken

    wrapt.wrap_function_wrapper(spare_node, "wait", dies)
    return ttprun.main()


if __name__ == "__main__":
    sys.exit(main())

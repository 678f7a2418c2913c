"""A process that has imported what the workers have, and waits to take the place of one that dies.

    python .../spare_main.py [--module] script [arguments]

Its stdin is a unix socket to the agent, which says what to import, and later with which environment to be a
worker; then this process goes on as `worker_main.py` does from its first line. It is started by its path, as
`worker_main.py` is.
"""

from __future__ import annotations

import sys

from adaptor import _script


def main() -> None:
    """Wait to be a worker, and be one."""
    _script.leave_own_path()
    from adaptor.launchers.agent import worker_main
    from adaptor.launchers.spares import spare_imports

    worker_main.die_with_the_agent()
    arguments = sys.argv[1:]
    spare_imports.wait_to_be_a_worker(arguments)
    worker_main.run(arguments)


if __name__ == "__main__":
    main()

"""A process that has imported the modules of the workers, and waits to take the place of a dead worker.

    python .../spare_main.py [--module] script [arguments]

Stdin is a unix socket to the agent, which sends the imports, and later the environment of a worker; then the
process goes on like `worker_main.py` from its first line. The program is started by its path, as
`worker_main.py` is.
"""

from __future__ import annotations

import sys

from adaptor import _script


def main() -> None:
    """Wait to be a worker, then run as a worker."""
    _script.leave_own_path()
    from adaptor.launchers.agent import worker_main
    from adaptor.launchers.spares import spare_imports

    worker_main.die_with_the_agent()
    arguments = sys.argv[1:]
    spare_imports.wait_to_be_a_worker(arguments)
    worker_main.run(arguments)


if __name__ == "__main__":
    main()

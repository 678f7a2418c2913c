"""The command `ttp`: the files of jobs (`adaptor.operations.cli`), doctor, plan and store.

Ctrl-C ends the command silently from the beginning, also during its imports. So the module imports nothing
that Python has not imported by then (see `entry`).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from adaptor.operations import cli

_SIGINT = 2  # `signal` may not be imported yet


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    try:
        from adaptor.operations import cli

        return cli.main(arguments, _add)
    except KeyboardInterrupt:
        return 128 + _SIGINT


def _add(add_command: cli.Add) -> None:
    from adaptor.launchers.cli import completion, plan
    from adaptor.launchers.doctor import doctor_command
    from adaptor.operations import cli
    from adaptor.store import command as store

    plan.add(add_command)
    completion.add(add_command, lambda: cli.parser_of(_add))
    doctor_command.add(add_command)
    store.add(add_command)


if __name__ == "__main__":
    sys.exit(main())

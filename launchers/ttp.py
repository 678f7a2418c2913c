"""The command `ttp`: the files of jobs (`adaptor.operations.cli`); doctor, plan and store beside them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from adaptor.launchers import completion, doctor, plan
from adaptor.operations import cli
from adaptor.store import command as store


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question; return the exit code."""
    return cli.main(arguments, _add)


def _add(add_command: cli.Add) -> None:
    plan.add(add_command)
    completion.add(add_command, lambda: cli.parser_of(_add))
    doctor.add(add_command)
    store.add(add_command)


if __name__ == "__main__":
    sys.exit(main())

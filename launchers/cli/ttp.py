"""The command `ttp`: plan and completion, and the commands of optional parts and plug-ins.

Ctrl-C ends the command silently from the beginning, also during its imports. So the module imports nothing
that Python has not imported by then (see `entry`).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from adaptor.terminal import Answer

_SIGINT = 2  # `signal` may not be imported yet


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    Args:
        arguments: of the command line; by default this process's.
    """
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return 128 + _SIGINT


def _main(arguments: Sequence[str] | None) -> int:
    from adaptor import output
    from adaptor.errors import AdaptorError
    from adaptor.terminal import USAGE, exit_code_of

    try:
        parsed = parser().parse_args(arguments)
        return exit_code_of(lambda: parsed.answer(parsed), "ttp")
    except AdaptorError as error:
        print(f"ttp: error: {error}", file=sys.stderr)
        return USAGE
    finally:
        output.finish()


def parser() -> argparse.ArgumentParser:
    """Return the parser of `ttp`. Raises StartError where a plug-in cannot be loaded."""
    import argparse
    from importlib import metadata
    from typing import Any

    from adaptor import plug_ins
    from adaptor.launchers.cli import completion, plan

    parser = argparse.ArgumentParser(
        prog="ttp",
        allow_abbrev=False,
        description="What ttprun has written about its jobs, and whether a node is fit for one.",
        epilog="exit codes: 0, all is well; 1, a finding; 2, bad usage, or nothing to read",
    )
    parser.add_argument("--version", action="version", version=f"ttp {metadata.version('ttp-adaptor')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, answer: Answer, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, allow_abbrev=False, help=help_text, description=help_text)
        command.set_defaults(answer=answer)
        return command

    plan.add(add)
    completion.add(add, lambda: parser)
    for add_commands in plug_ins.load_all(plug_ins.COMMANDS):
        contributed: Any = add_commands
        contributed(add)
    return parser


if __name__ == "__main__":
    sys.exit(main())

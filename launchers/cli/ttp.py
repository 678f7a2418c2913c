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
# The ends of the names of arguments for which a folder, or a file, is completed.
_FOLDERS = ("log_path", "log_dir", "save", "where")
_FILES = ("_file", "_cert", "_key", "_ca", "_token", "_secret", "out", "training_script", "dump")


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
    from adaptor.launchers.cli import plan
    from adaptor.terminal import OK

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

    def complete(parsed: argparse.Namespace) -> int:
        print(completion(parsed.shell, parser))
        return OK

    command = add(
        "completion", complete, "print what bash or zsh needs to complete the flags of ttp and ttprun"
    )
    command.epilog = (
        'in ~/.bashrc: eval "$(ttp completion bash)"; in ~/.zshrc, behind compinit: the same with zsh'
    )
    command.add_argument("shell", choices=("bash", "zsh"))
    for add_commands in plug_ins.load_all(plug_ins.COMMANDS):
        contributed: Any = add_commands
        contributed(add)
    return parser


def completion(shell: str, ttp: argparse.ArgumentParser) -> str:
    """Return the script that completes the flags of `ttp` and `ttprun` in bash or zsh.

    Raises:
        ConfigError: shtab is not installed.
    """
    from adaptor import plug_ins
    from adaptor.errors import ConfigError
    from adaptor.launchers.cli import flags

    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError(f"ttp completion needs shtab: {plug_ins.install_command('ops')}") from None
    scripts = []
    for parser in (ttp, flags.whole_parser()):
        for action in _actions(parser):
            if action.nargs == 0:
                continue
            name = action.dest.lower()
            if name.endswith(_FOLDERS):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # as shtab has it
            elif name.endswith(_FILES):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        scripts.append(shtab.complete(parser, shell=shell))
    return "\n".join(scripts)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions of a parser and of its commands."""
    import argparse

    actions = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                actions += _actions(command)
    return actions


if __name__ == "__main__":
    sys.exit(main())

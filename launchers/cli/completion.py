"""`ttp completion`: prints the shell script that completes the flags of `ttp` and `ttprun`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from adaptor import distributions
from adaptor.errors import ConfigError
from adaptor.launchers.cli import flags
from adaptor.terminal import OK, Add

# The ends of the names of arguments for which a folder, or a file, is completed.
_FOLDERS = ("log_path", "log_dir", "save", "where")
_FILES = ("_file", "_cert", "_key", "_ca", "_token", "_secret", "out", "training_script", "dump")


def add(add_command: Add, ttp: Callable[[], argparse.ArgumentParser]) -> None:
    """Add the command to `ttp`.

    Args:
        ttp: returns the parser of `ttp`, with the command.
    """

    def answer(parsed: argparse.Namespace) -> int:
        print(script(parsed.shell, ttp()))
        return OK

    parser = add_command(
        "completion", answer, "print what bash or zsh needs to complete the flags of ttp and ttprun"
    )
    parser.epilog = (
        'in ~/.bashrc: eval "$(ttp completion bash)"; in ~/.zshrc, behind compinit: the same with zsh'
    )
    parser.add_argument("shell", choices=("bash", "zsh"))


def script(shell: str, ttp: argparse.ArgumentParser) -> str:
    """Return the script for a shell.

    Args:
        shell: bash or zsh.

    Raises:
        ConfigError: shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError(f"ttp completion needs shtab: {distributions.install_command('ops')}") from None
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
    actions = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                actions += _actions(command)
    return actions

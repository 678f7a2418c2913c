"""The flags of ttprun: `--ttp-*` and all those of the installed torch's torchrun.

Ours are taken out before torch's parser sees the rest, so that they make no abbreviation of a flag of
torchrun ambiguous. Only those before the script are ours; where the script stands torch's parser tells.
"""

from __future__ import annotations

import argparse
import os

from adaptor import config
from adaptor.errors import ConfigError

_PREFIX = "--ttp"
_ANY = "0"  # an argument that any parser takes for a script, or for the value of a flag


def parse(arguments: list[str]) -> argparse.Namespace:
    """What torch's parser makes of `arguments` without our flags, which go into the environment.

    There the workers find them. Raises ConfigError for a flag of ours that there is not, or without a value.
    """
    from torch.distributed.run import get_args_parser

    ours, torchs = _ours(), get_args_parser()
    torchs.prog = "ttprun"
    torchs.formatter_class = argparse.RawDescriptionHelpFormatter  # the epilog has its lines already
    torchs.epilog = ours.format_help()
    mine, rest = _split(arguments, torchs)
    _require_known(mine)
    try:
        given = vars(ours.parse_args(mine))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    parsed = torchs.parse_args(rest)
    os.environ.update({variable: value for variable, value in given.items() if value is not None})
    return parsed


def _ours() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False, exit_on_error=False
    )
    group = parser.add_argument_group("ttp", "fault tolerance; each flag wins over its environment variable")
    for setting in config.SETTINGS:
        group.add_argument(
            setting.flag,
            dest=setting.variable,
            metavar=setting.variable,
            help=f"{setting.help}; {setting.allowed} (default {setting.default or 'none'})",
        )
    return parser


def _split(arguments: list[str], torchs: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Our flags before the script, each with its value, and all the rest."""
    mine: list[str] = []
    before: list[str] = []
    rest = list(arguments)
    while rest and rest[0] != "--":  # no flags after it
        if not rest[0].startswith(_PREFIX):
            before.append(rest.pop(0))
            continue
        if not _comes_before_the_script(before, torchs):
            break
        takes = 1 if "=" in rest[0] else 2
        mine += rest[:takes]
        del rest[:takes]
    return mine, before + rest


def _comes_before_the_script(before: list[str], torchs: argparse.ArgumentParser) -> bool:
    """Whether the next argument could still be the script, so that a flag there is for ttprun."""
    parsed = torchs.parse_args([*before, _ANY, _ANY])
    return [parsed.training_script, *parsed.training_script_args] == [_ANY, _ANY]


def _require_known(mine: list[str]) -> None:
    known = [setting.flag for setting in config.SETTINGS]
    for flag in (argument.partition("=")[0] for argument in mine if argument.startswith(_PREFIX)):
        if flag not in known:
            raise ConfigError(f"there is no flag {flag}: there are {', '.join(known)}")

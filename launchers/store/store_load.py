"""`--load s3://bucket/run7` in the arguments of a script: the checkpoint to pull, and the target folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptor.errors import ConfigError, StoreError
from adaptor.protocol.start_options import START_ONLY
from adaptor.store import address

# Options with which a run begins a new count of steps from a checkpoint. The pulled checkpoint comes to the
# save folder, where a restart would go on from its step, and a saved step with a smaller number would never
# be named. `--ckpt-step` names the pulled step.
_BEGINS_ANEW = [f"--{name.replace('_', '-')}" for name in START_ONLY if name != "ckpt_step"]
_SIZES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
# Options with which ranks have other numbers, or sizes are set elsewhere.
_NUMBERS_OTHERWISE = ("--use-tp-pp-dp-mapping", "--encoder-", "--yaml-cfg", "--use-checkpoint-args")


@dataclass(frozen=True)
class Load:
    """The checkpoint that the script is to load.

    Attributes:
        step: the value of --ckpt-step, None without
        sizes: tensor and pipeline parallel sizes, if ranks are numbered in the framework's default way
    """

    url: str
    save: Path
    step: int | None
    sizes: tuple[int, int] | None = None


def take(parsed: argparse.Namespace) -> Load | None:
    """Return the checkpoint to load from a store, and let the script load from its save folder instead.

    Args:
        parsed: the arguments of ttprun; the script's arguments are changed.

    Raises:
        ConfigError: the URL is wrong, no save folder is set, or the script is to begin from the checkpoint.
    """
    arguments: list[str] = parsed.training_script_args
    url = _value(arguments, "--load")
    if url is None or url.partition("://")[0] not in address.SCHEMES or "://" not in url:
        return None
    try:
        place = str(address.parse(url))
    except StoreError as error:
        raise ConfigError(f"--load: {error}") from None
    save, step = _value(arguments, "--save"), _value(arguments, "--ckpt-step")
    if not save or "://" in save:
        raise ConfigError(f"--load is {place}: it is pulled to the folder of --save, and that is missing")
    if step is not None and not (step.isascii() and step.isdigit()):
        raise ConfigError(f"--ckpt-step is {step!r}: it must be a number from 0 on")
    for name in _BEGINS_ANEW:
        if any(argument == name or argument.startswith(f"{name}=") for argument in arguments):
            raise ConfigError(
                f"--load is {place} with {name}: what is pulled comes to the folder of --save, and a job "
                f"goes on from it; bring it to another folder (ttp store pull {place} FOLDER), and give that "
                "as --load"
            )
    parsed.training_script_args = _replaced(arguments, "--load", save)
    return Load(url, Path(save), int(step) if step is not None else None, _sizes(parsed.training_script_args))


def _sizes(arguments: Sequence[str]) -> tuple[int, int] | None:
    if any(argument.startswith(_NUMBERS_OTHERWISE) for argument in arguments):
        return None
    size_texts = [_value(arguments, name) or "1" for name in _SIZES]
    if not all(size.isascii() and size.isdigit() and int(size) for size in size_texts):
        return None
    tensor, pipeline = map(int, size_texts)
    return tensor, pipeline


def _value(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, as argparse does."""
    value_text = None
    for number, argument in enumerate(arguments):
        if argument == name and number + 1 < len(arguments):
            value_text = arguments[number + 1]
        elif argument.startswith(f"{name}="):
            value_text = argument.partition("=")[2]
    return value_text


def _replaced(arguments: Sequence[str], name: str, value: str) -> list[str]:
    new_arguments, skips = [], False
    for argument in arguments:
        if skips:
            new_arguments.append(value)
        elif argument.startswith(f"{name}="):
            new_arguments.append(f"{name}={value}")
        else:
            new_arguments.append(argument)
        skips = not skips and argument == name
    return new_arguments

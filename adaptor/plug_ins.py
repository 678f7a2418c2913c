"""Plug-ins: what installed distributions add to the adaptor, found through entry points (docs/plug_ins.md).

The devices, engines and checkpoint formats of the adaptor itself are declared in the same way, in its
pyproject.toml. Finding a plug-in imports nothing of it.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint, distributions

from adaptor.errors import ConfigError, StartError

# Modules that declare patches of group `ttp` (`adaptor.patching`).
PATCHES = "ttp_adaptor.patches"
# By the names of torch's kinds of devices, or of TTP_DEVICE: classes (`adaptor.devices.device.DeviceKind`).
DEVICES = "ttp_adaptor.devices"
# By their names in TTP_ENGINE: classes (`adaptor.engines.Engine`).
ENGINES = "ttp_adaptor.engines"
# By their names in --ckpt-format and `adaptor.protect`: what makes a `CheckpointFormat`
# (`adaptor.checkpoint.training_state.FormatFactory`).
FORMATS = "ttp_adaptor.formats"

_OWN = "ttp-adaptor"


def declared(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, by name.

    Those of every distribution on the path: `importlib.metadata.entry_points` takes the first one alone of
    several with the same name, which may be what a build has left in the working directory.
    """
    return tuple(entry_point for entry_point in _installed(tuple(sys.path)) if entry_point.group == group)


@functools.lru_cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return all entry points, sorted; a worker asks eight times as it starts, and every file is read for it.

    Args:
        path: where `distributions` looks now: `sys.path`.
    """
    entry_points = {
        (entry_point.group, entry_point.name, entry_point.value): entry_point
        for distribution in distributions(path=list(path))
        for entry_point in distribution.entry_points
    }
    return tuple(entry_points[key] for key in sorted(entry_points))


def names(group: str) -> tuple[str, ...]:
    """Return the names that a user may choose from."""
    return tuple(dict.fromkeys(entry_point.name for entry_point in declared(group)))


def choose(group: str, name: str, setting: str, otherwise: str) -> object:
    """Import what is installed under a name that the user has given.

    Args:
        group: of entry points.
        name: what the user has given.
        setting: where, as a variable or a flag.
        otherwise: what the user can do who wants none of those that are there, for the message.

    Raises:
        ConfigError: there is none of this name; the message names those that there are.
        StartError: there are two, or it cannot be imported.
    """
    matching = [entry_point for entry_point in declared(group) if entry_point.name == name]
    if not matching:
        _require_own(group)
        raise ConfigError(
            f"{setting} is {name!r}: it must be one of {', '.join(names(group))}, {otherwise};"
            f" a plug-in could add it ({group})"
        )
    if len(matching) > 1:
        raise StartError(
            f"{setting} is {name!r}: {' and '.join(map(_owner, matching))} both have a plug-in of that name;"
            " uninstall one of them"
        )
    return load(matching[0])


def load(plug_in: EntryPoint) -> object:
    """Import what an entry point names. Raises StartError, in one line, where that fails."""
    try:
        loaded: object = plug_in.load()
    except Exception as error:  # whatever somebody else's module raises
        owner = _owner(plug_in)
        raise StartError(
            f"the plug-in {plug_in.name} of {owner} cannot be loaded ({plug_in.value}:"
            f" {type(error).__name__}: {error}); repair it, or uninstall {owner}"
        ) from error
    return loaded


def _owner(plug_in: EntryPoint) -> str:
    return plug_in.dist.name if plug_in.dist is not None else "an unknown distribution"


def _require_own(group: str) -> None:
    """Tell an installation that is older than its sources, or none at all, from a wrong name."""
    if not any(_owner(entry_point) == _OWN for entry_point in declared(group)):
        raise StartError(
            f"{_OWN} is installed without its own entry points ({group}), or is older than its sources:"
            " install it again (from a checkout: pip install -e .)"
        )

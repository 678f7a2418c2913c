"""Plug-ins: extensions of the adaptor by installed distributions, by entry points (docs/plug_ins.md).

The adaptor's own devices, engines and checkpoint formats are declared in the same way, in its pyproject.toml.
The search imports nothing of a plug-in.
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

    The entry points of every distribution on the path count: `importlib.metadata.entry_points` keeps only the
    first of several distributions with the same name, which may be a build's left-over in the working
    directory.
    """
    return tuple(entry_point for entry_point in _installed(tuple(sys.path)) if entry_point.group == group)


@functools.lru_cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return all entry points, sorted; a starting worker asks eight times, and each search reads every file.

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
    """Return the names available to a user."""
    return tuple(dict.fromkeys(entry_point.name for entry_point in declared(group)))


def choose(group: str, name: str, setting: str, otherwise: str) -> object:
    """Import the plug-in of a name set by the user.

    Args:
        group: of entry points.
        name: the name.
        setting: where, as a variable or a flag.
        otherwise: the user's alternative to the installed plug-ins, for the message.

    Raises:
        ConfigError: the name is not installed; the message lists the installed names.
        StartError: the name is installed twice, or cannot be imported.
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
    """Import the object of an entry point. Raises StartError, in one line, on failure."""
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
    """Distinguish an outdated or missing installation from a wrong name."""
    if not any(_owner(entry_point) == _OWN for entry_point in declared(group)):
        raise StartError(
            f"{_OWN} is installed without its own entry points ({group}), or is older than its sources:"
            " install it again (from a checkout: pip install -e .)"
        )

"""Plug-ins: parts that installed distributions add to the adaptor, found through entry points.

The devices, engines and checkpoint formats of the adaptor itself are declared in its pyproject.toml, as those
of a plug-in are (docs/plug_ins.md). `OPTIONAL_PARTS` declares the optional parts of the adaptor by the same
groups: the core imports none of them, and works without them. Finding a plug-in imports nothing of it.
Also how to install the adaptor, and whether another distribution with the same import name is installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import EntryPoint
from importlib.util import find_spec

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

# Tuples of `adaptor.setting_values.Setting`.
SETTINGS = "ttp_adaptor.settings"
# Functions that add commands to `ttp` (`adaptor.terminal.Add`).
COMMANDS = "ttp_adaptor.commands"
# Subclasses of `adaptor.hooks.AgentHooks`, for each ttprun.
AGENT_HOOKS = "ttp_adaptor.agent_hooks"
# Subclasses of `adaptor.hooks.WorkerHooks`, for each worker.
WORKER_HOOKS = "ttp_adaptor.worker_hooks"
# Functions that add commands to `python -m adaptor`, as subparsers with the default `answer`.
MODULE_COMMANDS = "ttp_adaptor.module_commands"

# The parts of the adaptor that a job can do without; a part that is not installed adds nothing.
OPTIONAL_PARTS = {
    FORMATS: {"mcore_adapter": "adaptor.adapters.mcore_adapter:make"},
    SETTINGS: {
        "operations": "adaptor.operations.settings:SETTINGS",
        "store": "adaptor.store.settings:SETTINGS",
        "diagnostics": "adaptor.diagnostics.requests:SETTINGS",
        "transform": "adaptor.transform.sizes:SETTINGS",
        "mindio": "adaptor.mindio:SETTINGS",
    },
    COMMANDS: {
        "operations": "adaptor.operations.cli:add",
        "verify": "adaptor.operations.verify:add",
        "doctor": "adaptor.launchers.doctor.doctor_command:add",
        "store": "adaptor.store.command:add",
        "replay": "adaptor.launchers.cli.replay:add",
    },
    AGENT_HOOKS: {
        "doctor": "adaptor.launchers.doctor.doctor_command:DoctorHooks",
        "operations": "adaptor.launchers.operations.hooks:OperationsHooks",
        "store": "adaptor.launchers.store.hooks:StoreHooks",
    },
    WORKER_HOOKS: {
        "mindio": "adaptor.mindio:MindioWorkerHooks",
        "transform": "adaptor.frameworks.reshape_sizes:ReshapeHooks",
        "mindspeed": "adaptor.frameworks.mindspeed_wrappers:MindspeedHooks",
        "diagnostics": "adaptor.diagnostics.recorder:Recorder",
    },
    MODULE_COMMANDS: {"transform": "adaptor.transform.command:add"},
}
_OWN = "ttp-adaptor"
# A project of the package index with the same import name, which has nothing to do with this one.
_SAME_NAME = "adaptor"


def declared(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, by name.

    The entry points of every distribution on the path count: `importlib.metadata.entry_points` keeps only the
    first of several distributions with the same name, which may be a build's left-over in the working
    directory.
    """
    installed = _installed(tuple(sys.path))
    return _optional_parts(group) + tuple(part for part in installed if part.group == group)


@functools.lru_cache
def _optional_parts(group: str) -> tuple[EntryPoint, ...]:
    parts = (EntryPoint(name, value, group) for name, value in OPTIONAL_PARTS.get(group, {}).items())
    return tuple(part for part in parts if is_installed(part.module))


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def load_all(group: str) -> Iterator[object]:
    """Import all entry points of a group. Raises StartError where one cannot be imported."""
    return map(load, declared(group))


@functools.lru_cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return all entry points, sorted; a starting worker asks eight times, and each search reads every file.

    Args:
        path: where `metadata.distributions` looks now: `sys.path`.
    """
    entry_points = {
        (entry_point.group, entry_point.name, entry_point.value): entry_point
        for distribution in metadata.distributions(path=list(path))
        for entry_point in distribution.entry_points
    }
    return tuple(entry_points[key] for key in sorted(entry_points))


def names(group: str) -> tuple[str, ...]:
    """Return the names available to a user."""
    return tuple(dict.fromkeys(entry_point.name for entry_point in declared(group)))


def choose(group: str, name: str, setting: str, otherwise: str) -> object:
    """Import the plug-in of a name set by the user.

    Args:
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


def install_command(extra: str) -> str:
    """Return how to install the packages of an extra.

    No message names the adaptor in a `pip install`: it is on no package index, and anybody may register its
    name.
    """
    return f"run pip install '.[{extra}]' in the folder of the adaptor's sources"


def conflict() -> str:
    """Return the line about the other distribution, '' if not installed.

    Raises:
        ConfigError: our `adaptor/__init__.py` was overwritten, or was removed when the other was uninstalled.
    """
    try:
        other_version = f"{_SAME_NAME} {metadata.version(_SAME_NAME)}"
    except metadata.PackageNotFoundError:
        other_version = ""
    remedy = "uninstall both, then install the adaptor again: pip install . in the folder of its sources"
    if not hasattr(sys.modules["adaptor"], "enable"):
        location = (
            f"the distribution {other_version} has replaced it"
            if other_version
            else "it was removed together with another distribution"
        )
        raise ConfigError(f"adaptor/__init__.py is not that of {_OWN}, {location}: {remedy}")
    if not other_version:
        return ""
    return (
        f"the distribution {other_version} is installed, which has the import name of {_OWN}: each overwrites"
        f" files of the other; {remedy}"
    )

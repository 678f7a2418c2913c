"""What differs between kinds of devices.

A device is chosen by the user (`TTP_DEVICE`, `--ttp-device`), never by itself, and activated before the
framework is imported. No name means the framework's own device: nothing is touched. Importing this package
imports no torch.
"""

from __future__ import annotations

from adaptor.errors import ConfigError

NAMES = ("cpu",)


def activate(name: str) -> None:
    """Make this process run the framework on the device `name`, '' for the framework's own.

    Raises ConfigError for a name that is not known, StartError when the framework was imported already.
    """
    if not name:
        return
    if name not in NAMES:
        raise ConfigError(
            f"TTP_DEVICE is {name!r}: use one of {', '.join(NAMES)}, or nothing for the framework's own"
        )
    from adaptor.devices import cpu

    cpu.activate()


def leave(name: str) -> None:
    """The script has ended well on the device `name`: end this process as is best there; it may return."""
    if name == "cpu":
        from adaptor.devices.cpu import leaving

        leaving.leave()

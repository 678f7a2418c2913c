"""Asks this machine what is needed while a platform is read: its addresses and names, and time to wait."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from adaptor import output
from adaptor.launchers.platforms.reading import PlatformError

# Nodes of a job do not start at the same time; torch's static rendezvous waits as long for the last of them.
LIMIT_S = 600.0
# Between two looks at a file or name; before the first line about it, and between two.
LOOK_S = 0.2
FIRST_S = 1.5
AGAIN_S = 10.0


@dataclass(frozen=True)
class Machine:
    """This machine, and how a wait passes.

    Attributes:
        hostname: its name
        owns: whether an IP address is one of its own
        resolves: whether a host name has an address
        now: seconds of a clock that only goes forward
        pause: sleeps for so many seconds
        tell: shows a line to the user
    """

    hostname: str
    owns: Callable[[str], bool]
    resolves: Callable[[str], bool]
    now: Callable[[], float]
    pause: Callable[[float], None]
    tell: Callable[[str], None]

    def wait(self, awaited: Callable[[], str], limit_s: float = LIMIT_S) -> None:
        """Wait until `awaited` returns "".

        Args:
            awaited: looks, and returns what is still missing, in words.
            limit_s: seconds after which it is given up.

        Raises:
            PlatformError: it was given up.
        """
        begun_at = self.now()
        next_line = begun_at + FIRST_S
        while awaited_text := awaited():
            time_now = self.now()
            if time_now - begun_at >= limit_s:
                raise PlatformError(f"waited {limit_s:g} s for {awaited_text}")
            if time_now >= next_line:
                self.tell(f"[ttp] waiting for {awaited_text}")
                next_line = time_now + AGAIN_S
            self.pause(LOOK_S)


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(socket.gethostname(), owns, _resolves, time.monotonic, time.sleep, output.tell)


def owns(address: str) -> bool:
    """Return whether a socket can have `address`; only addresses of this machine allow it."""
    try:
        ip = ipaddress.ip_address(address)
        if ip.is_unspecified or ip.is_multicast:  # any socket can have these
            return False
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return False
    return True


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # a label of more than 63 characters raises the second
        return False
    return True

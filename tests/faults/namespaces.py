"""Two nodes with a network between them: network namespaces on this machine, joined by a pair of links."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# For the fault `cut`: the namespaces whose links are to fall silent.
VARIABLE = "TTP_TEST_NAMESPACES"
LINK = "ttp0"
# Every packet is dropped as if on its way: nobody is told, no link is down, the sender's queue is not full.
_SILENCE = ("root", "blackhole")
# A step of the tiny models takes a second, where it took a tenth of one.
_SLOW = ("root", "tbf", "rate", "30mbit", "burst", "256kb", "latency", "500ms")


@dataclass(frozen=True)
class Namespaces:
    """Their names, and the address of the first."""

    names: tuple[str, str]
    address: str

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: " ".join(self.names), "GLOO_SOCKET_IFNAME": LINK}

    def command(self, node: int) -> list[str]:
        """What goes before a command that is to run on `node`: `ip netns exec` would hide control groups."""
        return ["nsenter", f"--net=/run/netns/{self.names[node]}"]


def permitted() -> bool:
    """Whether this user, on this machine, may make namespaces."""
    try:
        name = f"ttp-{uuid.uuid4().hex[:8]}"
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def two() -> Iterator[Namespaces]:
    """Two namespaces, each with an address that the other reaches; gone afterwards."""
    mark = uuid.uuid4().hex[:8]
    names = (f"ttp-{mark}-0", f"ttp-{mark}-1")
    addresses = ("10.231.77.1", "10.231.77.2")
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        _run(
            *("ip", "link", "add", LINK, "netns", names[0], "type", "veth"),
            *("peer", "name", LINK, "netns", names[1]),
        )
        for name, address in zip(names, addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for device in ("lo", LINK):
                _run("ip", "-n", name, "link", "set", device, "up")
        yield Namespaces(names, addresses[0])
    finally:
        for name in made:
            _run("ip", "netns", "del", name)


def cut() -> None:
    """From inside: nothing gets through from now on, in either direction."""
    _let_both(*_SILENCE)


def unplug() -> None:
    """From inside: both ends of the link are down, and each kernel knows it."""
    for name in os.environ[VARIABLE].split():
        _run("ip", "-n", name, "link", "set", LINK, "down")


def heal_after(seconds: float) -> None:
    """From inside: the links carry everything again, even if this process has ended by then."""
    names = os.environ[VARIABLE].split()
    rules = [f"tc -n {name} qdisc del dev {LINK} root; ip -n {name} link set {LINK} up" for name in names]
    subprocess.Popen(
        ["sh", "-c", "; ".join([f"sleep {seconds:g}", *rules])],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the namespaces may be gone, too
    )


def cut_for(seconds: float) -> None:
    """From inside: nothing gets through for so long; afterwards the links are slow.

    By a process that goes before all others, where it may: on a busy machine the silence would become longer.
    """
    names = os.environ[VARIABLE].split()
    cut, mended = (
        [" ".join(["tc", "-n", name, "qdisc", "replace", "dev", LINK, *rule]) for name in names]
        for rule in (_SILENCE, _SLOW)
    )
    script = "; ".join(["chrt -f -p 1 $$ 2>/dev/null", *cut, f"sleep {seconds:g}", *mended])
    subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL)


def slow_down() -> None:
    """From inside: the links carry what they carry, but slowly."""
    _let_both(*_SLOW)


def _let_both(*rule: str) -> None:
    for name in os.environ[VARIABLE].split():
        _run("tc", "-n", name, "qdisc", "replace", "dev", LINK, *rule)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

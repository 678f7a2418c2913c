"""Network namespaces on this machine, joined by links: nodes with a network between them."""

from __future__ import annotations

import os
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import waiting

# For the fault `cut`: the namespaces and devices at both ends of the link that is cut.
VARIABLE = "TTP_TEST_LINKS"
LINK = "ttp0"
# Every packet is dropped as if on its way: no error is reported, no link is down, the sender's queue is not
# full.
_SILENCE = ("root", "blackhole")
# With this rule a step of the tiny models takes a second instead of a tenth.
_SLOW = ("root", "tbf", "rate", "30mbit", "burst", "256kb", "latency", "500ms")
# Pause of the shell that waits for files.
_LOOK_S = 0.05


@dataclass(frozen=True)
class Namespaces:
    """A set of joined namespaces.

    Attributes:
        names: the namespaces.
        address: the address of the first namespace.
        ends: the ends (namespace, device) of the cuttable link.
    """

    names: tuple[str, ...]
    address: str
    ends: tuple[tuple[str, str], ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each namespace."""
        return tuple(_address(number) for number in range(len(self.names)))

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: " ".join("/".join(end) for end in self.ends), "GLOO_SOCKET_IFNAME": LINK}

    def command(self, node: int) -> list[str]:
        """Return a prefix that runs a command on `node`; `ip netns exec` would hide control groups."""
        return ["nsenter", f"--net=/run/netns/{self.names[node]}"]


def permitted() -> bool:
    """Return whether the user may make namespaces on the machine."""
    try:
        name = f"ttp-{uuid.uuid4().hex[:8]}"
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def two() -> Iterator[Namespaces]:
    """Make two namespaces with addresses that reach each other, and remove them afterwards."""
    with _made(2) as names:
        _join(names[0], LINK, names[1])
        yield Namespaces(names, _address(0), tuple((name, LINK) for name in names))


@contextmanager
def star(count: int, cut: int = 1) -> Iterator[Namespaces]:
    """Make `count` namespaces around a bridge in another one; only the link of namespace `cut` can be cut."""
    with _made(count + 1) as (*names, switch):
        _run("ip", "-n", switch, "link", "add", LINK, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", LINK, "up")
        for number, name in enumerate(names):
            _join(switch, f"port{number}", name)
            _run("ip", "-n", switch, "link", "set", f"port{number}", "master", LINK, "up")
        yield Namespaces(tuple(names), _address(0), ((switch, f"port{cut}"), (names[cut], LINK)))


@contextmanager
def _made(count: int) -> Iterator[tuple[str, ...]]:
    mark = uuid.uuid4().hex[:8]
    names: list[str] = []
    try:
        for number in range(count):
            _run("ip", "netns", "add", f"ttp-{mark}-{number}")
            names.append(f"ttp-{mark}-{number}")
        yield tuple(names)
    finally:
        for name in names:
            _run("ip", "netns", "del", name)


def _join(namespace: str, device: str, peer: str) -> None:
    """Make a link from `device` of one namespace to LINK of another, and bring it up.

    Only a device named LINK gets an address, so the port of a bridge has none.
    """
    _run(
        *("ip", "link", "add", device, "netns", namespace, "type", "veth"),
        *("peer", "name", LINK, "netns", peer),
    )
    for name in (namespace, peer) if device == LINK else (peer,):
        _bring_up(name, int(name.rpartition("-")[2]))


def _bring_up(name: str, number: int) -> None:
    _run("ip", "-n", name, "addr", "add", f"{_address(number)}/24", "dev", LINK)
    for device in ("lo", LINK):
        _run("ip", "-n", name, "link", "set", device, "up")


def _address(number: int) -> str:
    return f"10.231.77.{number + 1}"


def _ends() -> list[tuple[str, str]]:
    """Return the ends of the cuttable link, from the environment of the process."""
    return [
        (name, device) for name, _, device in (end.partition("/") for end in os.environ[VARIABLE].split())
    ]


def cut() -> None:
    """Drop all packets in both directions from now on."""
    _let_both(*_SILENCE)


def unplug() -> None:
    """Set both ends of the link down, so that each kernel notices."""
    for name, device in _ends():
        _run("ip", "-n", name, "link", "set", device, "down")


def heal_after(seconds: float) -> None:
    """Mend the links after some seconds, even if this process has ended by then."""
    _heal_after_command(f"sleep {seconds:g}")


def heal_when_written(folder: Path, pattern: str, count: int) -> None:
    """Mend the links when `count` files below `folder` match `pattern`.

    The links stay cut if that takes longer than any wait of the tests for an event: the job has failed then.
    """
    turns = int(waiting.LONG_S / _LOOK_S)
    are_written = f"[ $(ls {shlex.quote(str(folder))}/{pattern} 2>/dev/null | wc -l) -ge {count} ]"
    _heal_after_command(
        f"turn=0; until {are_written}; do [ $((turn += 1)) -le {turns} ] || exit; sleep {_LOOK_S}; done"
    )


def _heal_after_command(wait: str) -> None:
    rules = [
        f"tc -n {name} qdisc del dev {device} root; ip -n {name} link set {device} up"
        for name, device in _ends()
    ]
    subprocess.Popen(
        ["sh", "-c", "; ".join([wait, *rules])],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the namespaces may have been removed
    )


def cut_for(seconds: float) -> None:
    """Cut the links for some seconds; afterwards they are slow.

    If permitted, the shell runs with real-time priority: on a busy machine the cut would take longer.
    """
    cut, mended = (
        [" ".join(["tc", "-n", name, "qdisc", "replace", "dev", device, *rule]) for name, device in _ends()]
        for rule in (_SILENCE, _SLOW)
    )
    script = "; ".join(["chrt -f -p 1 $$ 2>/dev/null", *cut, f"sleep {seconds:g}", *mended])
    subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL)


def slow_down() -> None:
    """Make the links slow; no packets are lost."""
    _let_both(*_SLOW)


def _let_both(*rule: str) -> None:
    for name, device in _ends():
        _run("tc", "-n", name, "qdisc", "replace", "dev", device, *rule)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

"""Nodes with a network between them: network namespaces on this machine, joined by links."""

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

# For the fault `cut`: namespaces and devices that are to fall silent, both ends of the link of a node.
VARIABLE = "TTP_TEST_LINKS"
LINK = "ttp0"
# Every packet is dropped as if on its way: nobody is told, no link is down, the sender's queue is not full.
_SILENCE = ("root", "blackhole")
# A step of the tiny models takes a second, where it took a tenth of one.
_SLOW = ("root", "tbf", "rate", "30mbit", "burst", "256kb", "latency", "500ms")
# Between two looks of the shell that waits for files.
_LOOK_S = 0.05


@dataclass(frozen=True)
class Namespaces:
    """Their names, the address of the first, and the ends of the link that is cut: names, devices."""

    names: tuple[str, ...]
    address: str
    ends: tuple[tuple[str, str], ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each."""
        return tuple(_address(number) for number in range(len(self.names)))

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: " ".join("/".join(end) for end in self.ends), "GLOO_SOCKET_IFNAME": LINK}

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
    with _made(2) as names:
        _join(names[0], LINK, names[1])
        yield Namespaces(names, _address(0), tuple((name, LINK) for name in names))


@contextmanager
def star(count: int, cut: int = 1) -> Iterator[Namespaces]:
    """So many namespaces around a bridge in one more; the link of namespace `cut` can be cut by itself."""
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
    made: list[str] = []
    try:
        for number in range(count):
            _run("ip", "netns", "add", f"ttp-{mark}-{number}")
            made.append(f"ttp-{mark}-{number}")
        yield tuple(made)
    finally:
        for name in made:
            _run("ip", "netns", "del", name)


def _join(one: str, device: str, other: str) -> None:
    """Lay a link from `device` of one namespace to the link of another, and give both their addresses."""
    _run(
        *("ip", "link", "add", device, "netns", one, "type", "veth"),
        *("peer", "name", LINK, "netns", other),
    )
    for name in (one, other) if device == LINK else (other,):
        _bring_up(name, int(name.rpartition("-")[2]))


def _bring_up(name: str, number: int) -> None:
    _run("ip", "-n", name, "addr", "add", f"{_address(number)}/24", "dev", LINK)
    for device in ("lo", LINK):
        _run("ip", "-n", name, "link", "set", device, "up")


def _address(number: int) -> str:
    return f"10.231.77.{number + 1}"


def _ends() -> list[tuple[str, str]]:
    """From inside: the ends of the link that can be cut."""
    return [
        (name, device) for name, _, device in (end.partition("/") for end in os.environ[VARIABLE].split())
    ]


def cut() -> None:
    """From inside: nothing gets through from now on, in either direction."""
    _let_both(*_SILENCE)


def unplug() -> None:
    """From inside: both ends of the link are down, and each kernel knows it."""
    for name, device in _ends():
        _run("ip", "-n", name, "link", "set", device, "down")


def heal_after(seconds: float) -> None:
    """From inside: the links carry everything again, even if this process has ended by then."""
    _heal_after_command(f"sleep {seconds:g}")


def heal_when_written(folder: Path, pattern: str, count: int) -> None:
    """From inside: the links carry everything again when so many files below `folder` fit the `pattern`.

    Never, if that takes longer than any wait of the tests for an event: the job has failed then.
    """
    turns = int(waiting.LONG_S / _LOOK_S)
    there = f"[ $(ls {shlex.quote(str(folder))}/{pattern} 2>/dev/null | wc -l) -ge {count} ]"
    _heal_after_command(
        f"turn=0; until {there}; do [ $((turn += 1)) -le {turns} ] || exit; sleep {_LOOK_S}; done"
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
        stderr=subprocess.DEVNULL,  # the namespaces may be gone, too
    )


def cut_for(seconds: float) -> None:
    """From inside: nothing gets through for so long; afterwards the links are slow.

    By a process that goes before all others, where it may: on a busy machine the silence would become longer.
    """
    cut, mended = (
        [" ".join(["tc", "-n", name, "qdisc", "replace", "dev", device, *rule]) for name, device in _ends()]
        for rule in (_SILENCE, _SLOW)
    )
    script = "; ".join(["chrt -f -p 1 $$ 2>/dev/null", *cut, f"sleep {seconds:g}", *mended])
    subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL)


def slow_down() -> None:
    """From inside: the links carry what they carry, but slowly."""
    _let_both(*_SLOW)


def _let_both(*rule: str) -> None:
    for name, device in _ends():
        _run("tc", "-n", name, "qdisc", "replace", "dev", device, *rule)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

"""Repeated signals that end a job."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from adaptor.launchers.rendezvous import waiting
from adaptor.launchers.rendezvous.waiting import SAME_REQUEST_S, TAKEN_S, EndRequests
from adaptor.protocol.environment import HANDLED

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def _handlers_of_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(HANDLED, raising=False)
    handlers = {number: signal.getsignal(number) for number in (*ALL, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Heard:
    """Previous signal handlers that record the time of each signal."""

    def __init__(self, *extra: signal.Signals) -> None:
        self.at: list[float] = []
        self.now = 100.0
        for number in (*ALL, *extra):
            signal.signal(number, self._hear)
        self.requests = EndRequests(lambda: self.now)
        self.requests.install()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.at.append(self.now)

    def send(self, number: signal.Signals, *times: float) -> None:
        for self.now in times:
            signal.raise_signal(number)


def test_a_sigterm_soon_after_the_first_is_the_same_request() -> None:
    """Slurm's daemon and its srun both send SIGTERM; a later SIGTERM asks for an immediate end."""
    heard = Heard()
    heard.send(signal.SIGTERM, 100.0)
    heard.requests.take()
    heard.send(signal.SIGTERM, 100.04, 100.0 + SAME_REQUEST_S / 2, 100.0 + SAME_REQUEST_S, 200.0)
    assert heard.at == [100.0, 100.0 + SAME_REQUEST_S]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGHUP, signal.SIGHUP),  # a closed terminal: from its shell, then from the kernel
        (signal.SIGTERM, signal.SIGHUP),  # systemd, with SendSIGHUP
        (signal.SIGHUP, signal.SIGTERM),
    ],
    ids=lambda number: number.name,
)
def test_a_terminal_that_is_closed_asks_once(first: signal.Signals, second: signal.Signals) -> None:
    heard = Heard()
    heard.send(first, 100.0)
    heard.requests.take()
    heard.send(second, 100.002)
    assert heard.at == [100.0]
    heard.send(second, 100.0 + SAME_REQUEST_S)
    assert heard.at == [100.0, 100.0 + SAME_REQUEST_S]


def test_a_second_ctrl_c_counts_once_the_first_is_taken() -> None:
    heard = Heard()
    heard.send(signal.SIGINT, 100.0, 100.01, 100.02)
    heard.requests.take()
    heard.send(signal.SIGINT, 100.03, 100.04, 200.0)
    assert heard.at == [100.0, 100.03]


def test_ctrl_c_counts_after_sigterm() -> None:
    heard = Heard()
    heard.send(signal.SIGTERM, 100.0)
    heard.requests.take()
    heard.send(signal.SIGINT, 100.01)
    assert heard.at == [100.0, 100.01]


def test_signals_that_the_user_has_named_are_requests_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set by --signals-to-handle; a third signal does not interrupt the end."""
    monkeypatch.setenv(HANDLED, "SIGTERM, SIGUSR1")
    heard = Heard(signal.SIGUSR1)
    heard.send(signal.SIGUSR1, 100.0, 100.01)
    heard.requests.take()
    heard.send(signal.SIGTERM, 160.0)
    heard.send(signal.SIGUSR1, 160.01)
    assert heard.at == [100.0, 160.0]


def test_a_signal_that_was_lost_on_its_way_is_raised_again() -> None:
    """If it is not raised again, the next signal counts."""
    heard = Heard()
    heard.requests.raise_again()
    assert heard.at == []
    heard.send(signal.SIGINT, 100.0)
    heard.requests.raise_again()
    heard.send(signal.SIGINT, 100.0 + TAKEN_S)
    assert heard.at == [100.0, 100.0, 100.0 + TAKEN_S]
    heard.requests.take()
    heard.requests.raise_again()
    assert len(heard.at) == 3


def test_the_handler_precedes_the_handler_of_each_start() -> None:
    heard: list[str] = []
    request = EndRequests(lambda: 0.0)
    for name in ("first", "second"):
        signal.signal(signal.SIGTERM, lambda number, frame, name=name: heard.append(name))
        request.install()
        request.install()  # not twice
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["second"]


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    EndRequests().install()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_no_signal_interrupts_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the line the next signal ends the rest at once; nohup may have SIGHUP ignored."""
    monkeypatch.setenv(HANDLED, "SIGHUP,SIGUSR1,SIGKILL,SIGNAL")
    heard = Heard(signal.SIGUSR1)
    waiting.ignore_signals()
    for number in (*ALL, signal.SIGUSR1):
        heard.send(number, 100.0)
    waiting.hear_signals()
    heard.send(signal.SIGHUP, 101.0)
    with pytest.raises(SignalException) as raised:
        signal.raise_signal(signal.SIGTERM)
    heard.send(signal.SIGINT, 102.0)
    assert (raised.value.sigval, heard.at) == (signal.SIGTERM, [])


def test_a_terminal_that_is_closed_after_the_last_line_ends_the_process() -> None:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    waiting.hear_signals()
    with pytest.raises(SignalException):
        signal.raise_signal(signal.SIGHUP)

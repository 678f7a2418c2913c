"""Signals that end a job, and come more than once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from adaptor.launchers.end_requests import SAME_SIGTERM_S, TAKEN_S, EndRequests

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def _handlers_of_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Heard:
    """What the handlers before which ours stand have heard: the time, at each signal."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.now = 100.0
        for number in ALL:
            signal.signal(number, self._hear)
        self.requests = EndRequests(lambda: self.now)
        self.requests.install()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.at.append(self.now)

    def send(self, number: signal.Signals, *times: float) -> None:
        for self.now in times:
            signal.raise_signal(number)


def test_a_sigterm_soon_after_the_first_is_the_same_request() -> None:
    """Slurm's daemon and its srun both send it; somebody who asks again later wants the end at once."""
    heard = Heard()
    heard.send(signal.SIGTERM, 100.0)
    heard.requests.take()
    heard.send(signal.SIGTERM, 100.04, 100.0 + SAME_SIGTERM_S / 2, 100.0 + SAME_SIGTERM_S, 200.0)
    assert heard.at == [100.0, 100.0 + SAME_SIGTERM_S]


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


def test_a_signal_that_was_lost_on_its_way_is_raised_again() -> None:
    """Where it is not, the next one counts."""
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


def test_it_stands_before_the_handler_of_each_start() -> None:
    heard: list[str] = []
    request = EndRequests(lambda: 0.0)
    for name in ("first", "second"):
        signal.signal(signal.SIGTERM, lambda number, frame, name=name: heard.append(name))
        request.install()
        request.install()  # not before itself
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["second"]


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    EndRequests().install()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

"""SIGTERM that comes more than once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from adaptor.launchers.repeated_sigterm import SAME_REQUEST_S, OneRequest


@pytest.fixture(autouse=True)
def _handler_of_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_what_comes_soon_after_the_first_is_the_same_request() -> None:
    """Slurm's daemon and its srun both send it; somebody who asks again later wants the end at once."""
    heard: list[float] = []
    clock = [0.0]

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append(clock[0])

    signal.signal(signal.SIGTERM, handler)
    request = OneRequest(lambda: clock[0])
    request.install()
    for clock[0] in (100.0, 100.04, 100.0 + SAME_REQUEST_S / 2, 100.0 + SAME_REQUEST_S, 200.0):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [100.0, 100.0 + SAME_REQUEST_S, 200.0]


def test_it_stands_before_the_handler_of_each_start() -> None:
    heard: list[str] = []
    request = OneRequest(lambda: 0.0)
    for name in ("first", "second"):
        signal.signal(signal.SIGTERM, lambda number, frame, name=name: heard.append(name))
        request.install()
        request.install()  # not before itself
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["second"]


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    OneRequest().install()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

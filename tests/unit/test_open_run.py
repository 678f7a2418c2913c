"""The framework's Weights & Biases run is finished before a worker ends, within a time limit."""

from __future__ import annotations

import threading

import pytest

from adaptor import context
from adaptor.worker.incident_marks import OpenRun
from tests.unit.threads import LONG_S


class HangingClient:
    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()

    def finish(self, exit_code: int) -> None:
        self.asked.set()
        self.answers.wait()


class FailingClient:
    def finish(self, exit_code: int) -> None:
        raise ConnectionError("the service is gone")


def test_a_client_that_hangs_is_left() -> None:
    run = OpenRun(context.get())
    run.client = client = HangingClient()
    run.end(limit_s=0.05)  # returns
    assert client.asked.wait()
    client.answers.set()


def test_a_client_that_fails_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    run = OpenRun(context.get())
    run.client = FailingClient()
    run.end(LONG_S)
    assert (
        "[ttp] the run of W&B was not ended: ConnectionError: the service is gone" in capfd.readouterr().err
    )

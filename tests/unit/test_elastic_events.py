"""The incidents of a job as torch elastic's events: a real ttprun, and a handler of elastic's own kind."""

from __future__ import annotations

import json
import logging
import queue
from typing import Any

import pytest
from torch.distributed.elastic.events import handlers

from adaptor.launchers.agent.elastic_outputs import ElasticEvents
from adaptor.protocol.messages import Fault, Recovered
from tests.unit.launching import TWO, Ended, Launcher, launcher, zygote
from tests.unit.threads import LONG_S

__all__ = ["launcher", "zygote"]

# As an operator's `sitecustomize` would: a handler, by its name for --event-log-handler.
HANDLER = """
import logging
from torch.distributed.elastic.events import handlers

class Handler(logging.Handler):
    def emit(self, record):
        if '"ttp.' in record.getMessage():
            {what}

handlers._log_handlers["ours"] = Handler()
"""
WRITES = "open('events', 'a').write(record.getMessage() + chr(10))"
RAISES = "raise OSError('no such collector')"
HANGS = "__import__('threading').Event().wait()"
FAILS = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("bad sample")
import threading
threading.Event().wait(600)
"""


def train(launcher: Launcher, action: str) -> Ended:
    script = launcher.script(FAILS)
    return launcher.run(*TWO, "--event-log-handler", "ours", script, prelude=HANDLER.format(what=action))


def test_a_handler_gets_the_incident_and_the_verdict(launcher: Launcher) -> None:
    result = train(launcher, WRITES)
    assert result.code == 1, result.log
    lines = (launcher.folder / "events").read_text().splitlines()
    incident, verdict = (json.loads(line) for line in lines)
    assert [event["name"] for event in (incident, verdict)] == ["ttp.incident", "ttp.verdict"]
    assert [event["source"] for event in (incident, verdict)] == ["AGENT", "AGENT"]
    assert incident["timestamp"] <= verdict["timestamp"]
    metadata: dict[str, Any] = verdict["metadata"]
    assert (metadata["rank"], metadata["step"], metadata["outcome"], metadata["exit_code"]) == (
        1,
        None,
        "nothing",
        1,
    )
    assert metadata["cause"].startswith("rank 1 raised ValueError: bad sample")
    assert metadata["cause"] in result.last_line
    assert (metadata["incident"], metadata["group_rank"]) == (1, 0)
    assert {**metadata, "outcome": None, "exit_code": None} == {
        **incident["metadata"],
        "outcome": None,
        "exit_code": None,
    }


@pytest.mark.robustness(
    "B5",
    "the handler of torch elastic's events raises, or never returns",
    "the verdict and the exit code as ever",
)
@pytest.mark.parametrize("action", [RAISES, HANGS], ids=["raises", "hangs"])
def test_a_handler_stops_nothing(launcher: Launcher, action: str) -> None:
    result = train(launcher, action)
    assert result.code == 1, result.log
    assert "[ttp] rank 1 raised ValueError: bad sample" in result.log
    raised = "[ttp] an event of torch elastic is not recorded: OSError: no such collector"
    assert (raised in result.log) == (action == RAISES)


def test_a_handler_that_there_is_not_is_one_line(launcher: Launcher) -> None:
    result = launcher.run(*TWO, "--event-log-handler", "mine", launcher.script("print('started')"), code=2)
    assert result.last_line.startswith(
        "ttprun: error: --event-log-handler is 'mine': torch elastic has no handler"
    )
    assert "started" not in result.log


class Handler(logging.Handler):
    """A handler of elastic's own kind, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.got: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.got.put(json.loads(record.getMessage()))


def test_an_incident_that_was_recovered_online_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Handler()
    monkeypatch.setitem(handlers._log_handlers, "of-this-test", handler)
    line = "rank 2 was ended by SIGKILL; replaced by pid 47, training goes on after step 47, 0 steps lost"
    fault = Fault("SIGKILL", 47, (2,), 4242, "here")
    ElasticEvents("of-this-test", "a-job").go_on(Recovered(3, 47, line, fault, (2,), (), 0.9), node=1)
    incident, recovered = (handler.got.get(timeout=LONG_S) for _ in range(2))
    assert [event["name"] for event in (incident, recovered)] == ["ttp.incident", "ttp.verdict"]
    assert recovered["timestamp"] - incident["timestamp"] == pytest.approx(900, abs=2)
    common = {"run_id": "a-job", "group_rank": 1, "incident": 3, "rank": 2, "step": 47, "cause": line}
    assert incident["metadata"] == common
    assert recovered["metadata"] == {**common, "outcome": "recovered", "exit_code": None}


def test_an_incident_that_no_rank_caused_is_recorded_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Handler()
    monkeypatch.setitem(handlers._log_handlers, "of-another-test", handler)
    recovered = Recovered(1, 5, "a hang", Fault("a hang"), seconds=2.0)
    ElasticEvents("of-another-test", "a-job").go_on(recovered, node=0)
    assert handler.got.get(timeout=LONG_S)["metadata"]["rank"] is None

"""Online recovery between real agents and a real controller; the workers only speak the protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptor import output
from adaptor.protocol.messages import Proceed, Recovered, ToWorker
from tests import waiting
from tests.unit.nodes import Job, job
from tests.unit.threads import LONG_S

__all__ = ["job"]

PROGRAM = Path(__file__).with_name("protocol_worker.py")
FIRST = 11


@pytest.fixture
def online(job: Job) -> Job:
    """Two ranks with the same shard; rank 1 gets a new process after a fault."""
    job.program = PROGRAM
    return job


def train(job: Job, *, nodes: int = 1, may_restart: bool = True) -> None:
    for _ in range(nodes):
        job.node(TTP_ONLINE="60", TTP_SPARES="0")
    job.begin(2, may_restart=may_restart)
    job.train("step")


def recovered(job: Job, node: int = 0) -> tuple[Recovered, str]:
    return job.nodes[node].control.recovered.get(timeout=LONG_S)


def report(path: str) -> dict[str, Any]:
    assert output.drain(LONG_S)
    return json.loads(Path(path).read_text())  # type: ignore[no-any-return]


def test_a_killed_rank_is_replaced_and_nobody_else(online: Job) -> None:
    train(online)
    survivor, old = online.workers[0], online.workers[1]
    for number in (1, 2):
        online.workers[1].process.kill()
        verdict, path = recovered(online)
        assert survivor.read_line() == f"recovered {FIRST + number - 1}"
        new = online.workers[1]
        assert [new.read_line(), new.read_line()] == ["here", f"recovered {FIRST + number - 1}"]
        assert (verdict.incident, verdict.step, verdict.replaced) == (number, FIRST + number - 1, (1,))
        assert verdict.line.startswith("rank 1 was ended by SIGKILL; ")
        progress = f"training goes on after step {FIRST + number - 1}, 0 steps lost"
        assert f"replaced by pid {new.process.pid}, {progress}" in verdict.line
        written = report(path)
        assert (written["verdict"], written["blamed"], written["pid"]) == ("recovered", 1, old.process.pid)
        assert written["checkpoint"] is not None
        order = ["fault-noticed", "freeze", "replace", "prepare", "published", "regroup-ordered"]
        order += ["joined", "recovered"]
        happened = [event["type"] for event in written["events"]]
        assert "started" in happened
        assert [kind for kind in dict.fromkeys(happened) if kind in order] == order
        assert online.nodes[0].control.verdict is None
        assert online.nodes[0].control.news.noticed == 0.0
        for worker in (survivor, new):
            worker.execute("step")
        old = new
    for worker in online.workers.values():
        worker.send("exit 0")
    assert online.statuses() == {0: 0, 1: 0}
    assert online.nodes[0].control.verdict is None


def test_workers_go_on_before_a_spare_is_started(online: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    train(online)
    control, acts = online.nodes[0].control, []
    order = control.workers.order

    def note(rank: int, message: ToWorker) -> None:
        acts.append(type(message))
        order(rank, message)

    monkeypatch.setattr(control.workers, "order", note)
    monkeypatch.setattr(control.spares, "fill", lambda: acts.append(None))
    online.workers[1].process.kill()
    waiting.until(lambda: None in acts, "the place of the used spare is filled")
    assert acts[-3:] == [Proceed, Proceed, None]


def test_an_exception_replaces_nobody(online: Job) -> None:
    train(online)
    workers_before = dict(online.workers)
    online.workers[1].execute("raise")
    verdict, path = recovered(online)
    assert (verdict.replaced, verdict.retried) == ((), (1,))
    (calls,) = [event for event in report(path)["events"] if event["type"] == "calls"]
    assert (calls["rank"], calls["data"]["detail"]) == (1, '  File "loop.py", line 7')
    assert verdict.line.startswith("rank 1 raised ValueError: told to raise; nobody is replaced")
    for worker in online.workers.values():
        assert worker.read_line() == f"recovered {FIRST}"
    assert online.workers == workers_before


def test_a_newcomer_that_ends_is_replaced_once_more(online: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_TEST_NEWCOMER", "ends-once")
    train(online)
    online.workers[1].process.kill()
    verdict, _ = recovered(online)
    assert verdict.replaced == (1,)
    assert online.workers[0].read_line() == f"recovered {FIRST}"


def test_a_failed_save_is_reported_and_training_continues(
    online: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_TEST_DUMP", "fails")
    train(online)
    online.workers[1].process.kill()
    verdict, path = recovered(online)
    assert verdict.line.endswith(
        f"; step {FIRST} could not be saved meanwhile: g could not be written: it is a test"
    )
    written = report(path)
    assert (written["verdict"], written["checkpoint"], written["reason"]) == ("recovered", None, verdict.line)
    assert online.workers[0].read_line() == f"recovered {FIRST}"


@pytest.mark.parametrize(
    ("fate", "reason"), [("ends", "exited with code 3"), ("fails", "could not join: it is a test")]
)
def test_without_a_newcomer_the_job_is_saved(
    online: Job, monkeypatch: pytest.MonkeyPatch, fate: str, reason: str
) -> None:
    monkeypatch.setenv("TTP_TEST_NEWCOMER", fate)
    train(online)
    online.workers[1].process.kill()
    verdict = online.verdict()
    assert verdict.line.startswith("rank 1 was ended by SIGKILL; ")
    assert reason in verdict.line
    assert online.nodes[0].control.recovered.empty()


def test_without_a_new_process_the_job_is_saved_at_once(online: Job) -> None:
    train(online)
    online.cannot_start = True
    online.workers[1].process.kill()
    verdict = online.verdict()
    assert "no process can be started in its place (Resource temporarily unavailable)" in verdict.line


def test_without_restarts_left_nobody_is_replaced(online: Job) -> None:
    train(online, may_restart=False)
    online.workers[1].process.kill()
    assert online.verdict().line.startswith("rank 1 was ended by SIGKILL; ")
    assert online.nodes[0].control.recovered.empty()


def test_every_agent_records_the_recovery(online: Job) -> None:
    train(online, nodes=2)
    online.workers[1].process.kill()
    (on_node_0, path), (on_node_1, path_on_node_1) = recovered(online, 0), recovered(online, 1)
    assert on_node_0 == on_node_1
    assert Path(path).exists() or report(path)
    assert path_on_node_1 == "on node 0"
    for worker in (online.workers[0], online.workers[1]):
        while worker.read_line() != f"recovered {FIRST}":
            pass


def test_a_verdict_that_no_controller_gives_has_no_report(online: Job) -> None:
    train(online, nodes=2)
    online.workers[1].process.kill()
    for node in (0, 1):
        recovered(online, node)
    online.nodes.pop(0).close()
    (node,) = online.nodes
    assert node.control.report_path == "on node 0"
    online.workers[1].process.kill()
    assert "after node 0 had finished" in online.verdict().line
    assert node.control.report_path == ""

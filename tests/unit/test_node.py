"""The control thread of an agent, with real workers: from a death to the verdict, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptor.checkpoint import publish
from adaptor.launchers.agent import worker_watch
from adaptor.launchers.agent.node import Node
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.cli import ttp
from adaptor.protocol import wire
from adaptor.protocol.board import Lifeline
from adaptor.protocol.environment import GENERATION
from adaptor.protocol.messages import AgentTerminationRequested, Hello, Raised, Verdict
from adaptor.protocol.naming import temporary_name
from adaptor.terminal import OK, USAGE
from adaptor.worker.processor import EXIT_SURVIVOR
from tests import waiting
from tests.unit.nodes import Job, controller_host_of, is_awaited, is_gone, job, open_descriptors, stop
from tests.unit.threads import LONG_S

__all__ = ["job"]

FIRST = 11  # the first step after the one that the script starts from


def content(step: int, scale: float = 1024.0) -> dict[str, str]:
    return {"g.txt": f"{step} {step} {step * 4} {scale}"}


@contextlib.contextmanager
def standing_still(node: Node) -> Iterator[None]:
    """Let the control thread of `node` read nothing meanwhile, as on a machine that is too busy."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait()

    node.control.thread.loop.call_soon_threadsafe(stand)
    assert stands.wait(LONG_S)
    try:
        yield
    finally:
        goes_on.set()


def report(job: Job) -> dict[str, Any]:
    waiting.written(job.logs, lambda: list(job.logs.glob("*/incidents/*.json")), "the report is written")
    (path,) = job.logs.glob("*/incidents/*.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", ["lifeline", "status"])
def test_a_worker_that_leaves_without_a_word_has_failed(
    job: Job, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os._exit(0) in the middle of the script; the status of a small process may be known first."""
    if by == "status":
        monkeypatch.setattr(Lifeline, "wait", lambda *_: False)
    job.begin(2)
    job.train("step")
    job.workers[1].send("leave 0")
    verdict = job.verdict()
    assert (verdict.outcome, verdict.exit_code, verdict.cause_rank) == ("saved", 1, 1)
    assert verdict.line.startswith("rank 1 exited with code 0 before its script had ended; ")
    assert job.statuses() == {0: EXIT_SURVIVOR, 1: 0}


def test_a_worker_that_gets_sigterm_stays_a_holder(job: Job) -> None:
    """The main thread hangs in C code, where no Python signal handler runs."""
    job.begin(2)
    job.train("step")
    job.workers[0].wait_at_the_door()
    job.workers[1].wait_at_the_door()
    job.workers[1].process.terminate()
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.exit_code) == ("saved", FIRST + 1, 143)
    assert verdict.line.startswith("rank 1 was told to end by SIGTERM; ")
    assert job.saved() == content(FIRST + 1)
    assert job.statuses() == {0: EXIT_SURVIVOR, 1: EXIT_SURVIVOR}


def test_the_notice_of_a_death_does_not_overtake_the_layouts(job: Job) -> None:
    """A thread brings the notice while the layouts wait in their sockets."""
    job.begin(2)
    with standing_still(job.nodes[0]):
        for worker in job.workers.values():
            worker.execute("begin", "step")
        job.workers[0].process.kill()
        waiting.until(lambda: not is_awaited(0), "its lifeline breaks")
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.cause_rank) == ("saved", FIRST, 0)


def test_a_request_to_end_does_not_overtake_the_layouts(job: Job) -> None:
    job.begin(2)
    control = job.nodes[0].control
    with standing_still(job.nodes[0]):
        for worker in job.workers.values():
            worker.execute("begin", "step")
        request = control.say(AgentTerminationRequested(0, "SIGTERM"))
        asyncio.run_coroutine_threadsafe(request, control.thread.loop)
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.exit_code) == ("saved", FIRST, 143)


def test_an_agent_that_gets_sigterm_saves_first(job: Job) -> None:
    job.begin(2)
    job.train("step", "step")
    job.nodes[0].leave("SIGTERM", LONG_S)
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.exit_code) == ("saved", FIRST + 1, 143)
    assert verdict.line.startswith("ttprun was told to end by SIGTERM; ")
    assert job.statuses() == {0: EXIT_SURVIVOR, 1: EXIT_SURVIVOR}


def test_a_child_of_a_worker_ends_by_sigterm_as_ever(job: Job) -> None:
    job.begin(1)
    job.workers[0].send("fork")
    child = int(job.workers[0].read_line())
    assert job.workers[0].read_line() == "done fork"
    os.kill(child, signal.SIGTERM)
    waiting.ended([child])
    assert job.nodes[0].control.verdict is None


def test_a_worker_that_replaces_its_program_has_not_died(job: Job) -> None:
    """The program change cuts the lifeline; the end of the new program is seen by the operating system."""
    job.begin(2)
    job.workers[0].execute("begin")
    lifelines = job.nodes[0].control.workers._lifelines.held
    waiting.until(lambda: 1 in lifelines, "its lifeline is watched")
    job.workers[1].send("replace")
    assert job.workers[1].read_line() == "replaced"
    waiting.until(lambda: 1 not in lifelines, "it is known that its lifeline is cut")
    job.workers[1].send("3")
    verdict = job.verdict()
    assert (verdict.outcome, verdict.exit_code) == ("nothing", 3)
    assert [
        event["data"]["detail"] for event in report(job)["events"] if event["type"] == "fault-noticed"
    ] == ["status 3, STARTING after step -1"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_costs_no_step(job: Job, victim: int) -> None:
    job.begin(2)
    job.train("step", "step", "step")
    job.workers[victim].process.kill()
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.exit_code) == ("saved", FIRST + 2, 137)
    assert verdict.line.startswith(f"rank {victim} was ended by SIGKILL; step {FIRST + 2} is saved")
    assert job.saved() == content(FIRST + 2)
    assert job.statuses() == {victim: -signal.SIGKILL, 1 - victim: EXIT_SURVIVOR}
    event_types = [event["type"] for event in report(job)["events"]]
    order = ["fault-noticed", "freeze", "frozen", "prepare", "dump-ordered", "written", "publish-ordered"]
    assert [event_type for event_type in event_types if event_type in (*order, "published", "verdict")] == [
        *order,
        "published",
        "verdict",
    ]
    assert sorted(path.name for path in job.save.iterdir()) == [
        f"iter_{FIRST + 2:07d}",
        "latest_checkpointed_iteration.txt",
    ]


def test_an_exception_costs_no_step(job: Job) -> None:
    """The only holder is the rank that raised."""
    job.begin(1)
    job.train("step", "skip")
    job.workers[0].send("raise")
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.exit_code) == ("saved", FIRST + 1, 1)
    assert verdict.line.startswith("rank 0 raised ValueError: told to raise; ")
    # Its tensors are those of the step before the one that was skipped.
    assert job.saved() == {"g.txt": f"{FIRST} {FIRST + 1} {(FIRST + 1) * 4} 1023.0"}
    assert job.statuses() == {0: 1}


def test_an_exit_code_is_the_job_s(job: Job) -> None:
    job.begin(2)
    job.train("step")
    job.workers[1].send("exit 7")
    verdict = job.verdict()
    assert (verdict.outcome, verdict.exit_code, verdict.cause_rank) == ("saved", 7, 1)
    assert job.statuses() == {0: EXIT_SURVIVOR, 1: 7}


def test_a_rank_that_hangs_at_the_door_is_let_through(job: Job) -> None:
    """Rank 0 hangs in the barrier, as on gloo when a rank without a connection to rank 0 dies."""
    job.begin(3)
    job.train("step")
    job.workers[0].wait_at_the_door()
    job.workers[1].wait_at_the_door()
    job.workers[2].process.kill()
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step) == ("saved", FIRST + 1)
    assert job.saved() == content(FIRST + 1)
    assert "through-the-door" in [event["type"] for event in report(job)["events"]]


@pytest.mark.parametrize("job", [2], indirect=True)
def test_without_a_second_copy_the_reason_names_the_shard(job: Job) -> None:
    job.begin(2)
    job.train("step")
    job.workers[1].process.kill()
    verdict = job.verdict()
    assert verdict.outcome == "lost"
    assert "shard 1 of 2 of group g has no live holder, it was on rank 1" in verdict.line
    assert list(job.save.iterdir()) == []
    assert job.statuses()[0] == EXIT_SURVIVOR


def test_an_exception_inside_the_update_leaves_no_holder(job: Job) -> None:
    job.begin(1)
    job.train("step")
    job.workers[0].send("raise-inside")
    assert job.verdict().outcome == "lost"
    assert list(job.save.iterdir()) == []


def test_before_training_there_is_nothing_to_save(job: Job) -> None:
    job.begin(2)
    job.workers[0].execute("begin")
    job.workers[1].send("leave 3")
    verdict = job.verdict()
    assert (verdict.outcome, verdict.exit_code) == ("nothing", 3)
    assert job.statuses() == {0: EXIT_SURVIVOR, 1: 3}


def test_a_job_that_cannot_be_protected_is_refused(job: Job) -> None:
    job.begin(2)
    job.workers[1].send("refuse")
    verdict = job.verdict()
    assert (verdict.outcome, verdict.exit_code) == ("refused", 2)
    assert verdict.line == "--optimizer is sgd: it cannot be protected yet"
    assert job.statuses() == {0: EXIT_SURVIVOR, 1: EXIT_SURVIVOR}


def test_workers_that_end_well_are_no_incident(job: Job) -> None:
    job.begin(2)
    job.train("step")
    for worker in job.workers.values():
        worker.send("exit 0")
    assert job.statuses() == {0: 0, 1: 0}
    job.end()
    assert job.nodes[0].control.verdict is None
    assert not job.nodes[0].control.settled.is_set()
    assert list(job.logs.glob("*/incidents/*")) == []


def test_children_of_a_worker_go_with_it(job: Job) -> None:
    job.begin(1)
    job.workers[0].send("child")
    child = int(job.workers[0].read_line())
    assert job.workers[0].read_line() == "done child"
    assert os.getpgid(child) == job.workers[0].process.pid
    job.workers[0].process.kill()
    job.verdict()
    waiting.ended([child])


def test_a_worker_that_does_not_go_is_ended(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "EXIT_GRACE_S", 0.2)
    job.begin(2)
    stop(job.workers[0].process.pid)
    job.workers[1].send("leave 3")
    assert job.verdict().outcome == "nothing"
    assert job.statuses() == {0: -signal.SIGKILL, 1: 3}


def test_a_status_is_known_while_somebody_else_asks_for_it(job: Job) -> None:
    """torch's thread polls the same process; Popen.poll() knows nothing while another thread is in it."""
    job.begin(1)
    process = job.workers[0].process
    with process._waitpid_lock:  # type: ignore[attr-defined]
        job.workers[0].send("leave 3")
        waiting.until(lambda: not job.nodes[0].control.workers._pidfds, "the death is noticed")
    assert job.verdict().exit_code == 3


def test_strangers_on_the_workers_socket(job: Job) -> None:
    job.begin(1)
    job.train("step")
    address = "\0" + os.environ["TTP_AGENT"]
    strangers = []
    for first in (b"", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n", wire.frame(Raised(0, "a lie", 1))):
        strangers.append(stranger := socket.socket(socket.AF_UNIX))
        stranger.connect(address)
        stranger.sendall(first)
    strangers.append(unknown := socket.socket(socket.AF_UNIX))
    unknown.connect(address)
    unknown.sendall(wire.frame(Hello(99, 1)) + wire.frame(Raised(99, "a lie", 1)))
    strangers.append(double := socket.socket(socket.AF_UNIX))
    double.connect(address)
    double.sendall(wire.frame(Hello(0, 1)) + wire.frame(Raised(0, "a lie", 1)))
    for stranger in (unknown, double):
        stranger.settimeout(LONG_S)
        try:
            assert stranger.recv(1) == b"", "it is not listened to"
        except ConnectionResetError:  # it had not read all that was sent to it
            pass
    counted = job.nodes[0].control.workers._rejected.counted
    waiting.until(lambda: counted["were no worker of this node"] == 3, "they are counted")
    job.workers[0].execute("step")
    assert job.nodes[0].control.verdict is None
    job.workers[0].send("raise")
    assert job.verdict().outcome == "saved"
    for stranger in strangers:
        stranger.close()


async def test_a_stranger_that_comes_after_the_last_workers() -> None:
    """The stranger sends nothing and stays connected: the agent ends all the same."""
    workers = Workers(asyncio.get_running_loop(), lambda message: None)
    await workers.serve()
    _, stranger = await asyncio.open_unix_connection(f"\0{workers.address}")
    await asyncio.to_thread(waiting.until, lambda: workers._hearing, "it is heard")
    await asyncio.wait_for(workers.close(), LONG_S)
    stranger.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_heard(job: Job) -> None:
    """Another user is ignored whatever secrets it knows: the kernel reports the user of the peer."""
    job.begin(1)
    job.train("step")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(LONG_S)
        os.seteuid(65534)
        try:
            stranger.connect("\0" + os.environ["TTP_AGENT"])
        finally:
            os.seteuid(0)
        assert stranger.recv(1) == b""
    counted = job.nodes[0].control.workers._rejected.counted
    assert counted == {"were of another user": 1}


def test_named_sockets_are_private_to_the_user(job: Job) -> None:
    """The folder in which multiprocessing makes its sockets; nothing else of an agent has a file name."""
    job.begin(1)
    assert stat.S_IMODE(Path(os.environ["TTP_SCRATCH"]).stat().st_mode) == 0o700


def test_a_second_generation(job: Job) -> None:
    """After an incident the workers are started again under the same agent."""
    job.begin(2)
    job.train("step")
    job.workers[0].process.kill()
    assert job.verdict().step == FIRST
    job.end()
    job.begin(2)
    assert job.nodes[0].control.verdict is None
    job.train("step", "step")
    job.workers[1].process.kill()
    verdict = job.verdict()
    assert (verdict.incident, verdict.step) == (2, FIRST + 1)
    assert job.saved() == content(FIRST + 1)


def test_a_publish_that_fails_is_said(job: Job) -> None:
    job.begin(2)
    job.train("step")
    job.save.rmdir()
    job.save.write_text("a file where a folder has to be")
    job.workers[0].process.kill()
    verdict = job.verdict()
    assert verdict.outcome == "lost"
    assert f"{job.save}: File exists" in verdict.line


def test_an_error_of_the_publisher_s_own_is_an_answer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Path:
        raise KeyError("a mistake")

    monkeypatch.setattr(publish, "prepare", broken)
    job.begin(2)
    job.train("step")
    job.workers[0].process.kill()
    assert "the state cannot be saved: KeyError: 'a mistake'" in job.verdict().line


def test_nothing_is_removed_under_a_publisher_at_work(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict comes from a time-out while a slow disk is still busy: the folder stays as it is."""
    at_work, may_end = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        at_work.set()
        assert may_end.wait(LONG_S)

    monkeypatch.setattr(publish, "publish", slow)
    job.begin(2)
    job.train("step")
    job.workers[0].process.kill()
    assert at_work.wait(LONG_S)
    node, line = job.nodes[0], "not done after 10 s (TTP_OT) in state publishing"
    late = Verdict(
        incident=1, outcome="lost", step=-1, line=line, cause_rank=0, exit_code=137, save_folder=str(job.save)
    )
    node.control.thread.loop.call_soon_threadsafe(node.control.obey, late)
    job.workers[1].process.kill()
    assert job.verdict() == late
    folder = temporary_name(FIRST, generation=os.environ[GENERATION])
    assert [path.name for path in job.save.iterdir()] == [folder]
    may_end.set()


def test_an_error_of_the_controller_s_own_ends_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.begin(2)
    job.train("step")
    controller_host = controller_host_of(job.nodes[0])

    def broken(*_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(controller_host.controller, "_on_deaths", broken)
    monkeypatch.setattr(worker_watch, "SHUTDOWN_GRACE_S", 0.1)  # it hears of no other death either
    job.workers[0].process.kill()
    verdict = job.verdict()
    assert (verdict.outcome, verdict.exit_code) == ("lost", 1)
    assert verdict.line == "the controller failed: KeyError: 'a mistake'"
    assert "Traceback" in capsys.readouterr().err
    assert job.statuses() == {0: -signal.SIGKILL, 1: EXIT_SURVIVOR}


def test_nothing_is_left_behind(job: Job) -> None:
    job.begin(1)  # what the first use of torch's store opens for good is not counted
    job.close()
    job.nodes = []
    descriptors_before, threads = open_descriptors(os.getpid()), set(threading.enumerate())
    job.begin(2)
    address = os.environ["TTP_AGENT"]
    controller_host = controller_host_of(job.nodes[0])
    store = controller_host.store.host
    assert address in Path("/proc/net/unix").read_text()
    assert store in Path("/proc/net/unix").read_text()
    job.train("step")
    job.workers[0].process.kill()
    job.verdict()
    pids = [worker.process.pid for worker in job.workers.values()]
    del controller_host
    job.close()
    job.nodes = []
    assert all(is_gone(pid) for pid in pids)
    waiting.until(lambda: set(threading.enumerate()) <= threads, "the threads have ended")
    assert set(open_descriptors(os.getpid()).items()) - set(descriptors_before.items()) == set()
    assert address not in Path("/proc/net/unix").read_text()
    assert store not in Path("/proc/net/unix").read_text()


def _status_is_written(job: Job) -> None:
    waiting.written(job.logs, lambda: list(job.logs.glob("*/status.json")), "the status is written")


def test_a_drill_ends_a_rank_on_purpose(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.node(TTP_ALLOW_DRILL="True")
    job.begin(2)
    job.workers[0].execute("begin")
    _status_is_written(job)
    assert ttp.main(["drill"]) == USAGE
    job.workers[1].execute("begin")
    members = controller_host_of(job.nodes[0]).controller.membership
    waiting.until(lambda: len(members.layouts) == 2, "the layouts are known")
    assert ttp.main(["drill", "--rank", "2"]) == USAGE
    job.train("step")
    assert ttp.main(["drill", "--rank", "1", str(job.logs)]) == OK
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.fault.key) == ("saved", FIRST, "")
    assert verdict.line.startswith("rank 1 was ended by SIGKILL (ttp drill); step 11 is saved")
    assert ttp.main(["drill"]) == USAGE
    refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ttp: error: ")]
    assert [line.partition(" no rank is ended: ")[2] for line in refused] == [
        "not all ranks train yet",
        "the job has no rank 2: its ranks are 0 to 1",
        "an incident is open: try again when the job trains",
    ]


@pytest.mark.parametrize(
    ("job", "allowed", "may_restart", "reason"),
    [
        (1, "False", True, "the job allows no drill: start it with --ttp-allow-drill True (TTP_ALLOW_DRILL)"),
        (1, "True", False, "no restart is left (--max-restarts), and no spare process replaces a rank"),
        (2, "True", True, "shard 0 of 2 of group g has no live holder, it was on rank 0"),
    ],
    indirect=["job"],
)
def test_a_drill_that_would_end_the_job_or_lose_steps_is_refused(
    job: Job, allowed: str, may_restart: bool, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job.node(TTP_ALLOW_DRILL=allowed, TTP_ONLINE="0")
    job.begin(2, may_restart=may_restart)
    job.train("step")
    _status_is_written(job)
    assert ttp.main(["drill", "--rank", "0", str(job.logs)]) == USAGE
    assert reason in capsys.readouterr().err
    assert controller_host_of(job.nodes[0]).controller.incident is None

"""The files of a job for operators, by their schemas, and the command `ttp`."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptor import output, terminal
from adaptor.checkpoint import hashing, manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.controller.controller import Controller
from adaptor.controller.failures import Failures
from adaptor.launchers.cli import ttp
from adaptor.launchers.records import job_records, log
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.job_files import LIMITS_S, JobFiles, StepTimer
from adaptor.launchers.records.job_records import JobStatus
from adaptor.protocol import naming, records
from adaptor.protocol.messages import (
    AgentHello,
    AgentTerminationRequested,
    BoardRecord,
    ComputeTime,
    ComputeTimes,
    Died,
    Drilled,
    Dump,
    Dying,
    Exit,
    Fault,
    Freeze,
    Frozen,
    Hello,
    Layout,
    NodeStalled,
    Origin,
    Phase,
    Publish,
    Published,
    Raised,
    Recovered,
    Replace,
    SaveEnded,
    Share,
    TimelineEvent,
    Unprotected,
    Verdict,
)
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.records import Notice, Status, StepTimes
from adaptor.verification.agreed_state import AgreedGroup, AgreedShard, AgreedState
from tests import operator_files
from tests.unit.threads import LONG_S

SAVED = Verdict(
    incident=1,
    outcome="saved",
    step=47,
    line="rank 1 was ended by SIGKILL; step 47 is saved, no finished step is lost",
    cause_rank=1,
    exit_code=137,
    save_folder="/save",
    fault=Fault("SIGKILL", 47, (1,), 71, "n1", "signal", -9, "killed by the kernel: out of memory"),
    newest=47,
)


class RecordingNotifier:
    def __init__(self) -> None:
        self._makes: list[Any] = []

    def submit(self, make: Any) -> None:
        self._makes.append(make)

    def notices(self) -> list[records.Notice]:
        return [make() for make in self._makes]


class RecordedJob:
    """The files of a job of two nodes with a rank each, written from its messages and orders."""

    def __init__(self, logs: Path, notify: Callable[[Any], None] = lambda make: None) -> None:
        self.logs = logs
        self.files = JobFiles(str(logs), "job 7")
        self.report = IncidentReport(self.files, notify)
        self.report.begin(1)
        self.report.record_start()
        self.starts(0.0)

    def starts(self, at: float) -> None:
        for node in (0, 1):
            self.report.record_message(node, AgentHello(node, (node,), host=f"n{node}"), at)
            self.report.record_message(node, Hello(node, 70 + node), at + 1)
            self.report.record_message(node, Layout(node, (), "/save", 40, ""), at + 3)

    def rank_1_is_killed(
        self, at: float, end: Verdict | Recovered = SAVED, replaced_by: int | None = None
    ) -> None:
        board = BoardRecord(1, 71, Phase.RUNNING, 47, 47)
        say, order = self.report.record_message, self.report.record_order
        say(1, Dying(1, at, board), at + 0.01)
        order(0, 0, Freeze(1), at + 0.02)
        order(0, 1, Freeze(1), at + 0.02)
        say(1, Died(1, -9, at + 0.03, board), at + 0.03)
        say(0, Frozen(0, 1, BoardRecord(0, 70, Phase.RUNNING, 47, 47)), at + 0.05)
        order(0, 0, Dump(1, 1, 47, "/save/iter_tmp", (), "", 0, 10.0), at + 0.06)
        say(0, TimelineEvent(0, 1, at + 0.16, "written", "group"), at + 0.16)
        files = (FileEntry("a", 1000, None), FileEntry("b", 24, None))
        order(0, None, Publish(1, "/save", 47, files, {}, 2), at + 0.17)
        say(0, Published(0, 1, 47, "/save/iter_0000047"), at + 0.20)
        if replaced_by is not None:
            say(1, Hello(1, replaced_by), at + 0.205)
        order(0, None, end, at + 0.21)
        order(0, 0, Exit(1), at + 0.21)

    def incident(self) -> dict[str, Any]:
        assert output.drain(LONG_S)
        operator_files.assert_valid(self.logs)
        written: dict[str, Any] = json.loads(Path(self.report.path).read_text())
        return written


# Digests of the JSON Schemas without descriptions: readers rely on the fields and their types.
_DIGESTS = {
    "event": "7935b8bf6f5d6bd0",
    "incident": "77a931bdc87b2b06",
    "notice": "983c696a2ba800cf",
    "status": "3dddd83b9074ca98",
}


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_descriptions(item)
            for key, item in value.items()
            if key != "description" or isinstance(item, dict)  # a field of this name
        }
    return [_without_descriptions(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", sorted(records.SCHEMAS))
def test_the_schemas_are_unchanged(name: str) -> None:
    text = json.dumps(_without_descriptions(records.schema(name)), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == _DIGESTS[name]


def test_the_file_of_an_incident(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path)
    job.rank_1_is_killed(100.0)
    written = job.incident()
    assert Path(job.report.path).relative_to(tmp_path).parts[:2] == ("job_7", "incidents")
    expected_fields = {
        "id": Path(job.report.path).stem,
        "generation": 1,
        "cause": {
            "kind": "signal",
            "signal": "SIGKILL",
            "exit_code": None,
            "exception": None,
            "out_of_memory": "killed by the kernel: out of memory",
        },
        "blamed": 1,
        "node": 1,
        "host": "n1",
        "pid": 71,
        "failed": [1],
        "silent": [],
        "verdict": "saved",
        "step": 47,
        "newest_step": 47,
        "steps_lost": 0,
        "checkpoint": "/save/iter_0000047",
        "bytes": 1024,
        "exit_code": 137,
        "runbook": "docs/runbook.md#signal",
    }
    assert {name: written[name] for name in expected_fields} == expected_fields
    phases = {name: seconds and round(seconds, 3) for name, seconds in written["phases"].items()}
    assert phases == {
        "detect": 0.02,
        "freeze": 0.03,
        "write": 0.1,
        "publish": 0.03,
        "regroup": None,
        "restart": None,
        "load": None,
        "first_step": None,
    }
    assert (written["began"], written["events"][0]["host"]) == (records.utc(100.0), "n1")


LOST = msgspec.structs.replace(
    SAVED,
    outcome="lost",
    step=-1,
    line="rank 1 was ended by SIGKILL; the state cannot be saved: shard 1 has no live holder",
)


@pytest.mark.parametrize(
    ("tracker", "newest", "steps"),
    [("45", 47, 2), (None, 47, 7), ("45", -1, 3), ("50", 47, 0)],
    ids=["since-the-checkpoint", "since-what-was-loaded", "told-by-boards-alone", "none"],
)
def test_the_steps_of_a_state_that_is_lost(
    tracker: str | None, newest: int, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files, the command and the notice give the same number, though the job does not continue."""
    save = tmp_path / "save"
    save.mkdir()
    if tracker is not None:
        (save / naming.TRACKER).write_text(tracker)
    notices = RecordingNotifier()
    job = RecordedJob(tmp_path / "logs", notices.submit)
    job.report.record_progress(48 if newest < 0 else 46)
    job.rank_1_is_killed(100.0, msgspec.structs.replace(LOST, save_folder=str(save), newest=newest))
    job.report.record_next_action("the job ends: no restart is left")
    written = job.incident()
    assert (written["verdict"], written["steps_lost"]) == ("lost", steps)
    (notice,) = notices.notices()
    assert notice.incident is not None
    assert notice.incident.steps_lost == steps
    assert f"no live holder, {steps} step{'' if steps == 1 else 's'} lost; " in notice.text
    (tmp_path / "logs/job_7/status.json").touch()
    assert ttp.main(["incidents", str(tmp_path / "logs")]) == 0
    assert f"lost; steps lost: {steps}; the job ends" in capsys.readouterr().out


def test_the_steps_of_a_state_that_is_lost_with_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file exists anyway, and later names the step from which the job continued."""
    answers = threading.Event()
    monkeypatch.setattr(log, "TRACKER_S", 0.05)
    monkeypatch.setattr(log, "tracked_step", lambda root: 45 if answers.wait(LONG_S) else None)
    job = RecordedJob(tmp_path)
    job.rank_1_is_killed(100.0, LOST)
    assert job.incident()["steps_lost"] is None
    answers.set()
    job.report.begin(2)
    job.report.record_start()
    job.starts(110.0)
    job.report.record_progress(41)
    assert job.incident()["steps_lost"] == 7


@pytest.mark.parametrize("unprotected", [False, True])
def test_the_steps_of_a_job_that_had_nothing_to_save(unprotected: bool, tmp_path: Path) -> None:
    """The steps of an unprotected script are unknown."""
    job = RecordedJob(tmp_path)
    if unprotected:
        job.report.record_message(1, Unprotected(1, "SGD makes updates, and adaptor.protect was not called"))
    job.rank_1_is_killed(100.0, msgspec.structs.replace(SAVED, outcome="nothing", step=-1, newest=-1))
    assert job.incident()["steps_lost"] == (None if unprotected else 0)


def test_the_file_is_written_again_when_the_job_has_gone_on(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path)
    job.rank_1_is_killed(100.0)
    job.report.record_next_action("restart 1 of 3")
    job.report.begin(2)
    job.report.record_start()
    job.starts(110.0)
    job.report.record_progress(40)  # the step that was loaded
    assert job.incident()["phases"]["first_step"] is None
    job.report.record_progress(41)
    written = job.incident()
    assert (written["next_action"], written["steps_lost"]) == ("restart 1 of 3", 7)
    phases = written["phases"]
    assert [round(phases[name], 3) for name in ("restart", "load")] == [10.79, 2.0]
    assert phases["first_step"] > 0
    types = [event["type"] for event in operator_files.events(tmp_path / "job_7/events.jsonl")]
    assert types == [
        *("generation", "fault-noticed", "died", "written", "publish-ordered", "published", "verdict"),
        *("next-action", "generation", "gone-on"),
    ], "what every rank does is in the report alone"


def test_an_online_recovery(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path)
    recovered = Recovered(1, 47, "rank 1 was ended by SIGKILL; replaced", SAVED.fault, (1,))
    job.rank_1_is_killed(100.0, recovered, replaced_by=171)
    job.report.record_progress(48)
    written = job.incident()
    assert (written["verdict"], written["steps_lost"], written["phases"]["restart"]) == ("recovered", 0, None)
    assert written["phases"]["first_step"] > 0
    of_rank_1 = [(event["type"], event["pid"]) for event in written["events"] if event["rank"] == 1]
    assert of_rank_1 == [("fault-noticed", 71), ("freeze", 71), ("died", 71), ("started", 171)]


def test_a_process_that_ends_before_its_hello_has_its_own_pid(tmp_path: Path) -> None:
    """A newcomer, and a worker of the next generation, do not take the pid of their predecessor."""
    job = RecordedJob(tmp_path)
    recovered = Recovered(1, 47, "rank 1 was ended by SIGKILL; replaced", SAVED.fault, (1,))
    job.rank_1_is_killed(100.0, recovered, replaced_by=171)
    say, order = job.report.record_message, job.report.record_order
    # A newcomer that takes the place of 171 and dies while it imports.
    say(1, Dying(1, 200.0, BoardRecord(1, 171)), 200.0)
    say(1, Died(1, -9, 200.1, BoardRecord(1, 171)), 200.1)
    say(1, Died(1, -11, 200.2, BoardRecord(1, 271)), 200.2)
    order(1, 1, Exit(2), 200.3)
    order(0, None, msgspec.structs.replace(SAVED, incident=2), 200.4)
    written = job.incident()
    of_rank_1 = [(event["type"], event["pid"]) for event in written["events"] if event["rank"] == 1]
    assert of_rank_1 == [("fault-noticed", 171), ("died", 171), ("died", 271), ("exit", 271)]

    job.report.begin(2)
    job.report.record_start()
    order(1, 1, Freeze(3), 300.0)  # its pid is not known yet
    say(1, Died(1, 1, 300.1, BoardRecord(1, 371)), 300.1)
    say(0, Frozen(0, 3, BoardRecord(0, 370)), 300.2)
    order(0, None, msgspec.structs.replace(SAVED, incident=3), 300.3)
    pids = [(event["type"], event["pid"]) for event in job.incident()["events"]]
    assert pids == [("freeze", None), ("fault-noticed", 371), ("frozen", 370), ("verdict", None)]


@pytest.mark.parametrize(
    ("nodes", "action"),
    [
        (1, "the job ends, as ttprun was told"),
        (2, "ttprun on n1 ends, as it was told; the job goes on if enough nodes are left"),
    ],
)
def test_after_a_ttprun_that_got_a_signal(nodes: int, action: str, tmp_path: Path) -> None:
    report = IncidentReport(JobFiles(str(tmp_path)))
    report.begin(1)
    for node in range(nodes):
        report.record_message(node, AgentHello(node, (node,), host=f"n{node}"))
    report.record_message(nodes - 1, AgentTerminationRequested(nodes - 1, "SIGTERM"))
    fault = Fault("SIGTERM", 47, (), 70, "n1", "told-to-end")
    expected_fields = msgspec.structs.replace(SAVED, fault=fault, cause_rank=-1, exit_code=143)
    report.record_order(0, None, expected_fields)
    assert output.drain(LONG_S)
    assert json.loads(Path(report.path).read_text())["next_action"] == action


def test_a_rank_that_does_not_answer_is_silent(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path)
    for rank in (0, 1):
        job.report.record_order(rank, rank, Freeze(1), 5.0)
    job.report.record_message(0, Frozen(0, 1, BoardRecord(0)), 6.0)
    fault = Fault("a hang", 47, (1,), kind="hang")
    job.report.record_order(0, None, msgspec.structs.replace(SAVED, fault=fault), 7.0)
    written = job.incident()
    assert (written["silent"], written["cause"]["kind"]) == ([1], "hang")


def test_a_rank_that_hangs_and_is_replaced(tmp_path: Path) -> None:
    """The rank is ended for its silence: the hang began earlier, and the rank never answered."""
    job = RecordedJob(tmp_path)
    say, order = job.report.record_message, job.report.record_order
    say(0, NodeStalled(0, 6.0, 48, -1), 100.0)
    for rank in (0, 1):
        order(rank, rank, Freeze(1, stacks=True), 100.1)
    say(0, Frozen(0, 1, BoardRecord(0, 70, Phase.RUNNING, 47, 47)), 100.2)
    say(0, NodeStalled(0, 12.0, 48, -1), 106.0)
    order(1, None, Replace(1, 1, 1), 106.5)
    board = BoardRecord(1, 71, Phase.RUNNING, 47, 47)
    say(1, Dying(1, 107.0, board), 107.0)
    say(1, Died(1, -9, 107.1, board), 107.1)
    say(1, Hello(1, 171), 108.0)
    fault = Fault("a hang", 47, (1,), 71, "n1", "hang")
    order(0, None, Recovered(1, 47, "nothing has moved for 6 s", fault, (1,)), 109.0)
    written = job.incident()
    assert (written["silent"], written["blamed"], written["began"]) == ([1], 1, records.utc(100.1))
    assert (written["phases"]["detect"], round(written["phases"]["freeze"], 3)) == (6.0, 0.1)
    (noticed, *_) = (
        event
        for event in operator_files.events(tmp_path / "job_7/events.jsonl")
        if event["type"] == "fault-noticed"
    )
    assert noticed["data"] == {"detail": "nothing has moved for 6 s", "still": "6.000"}


def test_a_node_without_the_controller_writes_nothing(tmp_path: Path) -> None:
    report = IncidentReport(JobFiles(str(tmp_path)))
    report.begin(1)
    report.record_end(1)
    report.record_next_action("restart 1 of 3")
    report.close()
    assert list(tmp_path.iterdir()) == []
    assert (report.incidents, report.next_incident) == (1, 2)


def _dies(status: int) -> Failures:
    failures = Failures()
    failures.notice([1])
    failures.end(1, status)
    return failures


def _raises() -> Failures:
    return Failures(raised={1: Raised(1, "ValueError: 7", 1, Origin("ValueError", "train.py:12"))})


def _is_told() -> Failures:
    failures = Failures()
    failures.ask(1, "rank 1", "SIGTERM")
    return failures


def _is_away() -> Failures:
    failures = _dies(-9)
    failures.lost[1] = [1]
    return failures


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        (_dies(-9), "signal"),
        (_dies(3), "exit"),
        (_raises(), "exception"),
        (_is_told(), "told-to-end"),
        (_is_away(), "node-lost"),
        (Failures(hang_s=5.0), "hang"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_cause_has_a_kind(failures: Failures, kind: str) -> None:
    assert failures.first([]).kind == kind
    page = (Path(__file__).parents[2] / "docs/runbook.md").read_text()
    assert f"\n## {kind}\n" in page


class WatchedStatus:
    """The status of a job with two ranks on one node."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        files = JobFiles(str(logs), "job")
        self.controller = Controller(2, 10.0, ("", 0, b""))
        self.copy_step: int | None = None
        self.report = IncidentReport(files)
        self.status = JobStatus(files, self.report, 3, lambda: self.copy_step)

    def look(self, *finished: int, generation: int = 1) -> Status:
        boards = [BoardRecord(rank, 1, Phase.RUNNING, step, step) for rank, step in enumerate(finished)]
        self.status._written = -1e9  # a second has passed
        self.status.look(boards, self.controller, 0, 1, generation, 0)
        return self.read()

    def read(self) -> Status:
        assert output.drain(LONG_S)
        operator_files.assert_valid(self.logs)
        return msgspec.json.decode((self.logs / "job/status.json").read_bytes(), type=Status)

    def hears(self, *messages: Any) -> None:
        for message in messages:
            self.controller.handle(message, 1.0)


def test_the_status_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = WatchedStatus(tmp_path)
    job.hears(AgentHello(0, (0, 1), host="here"), Hello(0, 70), Hello(1, 71))
    assert (job.look(-1, -1).state, job.look(-1, -1).protected) == ("starting", None)
    shares = (Share("g", 0, 1),)
    job.hears(*(Layout(rank, shares, "/save", 0, "") for rank in (0, 1)))
    status = job.look(5, 4)
    assert (status.state, status.protected, status.step, status.save) == ("training", True, 5, "/save")
    assert job.look(5, 5).shard_holders == 2  # counted in the meantime
    job.hears(Dying(1, 2.0, BoardRecord(1, 71, Phase.RUNNING, 5, 5)))
    job.report.open_words = open_words = "rank 1 was ended by SIGKILL; step 5 is being saved"
    status = job.look(5, 5)
    assert (status.state, status.shard_holders, status.open_incident) == ("incident", None, open_words)
    for command in ("status", "incidents"):
        ttp.main([command, str(tmp_path / "job")])
        assert f"; one is open: {open_words}\n" in capsys.readouterr().out
    job.report.open_words = ""
    job.controller = Controller(2, 10.0, ("", 0, b""))  # after a restart no rank has reported the folder yet
    assert job.look(-1, -1, generation=2).save == "/save"
    job.status.end()
    assert (job.read().state, job.read().step) == ("ended", 5)
    job.status.note_last_step(7)  # finished after the last look at the boards
    job.status.end()
    assert job.read().step == 7


def test_the_status_lists_failed_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = WatchedStatus(tmp_path)
    for step in (4, 8):
        job.report.record_message(0, SaveEnded(0, step, "rank 1: No space left on device (/save)"))
    status = job.look(9, 9)
    assert (status.failed_saves, status.failed_save) == (2, "step 8: rank 1: No space left on device (/save)")
    ttp.main(["status", str(tmp_path / "job")])
    assert "\nfailed saves 2 one after the other; step 8: rank 1: No space" in capsys.readouterr().out
    job.report.record_message(0, SaveEnded(0, 12))
    status = job.look(12, 12)
    assert (status.failed_saves, status.failed_save) == (0, "")
    lines = (tmp_path / "job/events.jsonl").read_bytes().splitlines()
    events = [msgspec.json.decode(line, type=records.Event) for line in lines]
    assert [event.type for event in events] == ["save-failed", "save-failed", "saved-again"]


def test_a_series_of_failed_saves_has_two_notices(tmp_path: Path) -> None:
    class Notices:
        def submit(self, make: Callable[[], Notice]) -> None:
            expected_fields.append(make())

    expected_fields: list[Notice] = []
    report = IncidentReport(JobFiles(str(tmp_path), "job"), Notices().submit)
    for step, reason in ((2, ""), (4, "no room"), (6, "no room"), (8, ""), (10, "")):
        report.record_message(0, SaveEnded(0, step, reason))
    assert [(notice.type, notice.text) for notice in expected_fields] == [
        ("save", "job: step 4 could not be saved: no room; training goes on"),
        ("save", "job: step 8 is saved"),
    ]


def test_the_status_says_how_old_the_copies_in_host_memory_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = WatchedStatus(tmp_path)
    first_status = job.look(5, 5)
    assert (first_status.host_copy_step, first_status.host_copy_time) == (None, None)
    job.copy_step = 4
    first = job.look(5, 5)
    assert (first.host_copy_step, first.host_copy_time) == (4, first.time)
    later_status = job.look(6, 6)
    assert (later_status.host_copy_step, later_status.host_copy_time) == (4, first.time)
    assert later_status.time > first.time
    ttp.main(["status", str(tmp_path / "job")])
    assert "\nhost copy    step 4, made " in capsys.readouterr().out


def test_the_status_says_whether_a_drill_found_the_job_recoverable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = WatchedStatus(tmp_path)
    assert job.look(5, 5).drill_step is None
    job.report.record_message(0, Drilled(0, 4, 1))
    first = job.look(5, 5)
    assert (first.drill_step, first.drill_problem) == (4, "")
    ttp.main(["status", str(tmp_path / "job")])
    assert "\ndrill        recoverable at step 4, found out " in capsys.readouterr().out
    job.report.record_message(0, Drilled(0, 6, 0, "shard 1 of 2 of group a has no live holder"))
    job.look(6, 6)
    ttp.main(["status", str(tmp_path / "job")])
    drill_result = "not recoverable (without rank 0: shard 1 of 2 of group a has no live holder) at step 6"
    assert f"\ndrill        {drill_result}" in capsys.readouterr().out


def test_the_status_names_a_rank_that_computes_longer_than_its_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = WatchedStatus(tmp_path)
    job.hears(AgentHello(0, (0, 1), host="here"), Hello(0, 70), Hello(1, 71))
    job.hears(*(Layout(rank, (Share("g", 0, 1),), "/save", 0, "") for rank in (0, 1)))
    job.report.record_message(0, ComputeTimes(0, {0: ComputeTime(0.5), 1: ComputeTime(0.55)}))
    assert [job.look(step, step).slow_rank for step in (5, 6)] == [None, None]
    job.report.record_message(0, ComputeTimes(0, {1: ComputeTime(0.8)}))
    job.look(7, 7)
    status = job.look(8, 8)
    assert (status.slow_rank, status.slow_score) == (1, 1.6)
    ttp.main(["status", str(tmp_path / "job")])
    assert "\nslow         rank 1 computes 1.60 times as long as its peers" in capsys.readouterr().out


def test_ranks_with_another_part_of_the_model_are_no_measure() -> None:
    """The last stage of a pipeline computes longer than the first."""
    parts = {0: "first", 1: "first", 2: "first", 3: "last", 4: "last"}
    seconds = {0: 1.0, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.1}
    times = {rank: ComputeTime(of_step) for rank, of_step in seconds.items()}
    assert job_records.slow_rank(times, parts) == (2, 1.5)
    assert job_records.slow_rank({rank: times[rank] for rank in (3, 4)}, parts) is None
    assert job_records.slow_rank({rank: times[rank] for rank in (0, 3)}, parts) is None, "each has no peer"


def test_a_rank_with_more_tokens_or_with_few_of_them_is_not_slow() -> None:
    parts = dict.fromkeys(range(4), "")
    usual = {0: ComputeTime(1.0, 0.010), 1: ComputeTime(1.0, 0.010)}
    many_tokens, few_tokens = ComputeTime(2.0, 0.011), ComputeTime(0.5, 0.016)
    assert job_records.slow_rank({**usual, 2: many_tokens, 3: few_tokens}, parts) is None
    slow = {**usual, 2: many_tokens, 3: ComputeTime(3.0, 0.015)}
    assert job_records.slow_rank(slow, parts) == (3, 1.5)
    assert job_records.slow_rank({**usual, 2: ComputeTime(1.5)}, parts) == (2, 1.5), "tokens are unknown"


def test_a_log_folder_that_cannot_be_written_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The missing files are written once the folder is writable."""
    job = RecordedJob(tmp_path)
    folder = tmp_path / "job_7"
    assert output.drain(LONG_S)
    shutil.rmtree(folder)
    folder.touch()
    status = JobStatus(job.files, job.report, 3)
    for _ in range(3):
        _now(status)
    job.rank_1_is_killed(100.0)
    job.report.record_next_action("restart 1 of 3")
    assert output.drain(LONG_S)
    lines = capfd.readouterr().err.splitlines()
    reason = "the status of the job cannot be written (File exists); the job goes on"
    assert [line.startswith(f"[ttp] {folder}: {reason}") for line in lines] == [True, False]
    assert lines[1].startswith("[ttp] the incident report cannot be written: ")
    folder.unlink()
    _now(status)
    assert job.incident()["next_action"] == "restart 1 of 3"
    assert capfd.readouterr().err == f"[ttp] {folder}: the status of the job is written again\n"
    names = sorted(path.name for path in folder.rglob("*.json*"))
    assert names == [f"{job.report.last_id}.json", "status.json"]


def test_a_disk_that_is_full_has_no_half_of_a_file(tmp_path: Path) -> None:
    files = JobFiles(str(tmp_path), "job")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    status = JobStatus(files, IncidentReport(files), 3)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        _now(status)
        assert output.drain(LONG_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list((tmp_path / "job").iterdir()) == []


def test_a_log_disk_that_hangs_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = JobFiles(str(tmp_path), "job", patience_s=0.0)
    hangs = threading.Event()
    files.calculate(hangs.wait)
    status = JobStatus(files, IncidentReport(files), 3)
    for _ in range(3):
        _now(status)
    hangs.set()
    assert output.drain(LONG_S)
    first, second = capfd.readouterr().err.splitlines()
    assert "cannot be written (the disk does not answer); the job goes on" in first
    assert second == f"[ttp] {tmp_path}/job: the status of the job is written again"


def _now(status: JobStatus) -> None:
    """Have the status written as if a second had passed."""
    status._written = -1e9
    status.look([], Controller(2, 10.0, ("", 0, b"")), 0, 1, 1, 0)


def test_the_status_adds_up_the_time_of_ranks_outside_steps(tmp_path: Path) -> None:
    """The sum covers the processes of a rank, the nodes with the controller, and restarts of ttprun."""

    def reading(save: float) -> list[float]:
        return [30.0, 1.0, 2.0, save, 100.0, 4.0]  # in the order of USES; a load is reported with `training`

    first = WatchedStatus(tmp_path)
    first.status.uses.look(reading(save=8.0))
    uses = {"data": 1.0, "evaluation": 2.0, "save": 8.0, "other": 4.0}
    assert first.look(1).spent == {"productive": 30.0, "wasted": 0.0, **uses}
    first.status.uses.look(reading(save=0.5))  # of the replacement of the first process
    assert first.look(1).spent["save"] == 8.5
    second = WatchedStatus(tmp_path)
    second.status.uses.look(reading(save=10.0))
    assert second.look(1).spent["save"] == 18.5
    first.status.uses.begin()  # the controller runs again, with new workers
    first.status.uses.look(reading(save=2.0))
    assert first.look(1, generation=2).spent["save"] == 20.5
    first.status.uses.look(reading(save=3.0))  # a last save
    first.status.end()
    assert first.read().spent["save"] == 21.5


def test_repeated_steps_are_reported_as_repeated(tmp_path: Path) -> None:
    """After a restart of the workers, a take-over by a node, and a new ttprun."""

    def look(job: WatchedStatus, step: int, seconds: float, generation: int = 1) -> tuple[float, float]:
        job.status.uses.look([seconds, 0.0, 0.0, 0.0, 0.0, 0.0])
        spent = job.look(step, generation=generation).spent
        return spent["productive"], spent["wasted"]

    first = WatchedStatus(tmp_path)
    assert look(first, 10, 10.0) == (10.0, 0.0)
    first.status.uses.begin()
    assert look(first, 6, 0.0, generation=2) == (10.0, 0.0)  # the loaded step
    assert look(first, 8, 2.0, generation=2) == (10.0, 2.0)
    assert look(first, 8, 2.5, generation=2) == (10.0, 2.5)
    assert look(first, 12, 6.5, generation=2) == (12.0, 4.5)  # half of four steps
    second = WatchedStatus(tmp_path)
    assert look(second, 11, 0.0) == (12.0, 4.5)
    assert look(second, 13, 2.0) == (13.0, 5.5)
    assert look(second, 14, 3.0) == (14.0, 5.5)


def test_steps_are_timed_between_readings_while_the_job_trains() -> None:
    timer = StepTimer()
    for reading, step in enumerate([-1, 3, 3, 4, 6, 6]):  # the end of step 3 is unknown
        timer.look(step, 2.0 * reading, counts=True)
    assert timer.times() == StepTimes(limits=list(LIMITS_S), counts=[0, 0, 2, 0, 0, 0, 0, 0, 0], sum=2.0)
    timer.look(7, 20.0, counts=False)
    timer.look(7, 21.0, counts=True)  # after an incident: repeated or not
    timer.look(8, 22.0, counts=True)
    timer.look(9, 422.0, counts=True)
    times = timer.times()
    assert times is not None
    assert (times.counts, times.sum) == ([0, 0, 2, 0, 0, 0, 0, 0, 1], 402.0)


def test_a_job_that_is_not_protected_says_why(tmp_path: Path) -> None:
    job = WatchedStatus(tmp_path)
    job.hears(AgentHello(0, (0, 1)), Hello(0, 70), Unprotected(0, "no adaptor.protect"))
    status = job.look(-1, -1)
    assert (status.protected, status.why_not) == (False, "no adaptor.protect")


def _written(logs: Path, **changes: Any) -> None:
    job = WatchedStatus(logs)
    job.hears(AgentHello(0, (0, 1)), Hello(0, 70))
    fields = {"time": records.utc(time.time()), "state": "training", "protected": True, **changes}
    status = msgspec.structs.replace(job.look(5, 5), **fields)
    (logs / "job/status.json").write_bytes(msgspec.json.encode(status))


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({}, 0, "job: training"),
        ({"protected": False, "why_not": "no steps"}, 1, "NOT PROTECTED: no steps"),
        ({"state": "ended"}, 0, "it was protected to its end"),
        ({"state": "ended", "protected": None}, 0, "never protected"),
        ({"time": "2026-01-31T12:00:00+00:00"}, 1, "last training"),
        ({"time": "2026-01-31T12:00:00+00:00", "state": "ended"}, 0, "job: ended"),
        ({"save": "a\x1b[2J\ud800".encode("utf-8", "ignore").decode()}, 0, "save folder  a?[2J"),
    ],
    ids=["training", "unprotected", "to its end", "never", "silent", "ended", "a name that is no text"],
)
def test_ttp_status(
    changes: dict[str, Any], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _written(tmp_path, **changes)
    assert ttp.main(["status", str(tmp_path)]) == code
    assert text in capsys.readouterr().out
    assert ttp.main(["status", str(tmp_path / "job"), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["job"] == "job"


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"schema": "ttp.status/2"}', b"\xff"])
def test_a_status_that_is_none_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert ttp.main(["status", str(tmp_path)]) == terminal.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ttp: error: {tmp_path}/status.json: it was not written by ttprun")


@pytest.mark.parametrize("command", ["status", "incidents"])
def test_nothing_to_read_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert ttp.main([command, str(folder)]) == terminal.USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"ttp: error: {folder}: ")


def test_ttp_incidents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _written(tmp_path)
    job = RecordedJob(tmp_path)
    job.rank_1_is_killed(100.0)
    job.incident()
    (tmp_path / "job").rename(tmp_path / "other")
    (tmp_path / "other/status.json").rename(tmp_path / "job_7/status.json")
    assert ttp.main(["incidents", str(tmp_path)]) == 0
    stdout = capsys.readouterr().out
    assert "saved; steps lost: 0" in stdout
    assert "detect 20 ms, freeze 30 ms, write 100 ms, publish 30 ms" in stdout
    assert ttp.main(["incidents", "--json", str(tmp_path)]) == 0
    assert [record["blamed"] for record in json.loads(capsys.readouterr().out)] == [1]
    path = Path(job.report.path)
    record = msgspec.json.decode(path.read_bytes(), type=records.IncidentRecord)
    record.began, record.ended = records.utc(100.0), records.utc(102.0)
    record.phases = records.Phases(restart=2.0, load=5.0, first_step=1.5)
    path.write_bytes(msgspec.json.encode(record))
    assert ttp.main(["incidents", str(tmp_path)]) == 0
    stdout = capsys.readouterr().out
    assert (
        "  first step again 10.5 s after the fault was noticed: restart 2.0 s, load 5.0 s, first " in stdout
    )


def test_where_no_step_has_finished_none_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _written(tmp_path)
    report = IncidentReport(JobFiles(str(tmp_path), "job"))
    report.begin(1)
    report.record_message(0, AgentHello(0, (0,), host="n0"))
    line = "rank 1 was ended by SIGKILL; nothing to save: no step has finished"
    expected_fields = msgspec.structs.replace(SAVED, outcome="nothing", step=-1, newest=-1, line=line)
    report.record_order(0, None, expected_fields)
    assert output.drain(LONG_S)
    assert ttp.main(["incidents", str(tmp_path)]) == 0
    next_action = "the workers are started again, if a restart is left"
    shown = capsys.readouterr().out.splitlines()
    assert shown[1:] == [f"  {line}", f"  nothing; steps lost: 0; {next_action}", "1 incident"]


def _checkpoint(save: Path, step: int) -> Path:
    folder = save / naming.final_name(step)
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"content")
    entry = FileEntry("a", 7, hashing.hash_file(folder / "a"))
    (folder / naming.MANIFEST).write_bytes(Manifest.now(step, [entry], {}, 1).encode())
    (save / naming.TRACKER).write_text(str(step))
    return folder


def test_verify_names_the_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "save"
    folder = save / naming.final_name(5)
    folder.mkdir(parents=True)
    entries = []
    for name in ("changed", "cut", "gone", "right", "unhashed"):
        (folder / name).write_bytes(b"content")
        entries.append(FileEntry(name, 7, hashing.hash_file(folder / name) if name != "unhashed" else None))
    (folder / naming.MANIFEST).write_bytes(Manifest.now(5, entries, {}, 1).encode())
    (save / naming.TRACKER).write_text("5")
    assert ttp.main(["verify", str(save)]) == 0
    assert "step 5: sizes are right (the tracker names it), 5 files" in capsys.readouterr().out
    (folder / "changed").write_bytes(b"c0ntent")
    (folder / "cut").write_bytes(b"c")
    (folder / "gone").unlink()
    assert ttp.main(["verify", str(save), "--json"]) == 1
    (checkpoint,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert checkpoint["state"] == "damaged"
    assert {file["path"]: file["state"] for file in checkpoint["files"]} == {
        "changed": "changed",
        "cut": "changed",
        "gone": "missing",
        "right": "ok",
        "unhashed": "unhashed",
    }
    assert ttp.main(["verify", str(save)]) == 1
    stdout = capsys.readouterr().out
    assert [line.split()[::2] for line in stdout.splitlines()[1:4]] == [
        ["changed", "changed"],
        ["changed", "cut"],
        ["missing", "gone"],
    ]
    assert ttp.main(["verify", str(tmp_path / "none")]) == 2
    assert "there is no such folder; name a --save folder" in capsys.readouterr().err


def test_verify_reports_files_that_it_may_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _checkpoint(tmp_path, 5)
    (folder / "a").unlink()
    (folder / "a").symlink_to("/proc/self/mem")  # can be opened but not read
    entry = FileEntry("a", 0, "0" * 32)
    (folder / naming.MANIFEST).write_bytes(Manifest.now(5, [entry], {}, 1).encode())
    assert ttp.main(["verify", str(tmp_path)]) == terminal.USAGE
    assert "step 5: unreadable" in capsys.readouterr().out


def test_ttp_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _checkpoint(tmp_path, 5)
    newest = _checkpoint(tmp_path, 10)
    (tmp_path / naming.final_name(3)).mkdir()
    assert ttp.main(["verify", str(tmp_path)]) == 0
    stdout = capsys.readouterr().out
    assert "step 10: intact (the tracker names it)" in stdout
    assert "step 3: not known" in stdout
    assert "  complete    yes, 1 file\n  bytes       as written\n  state       no agreed sums" in stdout
    saved = manifest.read(newest)
    group = AgreedGroup("0", [AgreedShard({"param": "0"}, (0, 2)), AgreedShard({"param": "0"}, (1, 3))], 10)
    agreed = replace(saved, state=AgreedState(10, {"mp_rank_00": group}))
    (newest / naming.MANIFEST).write_bytes(agreed.encode())
    assert ttp.main(["verify", str(tmp_path), "--step", "10"]) == 0
    line = "as trained: step 10, 2 shards, each agreed by 2 or more holders (ranks 0, 1, 2, 3)"
    assert f"  state       {line}" in capsys.readouterr().out
    group.shards[0] = AgreedShard({"param": "0"}, (0,))
    (newest / naming.MANIFEST).write_bytes(agreed.encode())
    assert ttp.main(["verify", str(tmp_path), "--step", "10"]) == 0
    line = "step 10, 1 of 2 shards not confirmed by a second holder (ranks 0)"
    assert f"  state       {line}" in capsys.readouterr().out
    (newest / "a").write_bytes(b"c0ntent")
    assert ttp.main(["verify", str(tmp_path), "--step", "10", "--json"]) == 1
    (checkpoint,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (checkpoint["state"], checkpoint["problems"]) == (
        "damaged",
        [f"{newest}/a: checksum differs from the manifest"],
    )
    assert ttp.main(["verify", str(tmp_path), "--step", "5"]) == 0
    assert ttp.main(["verify", str(newest)]) == 2
    for text in ("", "ten"):
        (tmp_path / naming.TRACKER).write_text(text)
        assert ttp.main(["verify", str(tmp_path)]) == 1
    (tmp_path / naming.TRACKER).write_text("11")
    capsys.readouterr()
    assert ttp.main(["verify", str(tmp_path)]) == 1
    assert "the tracker names step 11, of which there is no folder" in capsys.readouterr().out
    assert ttp.main(["verify", str(tmp_path), "--step", "4"]) == terminal.USAGE
    assert ttp.main(["verify", str(tmp_path / "none")]) == terminal.USAGE

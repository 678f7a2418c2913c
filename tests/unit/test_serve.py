"""`ttp serve` and `ttp goodput`, on files as ttprun writes them."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from adaptor import config, output, terminal
from adaptor.errors import ConfigError
from adaptor.launchers.cli import ttp
from adaptor.launchers.operations.hooks import OperationsHooks
from adaptor.operations import access, cli, serve
from adaptor.operations.goodput import USES, Goodput, TimeSpent
from adaptor.operations.job_reader import CheckpointSummary, JobReader
from adaptor.operations.serve import exposition
from adaptor.operations.settings import HostPort
from adaptor.protocol import records
from adaptor.protocol.records import (
    Cause,
    Event,
    IncidentRecord,
    IncidentSummary,
    Phases,
    Status,
    StepTimes,
    Versions,
    utc,
)
from tests import certificates
from tests.unit.launching import DROPPED, HEARS_CTRL_C

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
BEGAN = 1_700_000_000.0


def event(at: float, kind: str, step: int | None = None, generation: int = 1) -> Event:
    return Event(time=utc(BEGAN + at), job="j", generation=generation, incident=None, type=kind, step=step)


def incident(number: int = 1, *, lost: int | None = 2) -> IncidentRecord:
    return IncidentRecord(
        id=f"20260101T000000Z-{number}",
        job="j",
        generation=1,
        incident=number,
        began=utc(BEGAN + 50),
        ended=utc(BEGAN + 51),
        cause=Cause(kind="signal", signal="SIGKILL"),
        reason="rank 1 was ended by SIGKILL",
        blamed=1,
        node=0,
        host="n0",
        pid=7,
        failed=[1],
        silent=[],
        verdict="saved",
        step=8,
        newest_step=10,
        steps_lost=lost,
        phases=Phases(detect=0.02, publish=0.2),
        checkpoint="/save/iter_0000008",
        bytes=100,
        exit_code=None,
        next_action="",
        not_started_again="",
        runbook="",
        versions=Versions(adaptor="0", torch="0", python="0"),
        ranks=[1],
        events=[event(50, "fault-noticed")],
    )


def status(**changes: object) -> Status:
    first = Status(
        time=utc(time.time()),
        job="j",
        state="training",
        generation=2,
        node=0,
        host="n0",
        pid=7,
        term=0,
        restarts=1,
        max_restarts=3,
        nodes=2,
        nodes_lost=1,
        ranks=8,
        ranks_training=7,
        ranks_ended=1,
        step=18,
        step_time=utc(BEGAN + 100),
        protected=True,
        why_not="",
        incidents=1,
        last_incident="20260101T000000Z-1",
        save="",
        lost_nodes=[1],
        shard_holders=2,
        step_times=StepTimes(limits=[0.1, 1.0], counts=[3, 2, 1], sum=7.5),
        spent={"productive": 60.0, "wasted": 4.0},
        host_copy_step=16,
        host_copy_time=utc(BEGAN + 95),
        slow_rank=1,
        slow_score=1.5,
        drill_step=16,
        drill_time=utc(BEGAN + 96),
        drill_problem="without rank 1: ranks 0 and 1 hold different bits",
    )
    return msgspec.structs.replace(first, **changes)


EVENTS = [
    event(0, "generation"),
    event(10, "training", 0),
    event(50, "fault-noticed"),
    event(51, "verdict"),
    event(52, "generation", generation=2),
    event(58, "training", 8, generation=2),
    event(60, "gone-on", 9, generation=2),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "j"
    (folder / "incidents").mkdir(parents=True)
    (folder / records.STATUS_FILE).write_bytes(msgspec.json.encode(status()))
    (folder / "incidents" / f"{incident().id}.json").write_bytes(msgspec.json.encode(incident()))
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in EVENTS)
    (folder / records.EVENTS_FILE).write_bytes(lines)
    return folder


def server_of(
    folder: Path,
    host: str = "127.0.0.1",
    *,
    token: Path | None = None,
    certificate: tuple[Path, Path] | None = None,
) -> serve.Server:
    address = HostPort(host, 0)
    clients = access.clients(address, token, certificate)
    return serve.Server(folder, access.listen(address), clients)


@contextmanager
def served(server: serve.Server) -> Iterator[str]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def get(
    url: str, headers: dict[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> tuple[int, str]:
    try:
        request = urllib.request.Request(url, headers=headers or {})
        with urllib.request.urlopen(request, context=tls) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics_of(text: str) -> dict[str, float]:
    """The samples of a page by `name{label=value,...}`."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


def test_the_metrics_of_a_job(job: Path) -> None:
    with served(server_of(job.parent)) as address:
        code, text = get(f"http://{address}/metrics", {"Accept": OPENMETRICS})
    assert code == 200
    values = metrics_of(text)
    expected = {
        "ttp_running": 1,
        "ttp_protected": 1,
        "ttp_finished_step": 18,
        "ttp_last_step_timestamp_seconds": BEGAN + 100,
        "ttp_generation": 2,
        "ttp_ranks{state=training}": 7,
        "ttp_ranks{state=ended}": 1,
        "ttp_nodes{state=lost}": 1,
        "ttp_agent_up{node=0}": 1,
        "ttp_agent_up{node=1}": 0,
        "ttp_shard_holders_min": 2,
        "ttp_host_copy_step": 16,
        "ttp_host_copy_timestamp_seconds": BEGAN + 95,
        "ttp_slow_rank": 1,
        "ttp_slow_score": 1.5,
        "ttp_drill_recoverable": 0,
        "ttp_drill_step": 16,
        "ttp_drill_timestamp_seconds": BEGAN + 96,
        "ttp_step_duration_seconds_bucket{le=1.0}": 5,
        "ttp_step_duration_seconds_count": 6,
        "ttp_step_duration_seconds_sum": 7.5,
        "ttp_incident_open": 0,
        "ttp_restarts_total": 1,
        "ttp_restarts_remaining": 2,
        "ttp_incidents_total{cause=signal,verdict=saved}": 1,
        "ttp_steps_lost_total": 2,
        "ttp_incident_phase_seconds_bucket{le=0.1,phase=publish}": 0,
        "ttp_incident_phase_seconds_bucket{le=0.3,phase=publish}": 1,
        "ttp_incident_phase_seconds_sum{phase=publish}": 0.2,
        "ttp_time_seconds_total{state=productive}": 60,
        "ttp_time_seconds_total{state=wasted}": 4,
        "ttp_time_seconds_total{state=save}": 0,
        "ttp_time_seconds_total{state=startup}": 10,
        "ttp_time_seconds_total{state=recovery}": 8,
    }
    assert {name: values.get(name) for name in expected} == expected
    assert not [name for name in values if "rank=" in name]


def test_the_page_names_each_metric(job: Path) -> None:
    """docs/operations.md lists every served metric."""
    text = exposition(JobReader(job), CheckpointSummary(1, 1.0, 1), OPENMETRICS)[0].decode()
    served = {family.name for family in text_string_to_metric_families(text)}
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    named = {
        name.removesuffix("_total").removesuffix("_info")
        for name in re.findall(r"^\| `(ttp_\w+)", page, re.M)
    }
    assert {name.removesuffix("_total").removesuffix("_info") for name in named} == served


def test_the_newest_checkpoint_is_among_the_metrics(job: Path, tmp_path: Path) -> None:
    from adaptor.checkpoint.manifest import Manifest
    from adaptor.protocol import naming
    from adaptor.protocol.naming import FileEntry

    folder = tmp_path / "save" / naming.final_name(8)
    folder.mkdir(parents=True)
    written = Manifest.now(8, [FileEntry("a", 1000, None), FileEntry("b", 24, None)], {}, 2)
    (folder / naming.MANIFEST).write_bytes(written.encode())
    (tmp_path / "save" / naming.TRACKER).write_text("8")
    (job / records.STATUS_FILE).write_bytes(msgspec.json.encode(status(save=str(tmp_path / "save"))))
    server = server_of(job)
    with served(server) as address:
        assert server.newest.looked.wait(60)
        values = metrics_of(get(f"http://{address}/metrics", {"Accept": OPENMETRICS})[1])
    assert (values["ttp_checkpoint_step"], values["ttp_checkpoint_bytes"]) == (8, 1024)


def test_the_files_of_a_job(job: Path) -> None:
    with served(server_of(job.parent)) as address:
        base = f"http://{address}"
        assert json.loads(get(f"{base}/api/v1/status")[1])["step"] == 18
        (listed,) = json.loads(get(f"{base}/api/v1/incidents")[1])
        assert listed["cause"]["kind"] == "signal"
        assert "events" not in listed
        assert json.loads(get(f"{base}/api/v1/incidents/{listed['id']}")[1])["events"]
        assert [entry["type"] for entry in json.loads(get(f"{base}/api/v1/events?limit=2")[1])] == [
            "training",
            "gone-on",
        ]
        assert get(f"{base}/")[1].startswith("<!doctype html>")
        assert get(f"{base}/healthz") == (200, "ok\n")
        assert get(f"{base}/readyz") == (200, "ok\n")
        for path in ("/api/v1/incidents/..%2f..%2fstatus", "/api/v1/incidents/none", "/nothing"):
            assert get(f"{base}{path}")[0] == 404
        for limit in ("0", "1001", "000000001000000", "9" * 40, "x"):
            code, text = get(f"{base}/api/v1/events?limit={limit}")
            assert (code, text.endswith("it must be a number from 1 to 1000\n")) == (400, True)
        for path in (f"/api/v1/incidents/{'a' * 300}", "/api/v1/events?limit=%"):
            assert get(f"{base}{path}")[0] == 400


def test_a_job_is_served_until_it_has_ended(job: Path) -> None:
    """Two jobs write to one log folder; each is in turn the newest."""
    newer_job = job.parent / "k"
    (newer_job / "incidents").mkdir(parents=True)

    def write(folder: Path, **changes: object) -> None:
        (folder / records.STATUS_FILE).write_bytes(msgspec.json.encode(status(job=folder.name, **changes)))

    with served(server_of(job.parent)) as address:
        assert json.loads(get(f"http://{address}/api/v1/status")[1])["job"] == "j"
        write(newer_job)
        assert json.loads(get(f"http://{address}/api/v1/status")[1])["job"] == "j"
        write(job, state="ended")
        write(newer_job)
        assert json.loads(get(f"http://{address}/api/v1/status")[1])["job"] == "k"


def test_the_number_of_clients_is_limited(job: Path) -> None:
    """Each silent client holds a thread; a further client is refused, and served once one has left."""
    with served(server_of(job)) as address:
        host, _, port = address.partition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(serve.MOST_CLIENTS)]
        with socket.create_connection((host, int(port))) as one_more:
            assert one_more.recv(1) == b""
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": "ended"}, "the job has ended"),
        ({"state": "incident"}, "the job is not training: incident"),
        ({"protected": False, "why_not": "no replica"}, "not protected: no replica"),
        ({"protected": None}, "not yet protected"),
        ({"time": utc(BEGAN)}, "no status was written for"),
    ],
)
def test_a_job_is_not_ready(job: Path, changes: dict[str, object], message: str) -> None:
    (job / records.STATUS_FILE).write_bytes(msgspec.json.encode(status(**changes)))
    with served(server_of(job)) as address:
        code, text = get(f"http://{address}/readyz")
    assert (code, text.startswith(message)) == (503, True)


def test_the_server_is_read_only(job: Path) -> None:
    with served(server_of(job)) as address:
        connection = http.client.HTTPConnection(address)
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            connection.request(method, "/api/v1/status")
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
            assert b"nothing can be changed" in answer.read()
        connection.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("localhost:80", 200),
        ("127.3.2.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("10.0.0.1", 421),
        ("[::1", 421),
    ],
)
def test_a_name_of_another_site_is_not_served(job: Path, host: str, code: int) -> None:
    with served(server_of(job)) as address:
        assert get(f"http://{address}/healthz", {"Host": host})[0] == code


def test_a_client_without_a_thread_for_its_end_takes_no_place(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    with served(server_of(job)) as address:
        host, _, port = address.partition(":")
        monkeypatch.setattr(threading.Timer, "start", refuses)
        for _ in range(serve.MOST_CLIENTS + 1):
            with socket.create_connection((host, int(port)), timeout=60) as client:
                assert client.recv(1) == b"", "it is turned away"
        monkeypatch.undo()
        assert get(f"http://{address}/healthz")[0] == 200


def test_a_removed_folder_is_reported(job: Path) -> None:
    with served(server_of(job.parent)) as address:
        job.rename(job.parent.parent / "gone")
        code, text = get(f"http://{address}/metrics")
        assert code == 503
        assert "no job has written here" in text
        (job.parent.parent / "gone").rename(job)
        assert get(f"http://{address}/metrics")[0] == 200


def test_an_external_address_needs_a_token_and_tls(job: Path, tmp_path: Path) -> None:
    with pytest.raises(access.ServeError, match="other machines reach this address"):
        server_of(job, "0.0.0.0")
    token = tmp_path / "token"
    token.write_text("a-word-that-nobody-guesses\n")
    token.chmod(0o644)
    with pytest.raises(access.ServeError, match="others can read it"):
        server_of(job, token=token)
    token.chmod(0o600)
    signer = certificates.Authority(tmp_path / "tls")
    settings = signer.settings()
    certificate = (Path(settings["TTP_TLS_CERT"]), Path(settings["TTP_TLS_KEY"]))
    server = server_of(job, "0.0.0.0", token=token, certificate=certificate)
    trusts = ssl.create_default_context(cafile=signer.path)
    trusts.check_hostname = False
    with served(server) as address:
        url = f"https://{address}/metrics"
        assert get(url, tls=trusts)[0] == 401
        assert get(url, {"Authorization": "Bearer wrong"}, trusts)[0] == 401
        assert get(url, {"Authorization": "Bearer a-word-that-nobody-guesses"}, trusts)[0] == 200


def test_a_taken_port_is_one_line(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(server_of(job)) as address:
        port = address.partition(":")[2]
        assert ttp.main(["serve", str(job), "--port", port]) == terminal.USAGE
    assert f"127.0.0.1:{port}: the address cannot be had" in capsys.readouterr().err


def test_a_taken_port_ends_ttprun_only_before_the_first_workers(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(server_of(job)) as address:
        hooks = OperationsHooks(config.load({"TTP_SERVE": address}))
        hooks.begins(0, 2)
        with pytest.raises(ConfigError, match=f"^TTP_SERVE is {address}: the address cannot be had"):
            hooks.has_controller(job, took_over=False)
        operations_hooks = OperationsHooks(config.load({"TTP_SERVE": address}))
        operations_hooks.begins(1, 2)  # the controller is on another node
        operations_hooks.begins(0, 1)
        operations_hooks.has_controller(job, took_over=False)
        output.finish()
    assert f"this node does not serve the job: TTP_SERVE is {address}: " in capsys.readouterr().err


# Calls `interrupt` on the main thread while it still waits for the thread of an answered client.
WHERE_IT_STARTS_A_THREAD = """
import threading
start = threading.Thread.start
def interrupted(thread):
    start(thread)
    if thread.name.endswith("(process_request_thread)"):
        thread.join()
        interrupt()
threading.Thread.start = interrupted
"""
RAISED = "interrupt = lambda: signal.raise_signal(signal.SIGINT)"
# As when the signal comes between the two lines that release the lock in `Condition.wait`.
REPLACED = """
def interrupt():
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        threading.Lock().release()
"""


@pytest.mark.parametrize(
    "setup",
    [
        "",
        f"{RAISED}\n{WHERE_IT_STARTS_A_THREAD}",
        f"{REPLACED}\n{WHERE_IT_STARTS_A_THREAD}",
        f"{DROPPED}\n{WHERE_IT_STARTS_A_THREAD}",
    ],
    ids=["waiting", "starting", "replaced", "dropped"],
)
def test_the_command_says_where_it_serves(setup: str, job: Path) -> None:
    program = f"{HEARS_CTRL_C}\n{setup}\nfrom adaptor.launchers.cli import ttp; raise SystemExit(ttp.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "serve", str(job), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        answer = json.loads(command.stdout.readline())
        assert answer["folder"] == str(job)
        assert get(f"{answer['url']}/api/v1/status")[0] == 200
        if not setup:
            command.send_signal(signal.SIGINT)
    assert command.returncode == 130


@pytest.mark.parametrize("port", ["-1", "65536", "http", ""])
def test_an_invalid_port_is_one_line(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ttp.main(["serve", "--port", port])
    assert "it must be a number from 0 to 65535" in capsys.readouterr().err


NO_OTHER_USE = dict.fromkeys((*USES, "load"), 0.0)


def goodput(
    events: Iterable[Event],
    incidents: Sequence[IncidentSummary],
    *,
    newest: int | None,
    until: float | None,
    uses: Mapping[str, float] | None = None,
) -> Goodput:
    spent = TimeSpent()
    for event in events:
        spent.add(event)
    return spent.until(until, newest=newest, incidents=incidents, uses=uses or {})


def summary(number: int = 1, *, lost: int | None = 2) -> IncidentSummary:
    return msgspec.convert(msgspec.to_builtins(incident(number, lost=lost)), IncidentSummary)


def test_goodput_of_a_ttprun_that_was_killed() -> None:
    """In training and in a recovery; the time until the next start may not have been productive."""
    events = [
        event(0, "generation"),
        event(10, "training", 0),
        event(50, "published", 5),
        event(1000, "generation"),
        event(1010, "training", 5),
        event(1050, "fault-noticed"),
        event(1060, "verdict"),
        event(2000, "generation"),
        event(2010, "training", 9),
        event(2050, "ended"),
    ]
    spent = goodput(events, [], newest=None, until=None)
    assert spent.seconds == {
        **NO_OTHER_USE,
        "productive": 120.0,
        "wasted": 0.0,
        "startup": 30.0,
        "recovery": 10.0,
        "down": 1890.0,
    }


def test_goodput_before_the_first_step_of_a_new_start() -> None:
    """The newest step is unknown then; the lost steps do not make all of the time wasted."""
    assert goodput(EVENTS, [summary()], newest=None, until=BEGAN + 100).seconds["wasted"] < 20


def test_goodput() -> None:
    # 40 s and 42 s of training for 18 kept and 2 lost steps: 4.1 s a step.
    spent = goodput(EVENTS, [summary()], newest=18, until=BEGAN + 100)
    assert spent == Goodput(
        seconds={
            **NO_OTHER_USE,
            "productive": 73.8,
            "wasted": 8.2,
            "startup": 10.0,
            "recovery": 8.0,
            "down": 0.0,
        },
        steps=18,
        lost=2,
        ratio=0.738,
    )


def test_goodput_excludes_work_besides_steps() -> None:
    """82 s of training: 20 s of data waits, evaluation and saves; 2 of 20 steps were lost."""
    uses = {"data": 2.0, "evaluation": 12.0, "save": 5.0, "other": 1.0, "of a later version": 40.0}
    loads = iter(("4.5", "2.25"))
    events = [
        msgspec.structs.replace(event, data={"load": next(loads)}) if event.type == "training" else event
        for event in EVENTS
    ]
    seconds = goodput(events, [summary()], newest=18, until=BEGAN + 100, uses=uses).seconds
    assert {use: seconds[use] for use in USES} == {use: uses[use] for use in USES}
    assert (seconds["productive"], seconds["wasted"]) == (pytest.approx(55.8), pytest.approx(6.2))
    assert (seconds["startup"], seconds["load"], seconds["recovery"]) == (5.5, 6.75, 5.75)
    assert sum(seconds.values()) == pytest.approx(100.0)


@pytest.mark.parametrize("load", ["1e9", "-3", "nan", "inf", "soon"])
def test_no_reading_makes_more_time_than_there_was(load: str) -> None:
    events = [
        msgspec.structs.replace(event, data={"load": load}) if event.type == "training" else event
        for event in EVENTS
    ]
    seconds = goodput(events, [], newest=18, until=BEGAN + 100, uses={"data": 1e9, "save": 1e9}).seconds
    assert min(seconds.values()) >= 0.0
    assert sum(seconds.values()) == pytest.approx(100.0)
    assert seconds["productive"] == pytest.approx(0.0)
    assert seconds["data"] == pytest.approx(seconds["save"])


def test_goodput_of_a_job_that_was_started_again() -> None:
    events = [
        event(0, "generation"),
        event(10, "training", 0),
        event(50, "fault-noticed"),
        event(55, "ended"),
        event(155, "generation"),
        event(165, "training", 10),
        event(205, "ended"),
    ]
    spent = goodput(events, [summary(lost=0)], newest=20, until=BEGAN + 205)
    assert spent.seconds == {
        **NO_OTHER_USE,
        "productive": 80.0,
        "wasted": 0.0,
        "startup": 20.0,
        "recovery": 5.0,
        "down": 100.0,
    }


def test_goodput_of_a_job_that_has_ended_with_a_state_that_is_lost() -> None:
    """4 s a step; 3 of 10 steps are in a checkpoint, and the others were never trained again."""
    events = [
        event(0, "generation"),
        event(10, "training", 0),
        event(50, "fault-noticed"),
        event(55, "ended"),
    ]
    spent = goodput(events, [summary(lost=7)], newest=10, until=BEGAN + 55)
    assert (spent.steps, spent.lost) == (3, 7)
    assert (spent.seconds["productive"], spent.seconds["wasted"]) == (pytest.approx(12), pytest.approx(28))


@pytest.mark.parametrize("known_losses", [[], [7]])
def test_steps_lost_that_nobody_knows_are_not_0(known_losses: list[int]) -> None:
    incidents = [summary(number, lost=lost) for number, lost in enumerate([None, *known_losses])]
    spent = goodput(EVENTS, incidents, newest=18, until=BEGAN + 100)
    assert spent.lost is None
    assert cli._goodput_lines(spent)[-1].endswith(" steps, how many more were lost is not known")
    values = {
        sample.name: sample.value for family in serve._of_incidents(incidents) for sample in family.samples
    }
    assert values.get("ttp_steps_lost_total") == (7 if known_losses else None)
    assert values["ttp_incidents_of_unknown_loss"] == 1


@pytest.mark.parametrize("still_s", ["30.0", "1e9"])
def test_goodput_of_a_hang(still_s: str) -> None:
    """The seconds without progress count as no training; the previous event bounds them."""
    noticed = msgspec.structs.replace(event(50, "fault-noticed"), data={"still": still_s})
    spent = goodput(
        [event(0, "generation"), event(10, "training", 0), noticed], [], newest=9, until=BEGAN + 60
    )
    training = 10 if still_s == "30.0" else 0
    assert (spent.seconds["productive"], spent.seconds["recovery"]) == (training, 50 - training)


def test_goodput_of_clocks_that_disagree_is_never_negative() -> None:
    events = [event(100, "generation"), event(90, "training", 0), event(95, "ended")]
    spent = goodput(events, [], newest=None, until=None)
    assert all(seconds >= 0 for seconds in spent.seconds.values())


def test_goodput_as_text(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (job / records.EVENTS_FILE).open("ab") as file:
        file.write(b'{"time": "20')  # a line being written
    (job / records.STATUS_FILE).write_bytes(msgspec.json.encode(status(time=utc(BEGAN + 100))))
    assert ttp.main(["goodput", str(job)]) == terminal.OK
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "goodput 73.8 % of 100.0 s; 18 steps, 2 more were lost"
    assert ttp.main(["goodput", str(job), "--json"]) == terminal.OK
    assert json.loads(capsys.readouterr().out)["steps"] == 18

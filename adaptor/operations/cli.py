"""`ttp`: answers an operator's questions about a job, from its files alone.

Exit codes: 0, success; 1, a finding (an unprotected or silent job, a damaged checkpoint); 2, bad usage, or
nothing to read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import time
from pathlib import Path

import msgspec

from adaptor import config, plug_ins
from adaptor.operations import access, job_reader
from adaptor.operations.goodput import Goodput
from adaptor.operations.job_reader import JobFolderError, JobReader, first_step_again, protection
from adaptor.operations.settings import HostPort
from adaptor.operations.timeline import chrome_trace
from adaptor.protocol import records
from adaptor.protocol.records import (
    DrillAnswer,
    DrillRequest,
    IncidentRecord,
    Phases,
    Status,
    drill_address,
    unix,
)
from adaptor.protocol.wire import is_same_user
from adaptor.terminal import FINDING, OK, Add, CtrlC, show
from adaptor.text import duration, shown

PORT = 9470
_WATCH_S = 1.0
# The control thread of a ttprun answers `ttp drill` at once; it may be busy for seconds in a large job.
_ANSWER_S = 30.0
_LOOK_S = 0.5


def add(add_command: Add) -> None:
    """Add the commands about a job to `ttp`."""
    status = add_command(
        "status", _status, "what a job does now; exit code 1 if it is not protected, or silent"
    )
    status.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    incidents = add_command("incidents", _incidents, "what has failed in a job, and what each incident cost")
    spent = add_command("goodput", _goodput, "how a job has spent its time; its goodput")
    serve = add_command("serve", _serve, "metrics and files of a job over HTTP, read-only, until Ctrl-C")
    serve.add_argument("--host", default="127.0.0.1", help="the address to serve on (default 127.0.0.1)")
    serve.add_argument("--port", type=_port, default=PORT, help=f"the port (default {PORT}); 0: any")
    serve.add_argument(
        "--token-file", type=Path, help="a file with the word that a client must send as Bearer"
    )
    serve.add_argument("--tls-cert", type=Path, help="a PEM file: the certificate of this address")
    serve.add_argument("--tls-key", type=Path, help="a PEM file: its key")
    report = add_command(
        "report", _report, "write one HTML page about a job: its state, incidents and goodput"
    )
    report.add_argument(
        "--trace",
        nargs="?",
        const="",
        metavar="INCIDENT",
        help="a trace of one incident, by default the newest, for ui.perfetto.dev in place of the page",
    )
    report.add_argument("-o", "--out", type=Path, help="the file (default report.html, or trace.json)")
    otel = add_command(
        "otel", _otel, "send the incidents of a job to an OpenTelemetry collector, each as one trace"
    )
    otel.add_argument("--follow", action="store_true", help="wait for more, until the job has ended")
    drill = add_command(
        "drill",
        _drill,
        "end a rank of a running job on purpose, and wait until the job has recovered; the job must allow it"
        " (ttprun --ttp-allow-drill True); exit code 1 if training does not go on",
    )
    drill.add_argument("--rank", type=int, help="the rank to end (default: a random rank)")
    for command in (status, incidents, spent, serve, report, otel, drill):
        add_where(command)
    for command in (status, incidents, spent, serve, report):
        command.add_argument("--json", action="store_true", help="print JSON")
    otel.add_argument("--json", action="store_true", help="print JSON, a line for each incident")
    schema = add_command("schema", _schema, "print the JSON Schema of a file")
    schema.add_argument("name", choices=sorted(records.SCHEMAS))


def add_where(command: argparse.ArgumentParser) -> None:
    """Add the argument that names a job."""
    command.add_argument(
        "where",
        nargs="?",
        type=Path,
        help="a log folder, for its newest job, or the folder of a job in it (default TTP_LOG_PATH)",
    )


def job_folder(parsed: argparse.Namespace) -> Path:
    """Return the folder of the named job. Raises JobFolderError."""
    return job_reader.find(parsed.where or Path(config.load().log_path))


def _status(parsed: argparse.Namespace) -> int:
    with CtrlC() as ctrl_c:
        while True:
            status = job_reader.status(job_folder(parsed))
            silent_s = job_reader.silent_s(status)
            if parsed.json:
                print(msgspec.json.encode(status).decode())
            else:
                show(_status_lines(status, silent_s), is_repeated=parsed.watch)
            if not parsed.watch:
                return FINDING if silent_s or status.protected is False else OK
            ctrl_c.raise_again()
            time.sleep(_WATCH_S)


def _status_lines(status: Status, silent_s: float) -> list[str]:
    def age(at: str) -> str:
        return duration(max(0.0, unix(status.time) - unix(at)))

    state = f"silent for {duration(silent_s)}, last {status.state}" if silent_s else status.state
    step = "no step finished"
    if status.step is not None and status.step_time is not None:
        step = f"step {status.step}, finished {age(status.step_time)} before this"
    copied = {}
    if status.host_copy_step is not None and status.host_copy_time is not None:
        copied = {"host copy": f"step {status.host_copy_step}, made {age(status.host_copy_time)} before this"}
    drilled = {}
    if status.drill_step is not None and status.drill_time is not None:
        result = f"not recoverable ({status.drill_problem})" if status.drill_problem else "recoverable"
        ago = age(status.drill_time)
        drilled = {"drill": f"{result} at step {status.drill_step}, found out {ago} before this"}
    slow = {}
    if status.slow_rank is not None:
        slow = {
            "slow": f"rank {status.slow_rank} computes {status.slow_score:.2f} times as long as its peers"
        }
    failed = {}
    if status.failed_saves:
        failed = {"failed saves": f"{status.failed_saves} one after the other; {status.failed_save}"}
    away = f", {status.nodes_lost} lost" if status.nodes_lost else ""
    spare = f", {status.spare_nodes} spare" if status.spare_nodes else ""
    nodes = f"{status.nodes} node{'' if status.nodes == 1 else 's'}"
    ended_ranks = f", {status.ranks_ended} ended" if status.ranks_ended else ""
    last = f", the last {status.last_incident}" if status.last_incident else ""
    rows = {
        "job": f"{shown(status.job)}: {state}",
        "at": status.time,
        "step": step,
        **copied,
        **drilled,
        **slow,
        **failed,
        "protection": protection(status),
        "ranks": f"{status.ranks}, {status.ranks_training} train{ended_ranks}; {nodes}{away}{spare}",
        "restarts": f"{status.restarts} of {status.max_restarts}",
        "incidents": f"{status.incidents}{last}{_open(status)}",
        "controller": f"node {status.node}, host {shown(status.host)}, pid {status.pid}",
        "save folder": shown(status.save) or "not known yet",
    }
    return [f"{name:<12} {shown(value)}" for name, value in rows.items()]


def _open(status: Status) -> str:
    """Return the words about an open incident; '' without an open incident."""
    if status.state != "incident":
        return ""
    return f"; one is open: {status.open_incident or 'the newest step is being saved'}"


def _incidents(parsed: argparse.Namespace) -> int:
    job = job_folder(parsed)
    all_incidents = job_reader.incidents(job)
    if parsed.json:
        print(msgspec.json.encode(all_incidents).decode())
        return OK
    for incident in all_incidents:
        show(incident_lines(incident))
    is_open = ""
    with contextlib.suppress(job_reader.JobFolderError):  # a job that has just begun has no status
        is_open = _open(job_reader.status(job))
    show([f"{len(all_incidents)} incident{'' if len(all_incidents) == 1 else 's'}{is_open}"])
    return OK


def incident_lines(incident: IncidentRecord) -> list[str]:
    """Return the lines about an ended incident."""
    parts = {name: seconds for name, seconds in _parts(incident.phases).items() if seconds is not None}
    lost = "not known" if incident.steps_lost is None else incident.steps_lost
    step_s = first_step_again(incident, unix(incident.began))
    headline = "" if step_s is None else f"first step again {duration(step_s)} after the fault was noticed: "
    lines = [
        f"{incident.began}  {incident.id}",
        f"  {shown(incident.reason)}",
        f"  {incident.verdict}; steps lost: {lost}; {shown(incident.next_action)}",
        f"  {headline}{', '.join(f'{name} {duration(seconds)}' for name, seconds in parts.items())}",
    ]
    return lines if parts else lines[:-1]


def _parts(phases: Phases) -> dict[str, float | None]:
    return {name.replace("_", " "): seconds for name, seconds in msgspec.structs.asdict(phases).items()}


def _goodput(parsed: argparse.Namespace) -> int:
    spent = JobReader(job_folder(parsed)).spent()
    if parsed.json:
        print(msgspec.json.encode(spent).decode())
    else:
        show(_goodput_lines(spent))
    return OK


def _goodput_lines(spent: Goodput) -> list[str]:
    total = sum(spent.seconds.values())
    rows = [
        f"{state:<12} {duration(seconds):>10}  {100 * seconds / total:5.1f} %"
        for state, seconds in spent.seconds.items()
        if total
    ]
    if spent.ratio is None:
        return ["no time is recorded yet"]
    steps = f"{spent.steps} steps"
    if spent.lost is None:
        steps = (
            f"{steps}, how many more were lost is not known"
            if spent.steps
            else "nobody has counted the steps"
        )
    elif spent.lost:
        steps += f", {spent.lost} more were lost"
    return [*rows, f"goodput {100 * spent.ratio:.1f} % of {duration(total)}; {steps}"]


def _report(parsed: argparse.Namespace) -> int:
    job = job_folder(parsed)
    if parsed.trace is not None:
        incident = _incident(job, parsed.trace)
        trace_text = msgspec.json.encode(chrome_trace(incident)).decode()
        out = parsed.out or Path("trace.json")
        _write(out, trace_text, description := f"the trace of incident {incident.id}")
        return _say_written(parsed, out, description, {"job": job.name, "incident": incident.id})
    try:
        from adaptor.operations.page import Pages
    except ModuleNotFoundError as error:
        raise _missing(error, "jinja2", "ttp report") from None
    save = job_reader.status(job).save
    html = Pages().page(JobReader(job), job_reader.newest(Path(save)) if save else None)
    out = parsed.out or Path("report.html")
    _write(out, html, description := f"the page of {job.name}")
    return _say_written(parsed, out, description, {"job": job.name})


def _incident(job: Path, name: str) -> IncidentRecord:
    """Return the incident with an id; the newest incident for ''."""
    known_incidents = job_reader.incidents(job)
    if not known_incidents:
        raise job_reader.JobFolderError(f"{shown(str(job))}: this job has had no incident")
    chosen = (
        known_incidents[-1]
        if not name
        else next((incident for incident in known_incidents if incident.id == name), None)
    )
    if chosen is None:
        ids = ", ".join(incident.id for incident in known_incidents[-10:])
        raise job_reader.JobFolderError(f"--trace is {name!r}: this job has no such incident, it has {ids}")
    return chosen


def _write(out: Path, content: str, description: str) -> None:
    try:
        out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise job_reader.JobFolderError(
            f"{shown(str(out))}: {shown(description)} cannot be written ({error.strerror}); name another "
            "--out"
        ) from None


def _say_written(parsed: argparse.Namespace, out: Path, description: str, about: dict[str, str]) -> int:
    if parsed.json:
        print(json.dumps({"file": str(out), **about}))
    else:
        print(f"{shown(str(out))}: {shown(description)}")
    return OK


def _missing(error: ModuleNotFoundError, package: str, command: str, extra: str = "ops") -> Exception:
    """Return the error to raise if a package is missing that only one command of `ttp` needs."""
    if (error.name or "").partition(".")[0] != package:
        return error
    return job_reader.JobFolderError(f"{command} needs {package}: {plug_ins.install_command(extra)}")


def _otel(parsed: argparse.Namespace) -> int:
    try:
        from adaptor.operations import otel
    except ModuleNotFoundError as error:
        raise _missing(error, "opentelemetry", "ttp otel", "otel") from None
    otel.check_variables()
    return otel.send(job_folder(parsed), follow=parsed.follow, as_json=parsed.json)


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a number from 0 to 65535")
    return port


def _serve(parsed: argparse.Namespace) -> int:
    try:
        from adaptor.operations import serve
    except ModuleNotFoundError as error:
        raise _missing(error, "prometheus_client", "ttp serve") from None
    if (parsed.tls_cert is None) != (parsed.tls_key is None):
        raise job_reader.JobFolderError("--tls-cert and --tls-key belong together: name both")
    folder = parsed.where or Path(config.load().log_path)
    if not folder.is_dir():
        raise job_reader.JobFolderError(f"{shown(str(folder))}: there is no such folder; name a TTP_LOG_PATH")
    address = HostPort(parsed.host, parsed.port)
    certificate = (parsed.tls_cert, parsed.tls_key) if parsed.tls_cert is not None else None
    clients = access.clients(address, parsed.token_file, certificate)
    listening = access.listen(address)
    address = address._replace(port=listening.getsockname()[1])
    with CtrlC() as ctrl_c, serve.Server(folder, listening, clients, ctrl_c.raise_again) as server:
        url = f"{'https' if certificate else 'http'}://{address}"
        if parsed.json:
            print(json.dumps({"url": url, "folder": str(folder)}), flush=True)
        else:
            print(f"[ttp] {url}/metrics serves {shown(str(folder))}", flush=True)
        server.serve_forever()
    return OK


def _schema(parsed: argparse.Namespace) -> int:
    print(json.dumps(records.schema(parsed.name), indent=1), flush=True)
    return OK


def _drill(parsed: argparse.Namespace) -> int:
    job = job_folder(parsed)
    known_ids = {incident.id for incident in job_reader.incidents(job)}
    answer = _ask(job, parsed.rank)
    if answer.refusal:
        raise JobFolderError(f"{shown(str(job))}: no rank is ended: {shown(answer.refusal)}")
    show([f"rank {answer.rank} is ended; waiting until the job has recovered"])
    with CtrlC() as ctrl_c:
        while True:
            goes_on = job_reader.goes_on(job)  # first: an incident may end between the two looks
            for incident in job_reader.incidents(job):
                if incident.id not in known_ids:
                    show(incident_lines(incident))
                    return OK if incident.verdict in ("recovered", "saved") else FINDING
            if not goes_on:
                show(["the job has ended, or is silent, without a report of the incident"])
                return FINDING
            ctrl_c.raise_again()
            time.sleep(_LOOK_S)


def _ask(job: Path, rank: int | None) -> DrillAnswer:
    """Ask the `ttprun` with the controller to end a rank. Raises JobFolderError without an answer."""
    name, status = shown(str(job)), job_reader.status(job)
    if not job_reader.goes_on(job):
        raise JobFolderError(f"{name}: the job has ended, or is silent: no rank can be ended")
    if status.host != socket.gethostname():
        host = shown(status.host)
        raise JobFolderError(f"{name}: the controller of the job is on host {host}: call ttp drill there")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(drill_address(status.pid))
            if not is_same_user(connection):
                raise JobFolderError(
                    f"{name}: pid {status.pid} is a process of another user: call ttp drill as it"
                )
            connection.sendall(msgspec.json.encode(DrillRequest(job.name, rank)) + b"\n")
            return msgspec.json.decode(connection.makefile("rb").readline(), type=DrillAnswer)
        except ConnectionRefusedError:
            raise JobFolderError(
                f"{name}: the job allows no drill: start it with --ttp-allow-drill True (TTP_ALLOW_DRILL)"
            ) from None
        except (OSError, msgspec.DecodeError):
            raise JobFolderError(f"{name}: ttprun (pid {status.pid}) has not answered") from None

"""`ttp drill`: ends a rank of a running job on purpose, and waits until the job has recovered."""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path

import msgspec

from adaptor.launchers.agent.drill_listener import DrillAnswer, DrillRequest, address
from adaptor.operations import cli, job_reader
from adaptor.operations.job_reader import JobFolderError
from adaptor.protocol.wire import is_same_user
from adaptor.terminal import FINDING, OK, Add, CtrlC, show
from adaptor.text import shown

# The control thread answers at once; it may be busy for seconds in a large job.
_ANSWER_S = 30.0
_LOOK_S = 0.5


def add(add_command: Add) -> None:
    """Add the command to `ttp`."""
    drill = add_command(
        "drill",
        _drill,
        "end a rank of a running job on purpose, and wait until the job has recovered; the job must allow it"
        " (ttprun --ttp-allow-drill True); exit code 1 if training does not go on",
    )
    drill.add_argument("--rank", type=int, help="the rank to end (default: a random rank)")
    cli.add_where(drill)


def _drill(parsed: argparse.Namespace) -> int:
    job = cli.job_folder(parsed)
    known = {incident.id for incident in job_reader.incidents(job)}
    answer = _ask(job, parsed.rank)
    if answer.refusal:
        raise JobFolderError(f"{shown(str(job))}: no rank is ended: {shown(answer.refusal)}")
    show([f"rank {answer.rank} is ended; waiting until the job has recovered"])
    with CtrlC() as ctrl_c:
        while True:
            goes_on = job_reader.goes_on(job)  # first: an incident may end between the two looks
            for incident in job_reader.incidents(job):
                if incident.id not in known:
                    show(cli.incident_lines(incident))
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
            connection.connect(address(status.pid))
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

"""Makes notices of incidents and failed saves, and delivers them: over HTTP as JSON or for Slack, or to a
command.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from email.message import Message
from importlib import metadata
from typing import IO

import msgspec

from adaptor.endpoints import NoticeTarget
from adaptor.operations.records import Incident, Notice

# The time limit of a target for a notice.
LIMIT_S = 2.0
SIGNATURE = "X-TTP-Signature"


class NotDeliveredError(Exception):
    """A target has not accepted a notice; the message is the reason, without the target."""


def of_incident(incident: Incident, time: str, kind: str = "incident") -> Notice:
    """Return the notice of an incident at `time`.

    `kind`: `incident` with its verdict, `resumed` after training has continued.
    """
    lost = incident.steps_lost
    steps = "" if lost is None else f", {lost} step{'' if lost == 1 else 's'} lost"
    # The reason already names the steps if a step is saved or nothing is lost.
    reason = incident.reason + (steps if incident.verdict == "lost" else "")
    outcome = f"training goes on{steps}" if kind == "resumed" else reason
    # The line of an online recovery has named the action.
    action = "" if incident.verdict == "recovered" else f"; {incident.next_action}"
    return Notice(
        type="resumed" if kind == "resumed" else "incident",
        time=time,
        job=incident.job,
        text=f"{incident.job}: {outcome}{action}",
        # Without events and ranks: with thousands of ranks no target would accept them in time.
        incident=msgspec.structs.replace(incident, events=[], ranks=[]),
    )


def of_save(job: str, step: int, reason: str, time: str) -> Notice:
    """Return the notice that the save of `step` in `job` has failed for `reason`; '': a save has succeeded
    again.
    """
    outcome = (
        f"step {step} could not be saved: {reason}; training goes on" if reason else f"step {step} is saved"
    )
    return Notice(type="save", time=time, job=job, text=f"{job}: {outcome}", incident=None)


def of_end(job: str, incidents: int, time: str) -> Notice:
    """Return the notice of the end of `job` after `incidents` incidents, at `time`."""
    several = "" if incidents == 1 else "s"
    return Notice(
        type="ended",
        time=time,
        job=job,
        text=f"{job}: ttprun has ended, {incidents} incident{several}",
        incident=None,
    )


def deliver(target: NoticeTarget, notice: Notice, secret: str = "") -> None:
    """Deliver a notice. The caller limits the time: a name server may hang.

    Args:
        target: the target.
        notice: the notice.
        secret: signs the body for a target of JSON; '' for no signature.

    Raises:
        NotDeliveredError: the target has not accepted the notice.
    """
    body = msgspec.json.encode(notice)
    if target.kind == "exec":
        _run(shlex.split(target.where), body)
        return
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"ttp-adaptor/{metadata.version('ttp-adaptor')}",
    }
    if target.kind == "slack":
        body = json.dumps({"text": notice.text}).encode()
    elif secret:
        headers[SIGNATURE] = signature(secret, body)
    _post(urllib.request.Request(target.where, body, headers, method="POST"))


def signature(secret: str, body: bytes) -> str:
    """Return the header that proves to a receiver that the sender has the secret."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a notice is for the named target, and a redirected POST would become a GET."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def _post(request: urllib.request.Request) -> None:
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=LIMIT_S):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise NotDeliveredError(f"it answered {error.code}") from None
    except urllib.error.URLError as error:
        raise NotDeliveredError(str(getattr(error.reason, "strerror", None) or error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotDeliveredError(str(error) or type(error).__name__) from None


def _run(command: list[str], body: bytes) -> None:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise NotDeliveredError(f"it cannot be started ({error.strerror})") from None
    try:
        process.communicate(body, LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its child processes
        process.wait()
        raise NotDeliveredError(f"it had not ended after {LIMIT_S:g} s") from None
    if process.returncode:
        raise NotDeliveredError(f"it ended with status {process.returncode}")

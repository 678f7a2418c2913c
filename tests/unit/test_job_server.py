"""`ttprun --ttp-serve`: the process on the controller's node that serves the job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from adaptor.launchers.agent.processes import SERVE
from tests import certificates, waiting
from tests.ports import free_port, free_ports
from tests.unit.launching import WAIT, Launcher, launcher, zygote  # noqa: F401

pytestmark = pytest.mark.integration


def get(
    url: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=dict(headers or {})), context=tls
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def servers_of(ttprun: int) -> list[int]:
    servers = []
    for path in Path(f"/proc/{ttprun}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a child has ended meanwhile
            servers += [
                pid
                for pid in map(int, path.read_text().split())
                if str(SERVE).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
    return servers


def server_of(ttprun: int) -> int:
    """Wait for the server of a job: the status may be written before the server runs."""
    servers: list[int] = []

    def runs() -> bool:
        servers[:] = servers_of(ttprun)
        return bool(servers)

    waiting.until(runs, "the server runs")
    (server,) = servers
    return server


def has_status(folder: Path, count: int = 1) -> None:
    waiting.written(folder, lambda: len(list(folder.glob("**/status.json"))) >= count, "the job has a status")


def test_a_job_is_served_from_its_start_to_its_end(launcher: Launcher) -> None:  # noqa: F811
    port = free_port()
    pid = launcher.start("--ttp-serve", str(port), "--rdzv-id", "gpt", launcher.script(WAIT))
    has_status(launcher.folder)
    base = f"http://127.0.0.1:{port}"
    code, text = get(f"{base}/api/v1/status")
    assert (code, json.loads(text)["job"], json.loads(text)["pid"]) == (200, "gpt", pid)
    assert get(f"{base}/readyz")[0] == 503
    assert "ttp_running 1.0" in get(f"{base}/metrics")[1]
    assert get(f"{base}/")[1].startswith("<!doctype html>")
    server = server_of(pid)
    for number in (signal.SIGTERM, signal.SIGINT):  # a scheduler may tell each process of a job to end
        os.kill(server, number)
    assert get(f"{base}/healthz") == (200, "ok\n")
    os.kill(pid, signal.SIGTERM)
    result = launcher.wait(pid)
    assert f"[ttp] http://127.0.0.1:{port}/ serves " in result.log
    waiting.ended([server])
    assert "has ended with status" not in result.log


def test_a_job_goes_on_without_its_server(launcher: Launcher) -> None:  # noqa: F811
    port = free_port()
    os.mkfifo(launcher.folder / "go")
    script = launcher.script("open('go').read()\n")
    pid = launcher.start("--ttp-serve", str(port), script)
    has_status(launcher.folder)
    server = server_of(pid)
    os.kill(server, signal.SIGKILL)
    waiting.written(
        launcher.folder, lambda: "has ended with status -9; the job goes on" in launcher.log, "a line"
    )
    (launcher.folder / "go").write_text("")
    assert launcher.wait(pid).code == 0


def test_a_killed_ttprun_takes_its_server_along(launcher: Launcher) -> None:  # noqa: F811
    pid = launcher.start("--ttp-serve", str(free_port()), launcher.script(WAIT))
    has_status(launcher.folder)
    server = server_of(pid)
    os.kill(pid, signal.SIGKILL)
    launcher.wait(pid)
    waiting.ended([server])


def test_a_port_that_is_taken_starts_nothing(launcher: Launcher) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        result = launcher.run("--ttp-serve", str(port), launcher.script("open('ran', 'w')\n"), code=2)
    assert result.log == (
        f"ttprun: error: TTP_SERVE is 127.0.0.1:{port}: the address cannot be had (Address already in use);"
        " choose another port\n"
    )
    assert not (launcher.folder / "ran").exists()


def test_other_machines_need_a_token_and_tls(launcher: Launcher) -> None:  # noqa: F811
    port = free_port()
    script = launcher.script(WAIT)
    result = launcher.run("--ttp-serve", f"0.0.0.0:{port}", script)
    assert (result.code, "other machines reach this address" in result.last_line) == (2, True), result.log
    assert len(result.log.splitlines()) == 1
    token = launcher.folder / "token"
    token.write_text("a-word-that-nobody-guesses")
    signer = certificates.Authority(launcher.folder / "tls")
    arguments = ("--ttp-serve", f"0.0.0.0:{port}", "--ttp-serve-token", str(token), script)
    token.chmod(0o644)
    result = launcher.run(*arguments, **signer.settings())
    assert (result.code, "others can read it" in result.last_line) == (2, True), result.log
    token.chmod(0o600)
    pid = launcher.start(*arguments, **signer.settings())
    has_status(launcher.folder)
    trusts = ssl.create_default_context(cafile=signer.path)
    trusts.check_hostname = False
    url = f"https://127.0.0.1:{port}/healthz"
    assert get(url, tls=trusts)[0] == 401
    assert get(url, {"Authorization": "Bearer a-word-that-nobody-guesses"}, trusts) == (200, "ok\n")
    first = ssl.get_server_certificate(("127.0.0.1", port))
    signer.settings()  # made anew in its place
    # Who connects while the files are read slowly has the old one.
    waiting.until(lambda: ssl.get_server_certificate(("127.0.0.1", port)) != first, "it has the new one")
    assert "a-word" not in Path(f"/proc/{server_of(pid)}/cmdline").read_text()
    os.kill(pid, signal.SIGTERM)
    launcher.wait(pid)


def test_the_node_that_takes_over_serves(zygote: subprocess.Popen[str], tmp_path: Path) -> None:  # noqa: F811
    """The take-over is limited by the wait for a stopped worker; a busy machine gets three tries."""
    for number in range(3):
        (folder := tmp_path / str(number)).mkdir()
        url, log = _is_taken_over(zygote, folder)
        if f"[ttp] {url} serves " in log:
            (job,) = (folder / "logs").glob("*/status.json")
            assert json.loads(job.read_bytes())["node"] == 1
            return
    pytest.fail(log)


def _is_taken_over(zygote: subprocess.Popen[str], tmp_path: Path) -> tuple[str, str]:  # noqa: F811
    """Kill the node with the controller; return the URL of the page, and the log of the other node."""
    store, port, served = free_ports(3)
    script = tmp_path / "script.py"
    script.write_text(f"import os\nopen('pid', 'w').write(f'{{os.getpid()}} ')\n{WAIT}")
    (tmp_path / "logs").mkdir()
    nodes, pids = [], []
    for number in (0, 1):
        (folder := tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, folder))
        rendezvous = ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1")
        ports = ("--master-port", str(store), "--ttp-port", str(port), "--ttp-serve", str(served))
        pids.append(node.start(*rendezvous, *ports, "--ttp-log-path", str(tmp_path / "logs"), str(script)))
    has_status(tmp_path / "logs")
    pid = nodes[1].folder / "pid"
    waiting.written(
        nodes[1].folder, lambda: pid.exists() and pid.read_text().endswith(" "), "its worker runs"
    )
    server = server_of(pids[0])
    assert servers_of(pids[1]) == []
    os.kill(int(pid.read_text()), signal.SIGSTOP)  # it does not answer, so the incident lasts some seconds
    os.kill(pids[0], signal.SIGKILL)
    nodes[0].wait(pids[0])
    waiting.ended([server])
    return f"http://127.0.0.1:{served}/", nodes[1].wait(pids[1]).log

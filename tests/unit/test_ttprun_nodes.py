"""ttprun on several nodes: how they meet, wait for each other and start again, with and without TLS."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from adaptor import config
from adaptor.errors import ConfigError
from adaptor.launchers.cli import flags, start_checks, ttprun
from adaptor.launchers.control.credentials import Invitation
from tests import waiting
from tests.certificates import Authority
from tests.ports import free_port, free_ports
from tests.unit.launching import (
    HEARS_CTRL_C,
    LOOK,
    WAIT,
    Launcher,
    clean,
    launcher,
    says_all,
    start_two,
    starts,
    zygote,
)
from tests.unit.threads import LONG_S

__all__ = ["clean", "launcher", "zygote"]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--nnodes", "2", "--master-addr", "10.0.0.1"], True),
        (["--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400"], True),
        (["--nnodes", "2", "--rdzv-endpoint", "node0"], True),
        (["--nnodes", "2", "--master-addr", "10.0.0.1", "--ttp-tls", "plain"], False),
        (["--nnodes", "2", "--master-addr", "127.0.0.1"], False),
        (["--nnodes", "2", "--master-addr", "::1"], False),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400"], False),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "[::1]:29400"], False),
        (["--nnodes", "2"], False),
        (["--nnodes", "1", "--master-addr", "10.0.0.1"], False),
        (["--nnodes", "1:1", "--master-addr", "10.0.0.1"], False),
        (["--standalone"], False),
        ([], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("clean")
def test_several_machines_speak_tls(arguments: list[str], refused: bool) -> None:
    parsed = flags.parse([*arguments, "script.py"])
    if refused:
        with pytest.raises(ConfigError, match=r"no certificates: .* --ttp-tls-ca; or, .* --ttp-tls plain"):
            start_checks.require_safe_connections(parsed, config.load())
    else:
        start_checks.require_safe_connections(parsed, config.load())


@pytest.mark.usefixtures("clean")
def test_several_machines_with_certificates(tmp_path: Path) -> None:
    files = Authority(tmp_path / "signer").settings()
    texts = [text for name, path in files.items() for text in (f"--{name.lower().replace('_', '-')}", path)]
    parsed = flags.parse(["--nnodes", "2", "--master-addr", "10.0.0.1", *texts, "script.py"])
    start_checks.require_safe_connections(parsed, config.load())


def test_unsafe_connections_are_refused_before_anything_starts(launcher: Launcher) -> None:
    script = launcher.script(LOOK)
    result = launcher.run("--nnodes", "2", "--master-addr", "10.0.0.1", script, code=2)
    (line,) = result.log.splitlines()
    assert line.startswith("ttprun: error: --nnodes 2 and no certificates: ")
    result = launcher.run(
        "--ttp-tls-cert", "c.pem", "--ttp-tls-key", "k.pem", "--ttp-tls-ca", "a.pem", script
    )
    (line,) = result.log.splitlines()
    assert (result.code, line) == (
        2,
        "ttprun: error: TTP_TLS_CERT is 'c.pem': the file cannot be read (No such file or directory)",
    )


@pytest.mark.parametrize("same_signer", [True, False], ids=["one signer", "two signers"])
def test_two_nodes_with_certificates(
    same_signer: bool, zygote: subprocess.Popen[str], tmp_path: Path
) -> None:
    """With one signer both nodes train; with two, the last line of the second node names the reason."""
    authority = Authority(tmp_path / "ours")
    signers = [authority, authority if same_signer else Authority(tmp_path / "theirs")]
    ports = [str(port) for port in free_ports(2)]
    nodes, started = [], []
    for number, signer in enumerate(signers):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        rendezvous = ("--nnodes", "2", "--node-rank", str(number), "--master-port", ports[0])
        options = (*rendezvous, "--ttp-port", ports[1], "--monitor-interval", "0.05")
        script = node.script("print('trained')")
        started.append(node.start(*options, script, **signer.settings(f"node{number}")))
    if same_signer:
        assert [node.wait(pid).code for node, pid in zip(nodes, started, strict=True)] == [0, 0]
        return
    result = nodes[1].wait(started[1])
    os.kill(started[0], signal.SIGKILL)
    nodes[0].wait(started[0])
    assert result.code == 2
    assert result.last_line.startswith("ttprun: error: the controller at 127.0.0.1 port ")
    assert ": certificate " in result.last_line


@pytest.mark.robustness(
    "C1", "another user reads all of the rendezvous store of two ttprun on one machine", "no secret is in it"
)
@pytest.mark.parametrize("way", ["unix", "plain"])
def test_the_secret_of_a_job_is_seen_nowhere(way: str, zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """Neither on a command line, nor in an environment, nor in a log, however much is logged."""
    ports = [str(port) for port in free_ports(2)]
    nodes, started = [], []
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        rendezvous = ("--nnodes", "2", "--node-rank", str(number), "--master-port", ports[0])
        script = node.script(
            "import os\nfrom pathlib import Path\nfrom tests import waiting\n"
            "Path('here').write_text(f'{os.getpid()} ')\nwaiting.exist(Path('../go'))\n"
        )
        plain = ("--ttp-tls", "plain") if way == "plain" else ()
        options = (*plain, "--ttp-port", ports[1], "--ttp-log-level", "DEBUG", "--ttp-log-stdout", "1")
        started.append(node.start(*rendezvous, "--monitor-interval", "0.05", *options, script))
    waiting.written(
        tmp_path, lambda: all(says_all(node.folder / "here") for node in nodes), "the workers run"
    )
    store = dist.TCPStore("127.0.0.1", int(ports[0]), is_master=False)
    invitation = Invitation.decode(store.get("none/ttp/1/ttp/controller"), way)
    secret = invitation.name
    if way == "plain":
        assert len(secret) == 64, "it goes through the store"
        # Knocks without it are told in the log.
        socket.create_connection(("127.0.0.1", int(ports[1])), LONG_S).close()
    else:
        assert invitation.port == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(ports[1])), LONG_S)
    workers = [int((node.folder / "here").read_text()) for node in nodes]
    readable = [
        Path(f"/proc/{pid}/{name}").read_bytes()
        for pid in (*started, *workers)
        for name in ("environ", "cmdline")
    ]
    (tmp_path / "go").touch()
    results = [node.wait(pid) for node, pid in zip(nodes, started, strict=True)]
    assert [result.code for result in results] == [0, 0]
    assert [ttprun.TRUSTED in result.log for result in results] == [way == "plain"] * 2
    if way == "unix":
        return
    logs = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"1 rejected connections at the controller's port so far" in log for log in logs)
    assert not any(
        form in text for form in (secret.encode(), bytes.fromhex(secret)) for text in (*readable, *logs)
    )


def test_a_port_that_another_job_has(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign_server:
        port = str(foreign_server.getsockname()[1])
        result = launcher.run("--master-port", port, launcher.script("print('started')"), code=2)
    assert result.last_line == (
        f"ttprun: error: the port of 127.0.0.1:{port} is taken on this machine: another job has it, or what"
        " is left of one; choose another one (--master-port, or the port in --rdzv-endpoint)"
    )
    assert "Traceback" not in result.log


@pytest.mark.robustness(
    "A4", "no node with the rendezvous store answers, or too few nodes come", "refused in one line, no stack"
)
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--node-rank", "1", "--rdzv-conf", "timeout=1"], "no rendezvous answers at 127.0.0.1:{port}: "),
        (
            [
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"),
                *("--rdzv-conf", "is_host=0,read_timeout=1"),
            ],
            "no rendezvous answers at localhost:{port}: ",
        ),
        (
            ["--node-rank", "0", "--rdzv-conf", "timeout=3"],  # for its own store, too
            "node 1 of 2 did not come to 127.0.0.1:{port} within 3 s (--rdzv-conf timeout); ",
        ),
        (
            [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "localhost:{port}",
                "--rdzv-conf",
                "join_timeout=1",
            ],
            "--nnodes is 2: fewer nodes came to the rendezvous at localhost:{port} within 1 s (--rdzv-c",
        ),
    ],
    ids=["nobody is there", "no store of c10d", "one with a number stays away", "one stays away"],
)
def test_nodes_that_do_not_meet(arguments: list[str], line: str, launcher: Launcher) -> None:
    port = free_port()
    options = [text.format(port=port) for text in ("--nnodes", "2", "--master-port", "{port}", *arguments)]
    result = launcher.run(*options, launcher.script("print('started')"), code=2)
    assert result.last_line.startswith(f"ttprun: error: {line.format(port=port)}")
    texts = [text for text in result.log.splitlines() if not text.startswith("[ttp] waiting for ")]
    assert texts == [result.last_line], "nor the stack of torch's C++ functions"


@pytest.mark.robustness(
    "A4",
    "the other node of two never comes, or is still to start; Ctrl-C or SIGTERM",
    "a line at once and every 10 s names who is awaited, where, for how long; a signal ends it in one line",
)
@pytest.mark.parametrize(
    ("arguments", "awaited", "limit"),
    [
        (
            ["--nnodes", "2", "--node-rank", "0", "--master-port", "{port}"],
            "node 1 of 2 at 127.0.0.1:{port}",
            "900 s at most (--rdzv-conf timeout)",
        ),
        (
            ["--nnodes", "2", "--node-rank", "1", "--master-port", "{port}", "--rdzv-conf", "timeout=70"],
            "node 0 of 2 at 127.0.0.1:{port}",
            "70 s at most (--rdzv-conf timeout)",
        ),
        (
            ["--nnodes", "6", "--node-rank", "0", "--master-port", "{port}"],
            "nodes 1, 2, 3, 4 and 1 more of 6 at 127.0.0.1:{port}",
            "900 s at most (--rdzv-conf timeout)",
        ),
        (
            ["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"],
            "1 more of 2 to 3 nodes at localhost:{port}",
            "600 s at most (--rdzv-conf join_timeout)",
        ),
        (
            [
                *("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"),
                *("--rdzv-conf", "is_host=0"),
            ],
            "the rendezvous at localhost:{port}",
            "60 s at most (--rdzv-conf read_timeout)",
        ),
    ],
    ids=["node 1", "node 0", "many", "c10d", "the store of c10d"],
)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_nodes_that_are_awaited(
    by: signal.Signals, arguments: list[str], awaited: str, limit: str, launcher: Launcher
) -> None:
    port = free_port()
    options = [text.format(port=port) for text in arguments]
    pid = launcher.start(*options, launcher.script("print('started')"), prelude=HEARS_CTRL_C)
    waiting_line = f"[ttp] waiting for {awaited.format(port=port)}, {limit}\n"
    waiting.written(launcher.folder, lambda: launcher.log.endswith(waiting_line), "it says for whom it waits")
    os.kill(pid, by)
    result = launcher.wait(pid, code=128 + by)
    last_line = (
        f"[ttp] ended by {by.name} while it waited for {awaited.format(port=port)}; nothing was started"
    )
    # On a slow machine a line has come before this node has met anybody, too.
    assert [text for text in result.log.splitlines() if not text.startswith("[ttp] waiting for ")] == [
        last_line
    ]


@pytest.mark.robustness(
    "A4",
    "the other node of two never comes; a second signal follows the first at once, as that of timeout(1)",
    "one line, and the exit code of the first",
)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["account.conclude", "agent.SurvivorsAgent.end_control"])
def test_two_signals_while_nodes_are_awaited(place: str, by: signal.Signals, launcher: Launcher) -> None:
    second = (
        "\nimport adaptor.launchers.agent.elastic_agent as agent\n"
        "import adaptor.launchers.records.log as account\n"
        f"before = {place}\n"
        "def interrupted(*arguments):\n"
        f"    signal.raise_signal({by:d})\n"
        "    return before(*arguments)\n"
        f"{place} = interrupted\n"
    )
    port = free_port()
    options = ("--nnodes", "2", "--node-rank", "0", "--master-port", str(port))
    pid = launcher.start(*options, launcher.script("print('started')"), prelude=HEARS_CTRL_C + second)
    waiting_line = f"[ttp] waiting for node 1 of 2 at 127.0.0.1:{port}, 900 s at most (--rdzv-conf timeout)\n"
    waiting.written(launcher.folder, lambda: launcher.log.endswith(waiting_line), "it says for whom it waits")
    os.kill(pid, by)
    result = launcher.wait(pid, code=128 + by)
    last_line = (
        f"[ttp] ended by {by.name} while it waited for node 1 of 2 at 127.0.0.1:{port}; nothing was started"
    )
    # On a slow machine a line has come before this node has met anybody, too.
    assert [text for text in result.log.splitlines() if not text.startswith("[ttp] waiting for ")] == [
        last_line
    ]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_wait_begins(by: signal.Signals, launcher: Launcher) -> None:
    """The waiting thread has started already; it would abort the interpreter at its end."""
    interrupted = (
        "\nimport threading\nstart = threading.Thread.start\n"
        "def started(thread):\n"
        "    start(thread)\n"
        "    if thread.name == 'ttp-waiting':\n"
        f"        signal.raise_signal({by:d})\n"
        "threading.Thread.start = started\n"
    )
    rendezvous = ("--nnodes", "2", "--node-rank", "0", "--master-port", str(free_port()))
    result = launcher.run(
        *rendezvous, launcher.script("print('started')"), prelude=HEARS_CTRL_C + interrupted, code=128 + by
    )
    assert result.log.startswith(f"[ttp] ended by {by.name} while it waited for ")
    assert result.log.endswith("; nothing was started\n")


@pytest.mark.robustness(
    "A4", "a node comes late", "the job trains; the line that named the node is the only trace of it"
)
def test_a_node_that_comes_late(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    port, gate = free_ports(2)
    nodes, started = [], []
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        rendezvous = ("--nnodes", "2", "--node-rank", str(number), "--master-port", str(port))
        options = ("--ttp-port", str(gate), "--monitor-interval", "0.05")
        started.append(node.start(*rendezvous, *options, node.script("print('trained')")))
        if number == 0:
            waiting.written(
                nodes[0].folder, lambda: "waiting for node 1 of 2 at " in nodes[0].log, "node 0 waits"
            )
    for node, pid in zip(nodes, started, strict=True):
        result = node.wait(pid)
        assert (result.code, result.last_line) == (0, "trained"), result.log


@pytest.mark.robustness(
    "A4", "a node waits to be taken into a job, and that ends", "one line says so, and the exit code is 1"
)
def test_a_node_that_comes_too_late(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """The script is unprotected so far, so the node would be accepted at the next restart."""
    port, gate = free_ports(2)
    nodes, started = [], []
    text = (
        "from pathlib import Path\nfrom tests import waiting\n"
        "Path('here').write_text(' ')\nwaiting.exist(Path('../go'))\n"
    )
    waiting_line = f"[ttp] waiting for the job at localhost:{port}, which trains, to take this node in\n"
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        rendezvous = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
        options = ("--ttp-port", str(gate), "--monitor-interval", "0.05")
        started.append(
            node.start(*rendezvous, "--rdzv-conf", "last_call_timeout=1", *options, node.script(text))
        )
        is_ready = (
            (lambda: says_all(nodes[0].folder / "here"))
            if number == 0
            else lambda: waiting_line in nodes[1].log
        )
        waiting.written(tmp_path, is_ready, "the first one trains, the other waits")
    (tmp_path / "go").touch()
    first, late = (node.wait(pid) for node, pid in zip(nodes, started, strict=True))
    assert first.code == 0, first.log
    assert late.code == 1, late.log
    assert re.fullmatch(
        rf"\[ttp\] the job at localhost:{port} has ended(, or has lost the node with the rendezvous store)?;"
        " it has not taken this node in",
        late.last_line,
    )


def test_both_start_again_together(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    text = "import os, sys\nsys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 5)\n"
    nodes, started = start_two(zygote, tmp_path, text)
    for node, pid in zip(nodes, started, strict=True):
        result = node.wait(pid, code=0)
        assert result.log.count("raised SystemExit: 5; nothing to save") == 1


@pytest.mark.robustness(
    "A3",
    "on two nodes: a fault that comes again, a module that is missing",
    "both nodes end, with the same code",
)
@pytest.mark.parametrize(
    ("failing_code", "code", "count", "ending"),
    [
        (
            "raise OSError",
            79,
            3,
            (
                "; not started again: OSError at script.py:2 came 3 times before training without a newer "
                "checkpoint (TTP_NO_PROGRESS)"
            ),
        ),
        ("import no_such_module", 1, 1, "; not started again: another start would fail in the same way"),
    ],
    ids=["again", "mistake"],
)
def test_no_node_starts_again(
    failing_code: str, code: int, count: int, ending: str, zygote: subprocess.Popen[str], tmp_path: Path
) -> None:
    nodes, started = start_two(zygote, tmp_path, f"print('start', flush=True)\n{failing_code}\n")
    for node, pid in zip(nodes, started, strict=True):
        result = node.wait(pid)
        assert (result.code, starts(result)) == (code, count), result.log
        assert result.last_line.endswith(ending), result.log
    # c10d says which of them has the controller.
    assert sum(", before training, report on node 0" in node.log for node in nodes) == 1
    assert sum(f", before training, report {node.folder}/logs/" in node.log for node in nodes) == 1


@pytest.mark.robustness(
    "A4",
    "a node is lost, and nobody comes in its place; Ctrl-C",
    "a line names what is missing; the last line has the verdict, and what it waited for",
)
def test_a_lost_node_is_not_replaced(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    text = "import os\nfrom pathlib import Path\nPath('here').write_text(os.environ['RANK'] + ' ')\n" + WAIT
    nodes, started = start_two(zygote, tmp_path, text)
    waiting.written(
        tmp_path, lambda: all(says_all(node.folder / "here") for node in nodes), "the workers run"
    )
    os.kill(started[1], signal.SIGKILL)
    nodes[1].wait(started[1])
    awaited, verdict = "1 more of 2 nodes at localhost:", "[ttp] node 1 is lost; "

    def since_the_verdict() -> str:  # on a slow machine the other one was awaited at the start, too
        return nodes[0].log.partition(verdict)[2]

    waiting_line = f"[ttp] waiting for {awaited}"
    waiting.written(tmp_path, lambda: waiting_line in since_the_verdict(), "it says for whom it waits")
    os.kill(started[0], signal.SIGINT)
    result = nodes[0].wait(started[0])
    assert result.code == 128 + signal.SIGINT, result.log
    assert result.last_line.startswith(f"{verdict}nothing to save: "), result.log
    assert f"; ended by SIGINT while it waited for {awaited}" in result.last_line
    assert "Traceback" not in result.log


# The other agent enters torch's exit barrier as the last one, and is slow: the agent with the store (HOST)
# has all that it waits for, and would end before this one asks the store again.
IS_SLOW_AT_THE_END = """
import os, select
from pathlib import Path
from torch.distributed.elastic.utils import store
enter = store._barrier_nonblocking
def enter_and_wait(*args, **kwargs):
    key = enter(*args, **kwargs)
    host = select.poll()
    host.register(os.pidfd_open(int(Path("HOST").read_text())), select.POLLIN)
    host.poll(1000)
    return key
store._barrier_nonblocking = enter_and_wait
"""


def test_the_agent_with_the_store_leaves_last(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """Otherwise torch prints a traceback on another node after a successful job."""
    go, host = tmp_path / "go", tmp_path / "host"
    text = f"from pathlib import Path\nfrom tests import waiting\nwaiting.exist(Path({str(go)!r}))\n"
    slow = IS_SLOW_AT_THE_END.replace("HOST", str(host))
    nodes, started = start_two(zygote, tmp_path, text, prelude=("", slow))
    host.write_text(str(started[0]))
    go.touch()
    for node, pid in zip(nodes, started, strict=True):
        result = node.wait(pid, code=0)
        assert "Error waiting on exit barrier" not in result.log
        assert "failed to shutdown the rendezvous" not in result.log


@pytest.mark.parametrize("host", [0, 1])
def test_the_node_with_the_store_is_lost(host: int, zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """Node 0 runs on the machine of the store, as does the other node, which takes over and saves."""
    text = "import os\nfrom pathlib import Path\nPath('here').write_text(os.environ['RANK'] + ' ')\n" + WAIT
    nodes, started = start_two(zygote, tmp_path, text, host)
    waiting.written(
        tmp_path, lambda: all(says_all(node.folder / "here") for node in nodes), "the workers run"
    )
    assert int((nodes[host].folder / "here").read_text()) == 0
    os.kill(started[host], signal.SIGKILL)
    nodes[host].wait(started[host])
    result = nodes[1 - host].wait(started[1 - host])
    assert result.code == 128 + signal.SIGKILL, result.log
    assert result.last_line.startswith("[ttp] node 0 is lost; nothing to save: ")
    assert "Traceback" not in result.log
    events = [path for node in nodes for path in (node.folder / "logs").glob("*/events.jsonl")]
    assert len({path.parent.name for path in events}) == 1, "a node that takes over writes to the same folder"
    assert ['"took-over"' in path.read_text() for path in events] == [host == 1, host == 0]

"""ttprun on a machine whose host name has no address, in a UTS namespace and without a name server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from adaptor.launchers.rendezvous import rendezvous_store
from tests import waiting
from tests.ports import free_port
from tests.unit.launching import Launcher, launcher, zygote

__all__ = ["launcher", "zygote"]

NAME = "no-such-host"
GROUP = (
    "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "total = torch.ones(1)\n"
    "dist.all_reduce(total)\n"
    "print(f'ranks {int(total)}\\n', end='', flush=True)  # one write, which the other rank cannot split\n"
    "dist.destroy_process_group()\n"
)


@pytest.fixture
def renamed(tmp_path: Path) -> str:
    """Return code for a fork of the zygote: its machine gets this name and reaches no name server."""
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make UTS and mount namespaces")
    empty = tmp_path / "empty"
    empty.touch()
    return (
        "import ctypes, socket\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.unshare(0x04000000 | 0x00020000) == 0  # CLONE_NEWUTS, CLONE_NEWNS\n"
        "assert libc.mount(None, b'/', None, 0x4000 | 0x40000, None) == 0  # MS_REC, MS_PRIVATE\n"
        "def hide(path):\n"
        f"    assert libc.mount({str(empty)!r}.encode(), path, None, 0x1000, None) == 0  # MS_BIND\n"
        "hide(b'/etc/resolv.conf')\n"
        f"socket.sethostname({NAME!r})\n"
    )


@pytest.mark.robustness(
    "A4", "the host name of a node has no address, nor has localhost; one node", "the job trains"
)
@pytest.mark.parametrize(
    ("arguments", "hidden"),
    [([], ""), (["--standalone"], "hide(b'/etc/hosts')\n")],
    ids=["host", "localhost"],
)
def test_one_node_needs_no_name(arguments: list[str], hidden: str, renamed: str, launcher: Launcher) -> None:
    job = ("--nproc-per-node", "2", "--monitor-interval", "0.05", launcher.script(GROUP))
    result = launcher.run(*arguments, *job, prelude=renamed + hidden, code=0)
    assert result.log.count("ranks 2\n") == 2
    assert f"network addresses of ({NAME}" not in result.log, "torch asks for no address of the name"


@pytest.mark.robustness(
    "A4",
    "the host name of a node with the rendezvous store has no address",
    "one line, with the flag",
)
def test_several_nodes_need_the_name_of_the_node_with_the_store(renamed: str, launcher: Launcher) -> None:
    rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}")
    result = launcher.run(*rendezvous, launcher.script("print('started')"), prelude=renamed, code=2)
    (line,) = result.log.splitlines()
    assert line.startswith(f"ttprun: error: the host name of this node, '{NAME}', does not resolve: give tt")
    assert " --local-addr with the address " in line


def test_the_machine_is_known_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for those of the host name, and raises."""

    def matches(host: str) -> bool:
        raise socket.gaierror(socket.EAI_NONAME, "no address")

    monkeypatch.setattr(rendezvous_store.utils, "_matches_machine_hostname", matches)
    assert rendezvous_store._is_here("127.0.0.2")
    assert not rendezvous_store._is_here("192.0.2.1")


@pytest.mark.parametrize("node", [0, 1])
def test_a_name_of_node_0_that_has_no_address(node: int, renamed: str, launcher: Launcher) -> None:
    """Node 0 may get an address while this node waits, as in Kubernetes."""
    port = free_port()
    rendezvous = (
        "--nnodes",
        "2",
        "--node-rank",
        str(node),
        "--master-addr",
        NAME,
        "--master-port",
        str(port),
    )
    arguments = (*rendezvous, "--ttp-tls", "plain", launcher.script("print('started')"))
    pid = launcher.start(*arguments, prelude=renamed)
    awaited = f"node {1 - node} of 2 at {NAME}:{port} (the name {NAME} does not resolve on this node)"
    line = f"[ttp] waiting for {awaited}, 900 s at most (--rdzv-conf timeout)\n"
    waiting.written(launcher.folder, lambda: launcher.log.endswith(line), "it says for what it waits")
    os.kill(pid, signal.SIGTERM)
    result = launcher.wait(pid)
    assert result.code == 128 + signal.SIGTERM
    assert result.last_line == f"[ttp] ended by SIGTERM while it waited for {awaited}; nothing was started"
    result = launcher.run("--rdzv-conf", "timeout=1", *arguments, prelude=renamed, code=2)
    assert result.last_line.startswith(
        f"ttprun: error: the host name '{NAME}' does not resolve on this node: correct --master-addr or"
    )


def test_a_signal_while_one_node_waits_for_its_own_store(launcher: Launcher) -> None:
    stopped = (
        "import os, signal, threading\nfrom adaptor.launchers.rendezvous import rendezvous_store\n"
        "def connect(*_):\n    os.kill(os.getpid(), signal.SIGTERM)\n    threading.Event().wait()\n"
        "rendezvous_store.connect = connect\n"
    )
    result = launcher.run(launcher.script("print('started')"), prelude=stopped)
    assert result.code == 128 + signal.SIGTERM
    assert result.log == (
        "[ttp] ended by SIGTERM while it waited for the rendezvous store of this node; nothing was started\n"
    )

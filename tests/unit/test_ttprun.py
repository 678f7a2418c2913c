"""ttprun from the outside: its flags, what a script sees, exit codes. torch is imported once for all."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from adaptor import config
from adaptor.errors import ConfigError
from adaptor.launchers import flags, start_checks, ttprun
from adaptor.launchers.invitation import Invitation
from adaptor.mindio.client import sdk
from tests import timing, waiting
from tests.certificates import Authority
from tests.ports import free_port, free_ports
from tests.unit.nodes import ROOT, is_gone, open_descriptors, stop
from tests.unit.threads import LONG_S

ONE = ["--standalone", "--monitor-interval", "0.05", "--nproc-per-node", "1"]
TWO = [*ONE[:-1], "2"]
# For workers that do not go when they are told to.
TORCH_WAITS_S = 30.0

# What a script sees, one JSON object for each rank.
LOOK = """
import json, os, sys
from pathlib import Path
seen = {
    "argv": sys.argv,
    "name": __name__,
    "file": globals().get("__file__"),
    "spec": getattr(__spec__, "name", None),
    "package": __package__,
    "loader": type(__loader__).__name__,
    "code": sys._getframe().f_code.co_filename,
    "path": sys.path[0],
    "paths": sys.path,
    "modules": [name for name in sys.modules if name.partition(".")[0] in ("adaptor", "torch", "wrapt")],
    "env": {name: value for name, value in os.environ.items() if "TTP" in name or name == "WORLD_SIZE"},
    "main": sys.modules["__main__"].__dict__ is globals(),
}
Path(os.environ["SEEN"] + os.environ["RANK"]).write_text(json.dumps(seen))
"""


@dataclass(frozen=True)
class Ended:
    code: int
    log: str

    @property
    def last_line(self) -> str:
        return self.log.strip().splitlines()[-1]


class Launcher:
    """Runs ttprun in a folder, with nothing of ours in its environment."""

    def __init__(self, zygote: subprocess.Popen[str] | None, folder: Path) -> None:
        self.folder = folder
        self._zygote = zygote
        self._log = folder / "log"
        mine = ("TTP", "TORCHELASTIC", "RANK", "WORLD_SIZE", "MASTER_")
        self._env = {k: v for k, v in os.environ.items() if not any(name in k for name in mine)}
        self._env.update(PYTHONPATH=str(ROOT), SEEN=str(folder / "seen"), OMP_NUM_THREADS="1")

    def _ask(self, **line: Any) -> int:
        assert self._zygote is not None
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(line) + "\n")
        self._zygote.stdin.flush()
        answer, *used = self._zygote.stdout.readline().split()
        for seconds in map(float, used):
            timing.charge(seconds)
            _charged.append(seconds)
        return int(answer)

    def start(self, *argv: str, before: str = "", **env: str) -> int:
        self._log.touch()  # who reads it may be faster than ttprun
        return self._ask(
            argv=argv,
            cwd=str(self.folder),
            env={**self._env, **env},
            log=str(self._log),
            before=before,
        )

    def wait(self, pid: int) -> Ended:
        return Ended(self._ask(wait=pid), self.log)

    def run(self, *argv: str, before: str = "", **env: str) -> Ended:
        return self.wait(self.start(*argv, before=before, **env))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def seen(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"seen{rank}").read_text())  # type: ignore[no-any-return]


_charged: list[float] = []  # CPU seconds of the zygote's forks


@functools.cache
def _started_zygote() -> subprocess.Popen[str]:
    """One for every file that imports the fixture."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("zygote.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    process = _started_zygote()
    yield process
    if process.poll() is None:
        process.communicate()
        timing.charge(-sum(_charged))  # with its end the kernel counts them, too


@pytest.fixture
def launcher(zygote: subprocess.Popen[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, tmp_path)


# connections between machines


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
@pytest.mark.usefixtures("_clean")
def test_several_machines_speak_tls(arguments: list[str], refused: bool) -> None:
    parsed = flags.parse([*arguments, "script.py"])
    if refused:
        with pytest.raises(ConfigError, match=r"no certificates: .* --ttp-tls-ca; or, .* --ttp-tls plain"):
            start_checks.require_safe_connections(parsed, config.load())
    else:
        start_checks.require_safe_connections(parsed, config.load())


@pytest.mark.usefixtures("_clean")
def test_several_machines_with_certificates(tmp_path: Path) -> None:
    files = Authority(tmp_path / "signer").settings()
    given = [text for name, path in files.items() for text in (f"--{name.lower().replace('_', '-')}", path)]
    parsed = flags.parse(["--nnodes", "2", "--master-addr", "10.0.0.1", *given, "script.py"])
    start_checks.require_safe_connections(parsed, config.load())


def test_unsafe_connections_are_refused_before_anything_starts(launcher: Launcher) -> None:
    script = launcher.script(LOOK)
    ended = launcher.run("--nnodes", "2", "--master-addr", "10.0.0.1", script)
    assert ended.code == 2
    (line,) = ended.log.splitlines()
    assert line.startswith("ttprun: error: --nnodes 2 and no certificates: ")
    ended = launcher.run("--ttp-tls-cert", "c.pem", "--ttp-tls-key", "k.pem", "--ttp-tls-ca", "a.pem", script)
    (line,) = ended.log.splitlines()
    assert (ended.code, line) == (
        2,
        "ttprun: error: TTP_TLS_CERT is 'c.pem': the file cannot be read (No such file or directory)",
    )


@pytest.mark.parametrize("same", [True, False], ids=["one signer", "two signers"])
def test_two_nodes_with_certificates(same: bool, zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """Of one signer they train; of two, the one that comes says why it does not, in its last line."""
    ours = Authority(tmp_path / "ours")
    signers = [ours, ours if same else Authority(tmp_path / "theirs")]
    ports = [str(port) for port in free_ports(2)]
    nodes, started = [], []
    for number, signer in enumerate(signers):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        where = ("--nnodes", "2", "--node-rank", str(number), "--master-port", ports[0])
        options = (*where, "--ttp-port", ports[1], "--monitor-interval", "0.05")
        script = node.script("print('trained')")
        started.append(node.start(*options, script, **signer.settings(f"node{number}")))
    if same:
        assert [node.wait(pid).code for node, pid in zip(nodes, started, strict=True)] == [0, 0]
        return
    ended = nodes[1].wait(started[1])
    os.kill(started[0], signal.SIGKILL)
    nodes[0].wait(started[0])
    assert ended.code == 2
    assert ended.last_line.startswith("ttprun: error: the controller at 127.0.0.1 port ")
    assert ": certificate " in ended.last_line


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
        where = ("--nnodes", "2", "--node-rank", str(number), "--master-port", ports[0])
        script = node.script(
            "import os\nfrom pathlib import Path\nfrom tests import waiting\n"
            "Path('here').write_text(f'{os.getpid()} ')\nwaiting.exist(Path('../go'))\n"
        )
        plain = ("--ttp-tls", "plain") if way == "plain" else ()
        options = (*plain, "--ttp-port", ports[1], "--ttp-log-level", "DEBUG", "--ttp-log-stdout", "1")
        started.append(node.start(*where, "--monitor-interval", "0.05", *options, script))
    waiting.written(
        tmp_path, lambda: all(_says_all(node.folder / "here") for node in nodes), "the workers run"
    )
    store = dist.TCPStore("127.0.0.1", int(ports[0]), is_master=False)
    told = Invitation.decode(store.get("none/ttp/1/ttp/controller"), way)
    secret = told.name
    if way == "plain":
        assert len(secret) == 64, "it goes through the store"
        # Knocks without it are told in the log.
        socket.create_connection(("127.0.0.1", int(ports[1])), LONG_S).close()
    else:
        assert told.port == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(ports[1])), LONG_S)
    workers = [int((node.folder / "here").read_text()) for node in nodes]
    seen = [
        Path(f"/proc/{pid}/{name}").read_bytes()
        for pid in (*started, *workers)
        for name in ("environ", "cmdline")
    ]
    (tmp_path / "go").touch()
    ended = [node.wait(pid) for node, pid in zip(nodes, started, strict=True)]
    assert [each.code for each in ended] == [0, 0]
    assert [ttprun.TRUSTED in each.log for each in ended] == [way == "plain"] * 2
    if way == "unix":
        return
    logs = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"1 rejected connections at the controller's port so far" in log for log in logs)
    assert not any(
        form in text for form in (secret.encode(), bytes.fromhex(secret)) for text in (*seen, *logs)
    )


def _says_all(path: Path) -> bool:
    return path.exists() and path.read_text().endswith(" ")


# another engine


def test_an_engine_that_is_not_installed(launcher: Launcher) -> None:
    ended = launcher.run(*ONE, "--ttp-engine", "mindio", launcher.script("print('started')"))
    assert ended.code == 2
    assert ended.last_line == (
        "ttprun: error: TTP_ENGINE is 'mindio', but mindio_ttp is not installed: install it, or leave "
        "TTP_ENGINE out"
    )
    assert "started" not in ended.log


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("import os; os._exit(2)", 1),  # what the SDK does when the job is saved
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("from adaptor.errors import ConfigError; raise ConfigError('no such thing')", 2),
    ],
    ids=["ended", "killed", "refused"],
)
def test_codes_beside_an_sdk(does: str, code: int, launcher: Launcher) -> None:
    package = launcher.folder / "sdk/mindio_ttp/framework_ttp"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("\n".join(f"{name} = None" for name in sdk.NEEDED))
    ended = launcher.run(
        *ONE, "--ttp-engine", "mindio", launcher.script(does), before="import sys; sys.path.insert(0, 'sdk')"
    )
    assert ended.code == code, ended.log
    # What torch makes of it is not said of a job that was refused.
    refused = "ttprun: error: no such thing" in ended.log.splitlines()
    assert (refused, "Root Cause" in ended.log) == (code == 2, code != 2)


# flags


@pytest.fixture
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ttprun writes into the environment is undone."""
    for setting in config.SETTINGS:
        monkeypatch.setenv(setting.variable, "")
        monkeypatch.delenv(setting.variable)


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize(
    "arguments",
    [
        ["script.py"],
        ["--nproc-per-node=4", "script.py", "--nproc-per-node", "8", "--ttp-ot", "20"],
        [
            "--nnodes",
            "1:3",
            "--nproc_per_node",
            "2",
            "--rdzv-backend=c10d",
            "--max-restarts=3",
            "script.py",
            "-x",
        ],
        ["--standalone", "-m", "package.module", "--", "-h"],
        ["--no-python", "./run.sh", "a b"],
        ["-r", "3", "-t", "1", "--log-dir", "/tmp/x", "--role", "r", "script.py"],
        ["--t", "3", "--stan", "--max-r=2", "script.py", "--t", "1", "--ttp-ot=20"],
        ["--standalone", "--", "script.py", "--ttp-ot", "20"],
        ["--standalone", "script.py", "--ttp-wings"],
        ["--local-ranks-filter", "0,1", "--run-path", "script.py"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_every_flag_of_torchrun_means_the_same(arguments: list[str]) -> None:
    from torch.distributed import run

    torchs = run.get_args_parser().parse_args(arguments)
    assert flags.parse(arguments) == torchs
    assert not any(setting.variable in os.environ for setting in config.SETTINGS)
    assert flags.parse(["--ttp-ot", "20", "--ttp-port=9001", *arguments]) == torchs
    assert (os.environ["TTP_OT"], os.environ["TTP_PORT"]) == ("20", "9001")


@pytest.mark.usefixtures("_clean")
def test_our_flags_stand_anywhere_before_the_script() -> None:
    text = "--t 3 --ttp-ot 20 --standalone --ttp-port=9001 -m --ttp-device cpu package --ttp-ot 30 --t"
    parsed = flags.parse(text.split())
    assert (parsed.tee, parsed.standalone, parsed.module) == ("3", True, True)
    assert parsed.training_script == "package"
    assert parsed.training_script_args == ["--ttp-ot", "30", "--t"]
    assert [os.environ[name] for name in ("TTP_OT", "TTP_PORT", "TTP_DEVICE")] == ["20", "9001", "cpu"]


@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
def test_help_shows_the_flags_of_both(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ttprun.main([flag])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ttprun")
    assert all(f"  {flag}" in shown for flag in ("--nproc-per-node", *(s.flag for s in config.SETTINGS)))


def test_the_short_help_is_short_and_has_each_setting_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ttprun.main(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 110
    assert all(len(re.findall(rf"^  {s.flag}\s", shown, re.MULTILINE)) == 1 for s in config.SETTINGS)
    assert "exit codes:" in shown
    assert "--logs-specs" not in shown


@pytest.mark.usefixtures("_clean")
def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dump = tmp_path / "dump.json"
    dump.write_text('{"steps": 2}')
    for setting in config.SETTINGS:
        if setting.variable.startswith("TTP_TLS_"):  # one needs the others
            monkeypatch.setenv(setting.variable, "some.pem")
    texts = {
        "ENABLE_TTP": "0",
        "TTP_OT": "77",
        "TTP_GRACE": "9",
        "TTP_HANG": "0",
        "TTP_ONLINE": "30",
        "TTP_SPARES": "4",
        "TTP_NO_PROGRESS": "5",
        "TTP_PORT": "9001",
        "TTP_TLS": "mutual",
        "TTP_TLS_CERT": "a.pem",
        "TTP_TLS_KEY": "b.pem",
        "TTP_TLS_CA": "c.pem",
        "TTP_DEVICE": "cpu",
        "TTP_ENGINE": "builtin",
        "TTP_REPLICA": "none",
        "TTP_LOCAL_COPY": "1",
        "TTP_REQUIRE_PROTECTION": "1",
        "TTP_PROVIDE_MINDIO": "1",
        "TTP_PLATFORM": "slurm",
        "TTP_STORE": "s3://bucket/run7",
        "TTP_STORE_EVERY": "10",
        "TTP_STORE_KEEP": "3",
        "TTP_STORE_RATE": "200M",
        "TTP_STORE_ENDPOINT": "https://storage.example.com",
        "TTP_LOG_PATH": "here",
        "TTP_LOG_LEVEL": "ERROR",
        "TTP_LOG_STDOUT": "1",
        "TTP_SERVE": "127.0.0.1:9002",
        "TTP_SERVE_TOKEN": "token",
        "TTP_NOTIFY": "file:/tmp/notices",
        "TTP_NOTIFY_SECRET": "secret",
        "TTP_PROFILE": "steps=2",
        "TTP_DUMP": str(dump),
    }
    assert texts.keys() == {setting.variable for setting in config.SETTINGS}
    for setting in config.SETTINGS:
        text = texts[setting.variable]
        monkeypatch.setenv(setting.variable, setting.default)
        if setting.variable == "TTP_PROFILE":  # steps of a script for MindIO are not recorded
            monkeypatch.setenv("TTP_PROVIDE_MINDIO", "False")
        flags.parse([setting.flag, text, "script.py"])
        assert os.environ[setting.variable] == text, "workers read it there"
        assert getattr(config.load(), setting.field) == setting.parse(text)


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--ttp-ot", "5"], "TTP_OT is '5': it must be a number of seconds from 10 to 3600"),
        (["--ttp-enable", "maybe"], "ENABLE_TTP is 'maybe': it must be True, 1, False or 0"),
        (["--ttp-log-path", "/dev/null/logs"], "TTP_LOG_PATH is '/dev/null/logs': the folder cannot be made"),
        (["--ttp-log-path", "/proc"], "TTP_LOG_PATH is '/proc': the folder cannot be written"),
        (["--ttp-wings", "2"], "there is no flag --ttp-wings: there are --ttp-enable, --ttp-ot,"),
        (["--ttp-wings=2"], "there is no flag --ttp-wings: "),
        (["--ttp-en", "0"], "there is no flag --ttp-en: "),
        (["--ttp-ot", "--standalone"], "argument --ttp-ot: expected one argument"),
        (["--nproc-per-node", "0"], "--nproc-per-node is '0': it must be a number of processes from 1 on"),
        (["--nproc-per-node", "many"], "--nproc-per-node is 'many': it must be a number of processes"),
        (["--nnodes", "0"], "--nnodes is '0': it must be a number of nodes from 1 on, or MIN:MAX"),
        (["--nnodes", "3:2"], "--nnodes is '3:2': it must be a number of nodes"),
        (["--nnodes", "1:2:3"], "--nnodes is '1:2:3': it must be a number of nodes"),
        (["--nnodes", "two"], "--nnodes is 'two': it must be a number of nodes"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank is 2: it must be from 0 to 1"),
        (["--max-restarts", "-1"], "--max-restarts is -1: it must be a number from 0 on"),
        (["--tee", "9"], "--tee is '9': it must be 0, 1, 2 or 3, or that for some"),
        (["-r", "all"], "--redirects is 'all': it must be 0, 1, 2 or 3, or that for some"),
        (["--monitor-interval", "nan"], "--monitor-interval is nan: it must be a number of seconds above 0"),
        (["--monitor-interval", "-5"], "--monitor-interval is -5.0: it must be a number of seconds above 0"),
        (["--monitor-interval", "inf"], "--monitor-interval is inf: it must be a number of seconds above 0"),
        (["--rdzv-id", "a/b"], "--rdzv-id is 'a/b': it must be up to 246 bytes without '/'"),
        (["--rdzv-id", "é" * 124], f"--rdzv-id is '{'é' * 79}... (126 characters): it must be up to 246"),
        ([], "the script absent.py cannot be run (No such file or directory)"),
        (["--ttp-device", "cpu", "--ttp-enable", "0"], "the script absent.py cannot be run"),
        (["--no-python"], "--no-python: only a Python script that ttprun starts itself can be protected"),
        (["--no-python", "--ttp-enable=0", "--ttp-device=cpu"], "--no-python: TTP_DEVICE=cpu only reaches"),
    ],
)
def test_what_makes_no_sense_starts_nothing(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    script = "absent.py" if "absent.py" in line else "script.py"
    assert ttprun.main([*arguments, script]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ttprun: error: {line}")
    assert len(error.splitlines()) == 1


def test_a_misspelt_variable_starts_nothing(launcher: Launcher) -> None:
    ended = launcher.run(*ONE, launcher.script("print('started')"), TTP_HNAG="0")
    line = "ttprun: error: TTP_HNAG is set: there is no such setting; TTP_HANG is one\n"
    assert (ended.code, ended.log) == (2, line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rdzv-backend", "post"], "ValueError: The rendezvous backend 'post' is not registered."),
        (["--rdzv-conf", "fast"], "ValueError: The rendezvous configuration option 'fast' must have a value"),
        (["--log-dir", "/proc/logs"], "FileNotFoundError: [Errno 2] No such file or directory: '/proc/logs'"),
    ],
)
def test_what_torch_does_not_start(arguments: list[str], line: str, launcher: Launcher) -> None:
    ended = launcher.run(*arguments, launcher.script("print('started')"))
    assert ended.code == 2
    assert "Traceback" not in ended.log
    assert ended.last_line.startswith(f"ttprun: error: torch does not start: {line}")


def test_a_port_that_another_job_has(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ended = launcher.run("--master-port", port, launcher.script("print('started')"))
    assert ended.code == 2
    assert ended.last_line == (
        f"ttprun: error: the port of 127.0.0.1:{port} is taken on this machine: another job has it, or what"
        " is left of one; choose another one (--master-port, or the port in --rdzv-endpoint)"
    )
    assert "Traceback" not in ended.log


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
            ["--node-rank", "0", "--rdzv-conf", "timeout=1"],
            "node 1 of 2 did not come to 127.0.0.1:{port} in time; ",
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
            "--nnodes is 2: fewer nodes came to the rendezvous at localhost:{port} in time; ",
        ),
    ],
    ids=["nobody is there", "no store of c10d", "one with a number stays away", "one stays away"],
)
def test_nodes_that_do_not_meet(arguments: list[str], line: str, launcher: Launcher) -> None:
    port = free_port()
    options = [text.format(port=port) for text in ("--nnodes", "2", "--master-port", "{port}", *arguments)]
    ended = launcher.run(*options, launcher.script("print('started')"))
    assert ended.code == 2, ended.log
    assert ended.last_line.startswith(f"ttprun: error: {line.format(port=port)}")
    said = [text for text in ended.log.splitlines() if not text.startswith("[ttp] waiting for ")]
    assert said == [ended.last_line], "nor the stack of torch's C++ functions"


# A shell may have had it ignored.
HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


@pytest.mark.robustness(
    "A4",
    "the other node of two never comes, or is still to start; Ctrl-C or SIGTERM",
    "a line names who is awaited, and where, at once and every 10 s; a signal ends it at once, in one line",
)
@pytest.mark.parametrize(
    ("arguments", "awaited"),
    [
        (["--nnodes", "2", "--node-rank", "0", "--master-port", "{port}"], "node 1 of 2 at 127.0.0.1:{port}"),
        (["--nnodes", "2", "--node-rank", "1", "--master-port", "{port}"], "node 0 of 2 at 127.0.0.1:{port}"),
        (
            ["--nnodes", "6", "--node-rank", "0", "--master-port", "{port}"],
            "nodes 1, 2, 3, 4 and 1 more of 6 at 127.0.0.1:{port}",
        ),
        (
            ["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"],
            "1 more of 2 to 3 nodes at localhost:{port}",
        ),
        (
            [
                *("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"),
                *("--rdzv-conf", "is_host=0"),
            ],
            "the rendezvous at localhost:{port}",
        ),
    ],
    ids=["node 1", "node 0", "many", "c10d", "the store of c10d"],
)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_nodes_that_are_awaited(
    by: signal.Signals, arguments: list[str], awaited: str, launcher: Launcher
) -> None:
    port = free_port()
    options = [text.format(port=port) for text in arguments]
    pid = launcher.start(*options, launcher.script("print('started')"), before=HEARS_CTRL_C)
    waits = f"[ttp] waiting for {awaited.format(port=port)}\n"
    waiting.written(launcher.folder, lambda: launcher.log.endswith(waits), "it says for whom it waits")
    os.kill(pid, by)
    ended = launcher.wait(pid)
    assert ended.code == 128 + by, ended.log
    said = f"[ttp] ended by {by.name} while it waited for {awaited.format(port=port)}; nothing was started\n"
    assert ended.log.replace(waits, "") == said


@pytest.mark.robustness(
    "A4",
    "the other node of two never comes; a second signal follows the first at once, as that of timeout(1)",
    "one line, and the exit code of the first",
)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["account.conclude", "agent.SurvivorsAgent.close"])
def test_two_signals_while_nodes_are_awaited(place: str, by: signal.Signals, launcher: Launcher) -> None:
    second = (
        f"\nimport adaptor.launchers.agent as agent, adaptor.launchers.account as account\nbefore = {place}\n"
        "def interrupted(*arguments):\n"
        f"    signal.raise_signal({by:d})\n"
        "    return before(*arguments)\n"
        f"{place} = interrupted\n"
    )
    port = free_port()
    options = ("--nnodes", "2", "--node-rank", "0", "--master-port", str(port))
    pid = launcher.start(*options, launcher.script("print('started')"), before=HEARS_CTRL_C + second)
    waits = f"[ttp] waiting for node 1 of 2 at 127.0.0.1:{port}\n"
    waiting.written(launcher.folder, lambda: launcher.log.endswith(waits), "it says for whom it waits")
    os.kill(pid, by)
    ended = launcher.wait(pid)
    assert ended.code == 128 + by, ended.log
    said = (
        f"[ttp] ended by {by.name} while it waited for node 1 of 2 at 127.0.0.1:{port}; nothing was started\n"
    )
    assert ended.log.replace(waits, "") == said


@pytest.mark.robustness(
    "A4", "a node comes late", "the job trains; the line that named the node is the only trace of it"
)
def test_a_node_that_comes_late(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    port, gate = free_ports(2)
    nodes, started = [], []
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        where = ("--nnodes", "2", "--node-rank", str(number), "--master-port", str(port))
        options = ("--ttp-port", str(gate), "--monitor-interval", "0.05")
        started.append(node.start(*where, *options, node.script("print('trained')")))
        if number == 0:
            waiting.written(
                nodes[0].folder, lambda: "waiting for node 1 of 2 at " in nodes[0].log, "node 0 waits"
            )
    for node, pid in zip(nodes, started, strict=True):
        ended = node.wait(pid)
        assert (ended.code, ended.last_line) == (0, "trained"), ended.log


def test_ctrl_c_before_anything_was_started(launcher: Launcher) -> None:
    while_torch_is_imported = (
        "import signal\n"
        "from adaptor.launchers import flags\n"
        # A shell may have had it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "flags.parse = lambda arguments: signal.raise_signal(signal.SIGINT)\n"
    )
    ended = launcher.run(*ONE, launcher.script("print('started')"), before=while_torch_is_imported)
    line = "[ttp] ended by SIGINT, before anything was started\n"
    assert (ended.code, ended.log) == (128 + signal.SIGINT, line)


@pytest.mark.parametrize("module", ["adaptor.launchers.ttprun", "asyncio", "torch"])
def test_ctrl_c_while_the_launcher_is_imported(module: str, tmp_path: Path) -> None:
    program = (
        "import _signal, sys\n"  # `signal` is one of those that may not be there yet
        # A shell may have had it ignored.
        "_signal.signal(_signal.SIGINT, _signal.default_int_handler)\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: _signal.raise_signal(_signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "from adaptor.launchers.entry import main\n"
        "sys.exit(main())\n"
    )
    done = _run_here(tmp_path, sys.executable, "-c", program)
    line = "[ttp] ended by SIGINT, before anything was started\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", line)


def test_nothing_is_imported_before_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """But Python's own start and the package itself: during these Ctrl-C is Python's traceback."""
    program = (
        "import sys\n"
        "import adaptor.launchers\n"
        "before = set(sys.modules)\n"
        "import adaptor.launchers.entry\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = _run_here(tmp_path, sys.executable, "-c", program)
    assert (done.stdout, done.stderr) == ("adaptor.launchers.entry\n", "")


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("named", ["eth99", "lo,eth99"])
def test_a_network_interface_that_is_not_there(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    (tmp_path / "script.py").touch()
    assert ttprun.main(["script.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = (
        f"ttprun: error: GLOO_SOCKET_IFNAME is '{named}': this node has no network interface 'eth99', it has "
    )
    assert line.startswith(said)
    assert "lo" in line.removeprefix(said)


def test_the_label_of_an_address_is_an_interface_for_gloo() -> None:
    start_checks.require_interfaces("lo:1")


# what a script sees


def test_a_script_sees_what_python_would_show_it(launcher: Launcher) -> None:
    (launcher.folder / "deep").mkdir()
    arguments = ["--step=1", "-x", "--", "--nproc", "a b", ""]
    ended = launcher.run(
        *TWO, "--ttp-ot", "33", launcher.script(LOOK, "deep/look.py"), *arguments, TTP_OT="44"
    )
    assert ended.code == 0, ended.log
    for rank in (0, 1):
        seen = launcher.seen(rank)
        assert seen["argv"] == ["deep/look.py", *arguments]
        assert seen["name"] == "__main__"
        assert seen["main"]
        assert seen["file"] == str(launcher.folder / "deep/look.py")
        assert seen["path"] == str(launcher.folder / "deep")
        assert seen["env"]["TTP_OT"] == "33"
        assert seen["env"]["WORLD_SIZE"] == "2"
        assert "adaptor.worker.runtime" in seen["modules"]
        assert "torch" not in seen["modules"], "that is for the script to import"
    assert list((launcher.folder / "logs").glob("*.log")) == [], "there was nothing to say"


@pytest.mark.robustness("A7", "a script asks where it is, and what it was called", "as under torchrun")
@pytest.mark.parametrize("how", ["relative", "absolute", "a link", "a module", "a package"])
def test_a_script_is_what_it_is_under_torchrun(how: str, launcher: Launcher) -> None:
    (launcher.folder / "pack").mkdir()
    launcher.script("", "pack/__init__.py")
    launcher.script(LOOK, "pack/__main__.py")
    launcher.script(LOOK, "pack/look.py")
    (launcher.folder / "link.py").symlink_to("pack/look.py")
    command = {
        "relative": ["pack/../pack/look.py"],
        "absolute": [str(launcher.folder / "pack/look.py")],
        "a link": ["link.py"],
        "a module": ["-m", "pack.look"],
        "a package": ["-m", "pack"],
    }[how]
    seen = []
    for enabled in ("True", "False"):
        ended = launcher.run(*ONE, "--ttp-enable", enabled, *command, "-x")
        assert ended.code == 0, ended.log
        seen.append({name: what for name, what in launcher.seen().items() if name in LIKE_TORCHRUN})
    assert seen[0] == seen[1]


LIKE_TORCHRUN = ("argv", "name", "file", "spec", "package", "loader", "code", "path", "main")


@pytest.mark.parametrize(
    "env", [{}, {"ENABLE_TTP": "False", "TTP_DEVICE": "cpu"}], ids=["on", "the device alone"]
)
def test_a_module_as_the_script(launcher: Launcher, env: dict[str, str]) -> None:
    (launcher.folder / "package").mkdir()
    launcher.script("", "package/__init__.py")
    launcher.script(LOOK, "package/look.py")
    ended = launcher.run(*ONE, "-m", "package.look", "--module", "-m", **env)
    assert ended.code == 0, ended.log
    seen = launcher.seen()
    assert seen["argv"] == [str(launcher.folder / "package" / "look.py"), "--module", "-m"]
    assert seen["name"] == "__main__"
    assert seen["path"] == str(launcher.folder)


# Files of the working directory with the names of modules: of Python, of what the adaptor uses, and its own.
# None that `python script.py` itself takes from there when it spawns a process (multiprocessing, runpy).
FOREIGN = (
    "adaptor/__init__.py",
    "ctypes.py",
    "msgspec.py",
    "packaging.py",
    "queue.py",
    "wrapt/__init__.py",
    "xxhash.py",
)
# What a script and a process that it spawns see. The framework's own data loaders and managers are spawned.
HELPER = """
import sys

def look():
    names = ("adaptor", "msgspec", "multiprocessing", "queue", "wrapt", "xxhash")
    return [sys.path, {name: sys.modules[name].__file__ for name in names if name in sys.modules}]

def put(seen):
    seen.put(look())
"""
SPAWN = """
if __name__ == "__main__":
    import json, multiprocessing, os, queue
    TORCH
    from pathlib import Path
    from HELPER import look, put
    context = multiprocessing.get_context("spawn")
    seen = context.Queue()
    child = context.Process(target=put, args=(seen,))
    child.start()
    both = {"here": look(), "child": seen.get(timeout=60)}
    child.join()
    with context.Manager() as manager:
        assert list(manager.list([1])) == [1]
    Path(os.environ["SEEN"]).write_text(json.dumps(both))
"""


def _foreign(folder: Path, names: tuple[str, ...] = FOREIGN) -> None:
    """Modules that leave a line when they are imported, and end who imports them."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        note = f"open({str(folder / 'imported')!r}, 'a').write('{name} ')"
        (folder / name).write_text(f"{note}\nraise SystemExit('imported {name}')\n")


def _run_here(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    mine = ("TTP", "TORCHELASTIC", "PYTHONPATH")
    clean = {name: value for name, value in os.environ.items() if not any(word in name for word in mine)}
    return subprocess.run(
        command,
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", "SEEN": str(folder / "seen"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.robustness(
    "A7",
    "modules of the working directory have the names of ours, of Python's and of what we use",
    "none is imported by ttprun, its workers and what these spawn; the script's path is that of python",
)
@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TTP_DEVICE": "cpu"},
        {"ENABLE_TTP": "False", "TTP_DEVICE": "cpu"},
        pytest.param(
            {"PYTHONSAFEPATH": "1"},
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of 3.11"),
        ),
    ],
    ids=lambda env: " ".join(map("=".join, env.items())) or "as ever",
)
@pytest.mark.integration
def test_no_file_of_the_working_directory_is_imported(tmp_path: Path, env: dict[str, str]) -> None:
    _foreign(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "helper.py").write_text(HELPER)
    script = tmp_path / "deep" / "script.py"
    script.write_text(SPAWN.replace("HELPER", "helper").replace("TORCH", ""))
    safe = {}
    if "PYTHONSAFEPATH" in env:
        safe = {**env, "PYTHONPATH": str(tmp_path / "deep")}  # else nothing finds the helper
    plain = _run_here(tmp_path, sys.executable, "deep/script.py", **safe)
    assert plain.returncode == 0, plain.stderr
    expected = json.loads((tmp_path / "seen").read_text())
    (tmp_path / "seen").unlink()
    script.write_text(SPAWN.replace("HELPER", "helper").replace("TORCH", "import torch"))
    ttprun_script = str(Path(sys.executable).with_name("ttprun"))
    done = _run_here(tmp_path, ttprun_script, *ONE, "deep/script.py", **{**env, **safe})
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    seen = json.loads((tmp_path / "seen").read_text())
    assert [seen[where][0] for where in expected] == [expected[where][0] for where in expected]
    files = {**seen["here"][1], **seen["child"][1]}.values()
    assert not [file for file in files if Path(file).is_relative_to(tmp_path)]


@pytest.mark.robustness(
    "A7",
    "--module, and modules of the working directory have the names of ours",
    "the adaptor imports none of them; the script's path is that of python -m",
)
@pytest.mark.integration
def test_a_module_finds_the_working_directory_and_the_adaptor_does_not(tmp_path: Path) -> None:
    _foreign(tmp_path, ("adaptor/__init__.py", "msgspec.py", "wrapt.py", "xxhash.py"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "helper.py").write_text(HELPER)
    script = tmp_path / "package" / "script.py"
    script.write_text(SPAWN.replace("HELPER", "package.helper").replace("TORCH", ""))
    plain = _run_here(tmp_path, sys.executable, "-m", "package.script")
    assert plain.returncode == 0, plain.stderr
    expected = json.loads((tmp_path / "seen").read_text())
    (tmp_path / "seen").unlink()
    script.write_text(SPAWN.replace("HELPER", "package.helper").replace("TORCH", "import torch"))
    ttprun_script = str(Path(sys.executable).with_name("ttprun"))
    done = _run_here(tmp_path, ttprun_script, *ONE, "-m", "package.script")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["here"][0], seen["child"]) == (expected["here"][0], expected["child"])


@pytest.mark.robustness(
    "A7",
    "beside the script lies a module with the name of one that the adaptor uses",
    "the script imports its own, the adaptor goes on with the installed one",
)
def test_a_script_imports_its_own_modules(launcher: Launcher) -> None:
    launcher.script("mine = 'of the script'\n", "xxhash.py")
    launcher.script("mine = 'of the script'\n", "secrets.py")
    text = (
        "import adaptor, secrets, sys, xxhash\n"
        "from adaptor.checkpoint import hashing\n"
        "print(secrets.mine, xxhash.mine, hasattr(hashing.xxhash, 'xxh3_128'))\n"
    )
    ended = launcher.run(*ONE, launcher.script(text))
    assert ended.code == 0, ended.log
    assert "of the script of the script True" in ended.log


@pytest.mark.robustness(
    "A9", "the distribution adaptor of the package index is installed, too", "one line, and what to do"
)
def test_another_distribution_of_the_same_import_name(launcher: Launcher) -> None:
    script = launcher.script("import sys\nprint('trained')\n")
    before = "import sys; sys.path.append('others')"
    assert "distribution" not in launcher.run(*TWO, script, before=before).log
    info = launcher.folder / "others" / "adaptor-0.2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adaptor\nVersion: 0.2.5\n")
    ended = launcher.run(*TWO, script, before=before)
    assert ended.code == 0, ended.log
    (line,) = (line for line in ended.log.splitlines() if "distribution" in line)
    assert line == (
        "[ttp] the distribution adaptor 0.2.5 is installed, which has the import name of ttp-adaptor: each"
        " overwrites files of the other; uninstall both, then install ttp-adaptor again"
    )
    replaced = launcher.run(*TWO, script, before=f"{before}; import adaptor; del adaptor.enable")
    assert (replaced.code, len(replaced.log.splitlines())) == (2, 1)
    assert replaced.last_line.startswith(
        "ttprun: error: adaptor/__init__.py is not that of ttp-adaptor, the distribution adaptor 0.2.5 has"
        " replaced it: uninstall both"
    )


def test_a_folder_as_the_script(launcher: Launcher) -> None:
    (launcher.folder / "job").mkdir()
    launcher.script(LOOK, "job/__main__.py")
    ended = launcher.run(*ONE, "job", "-x")
    assert ended.code == 0, ended.log
    seen = launcher.seen()
    assert (seen["argv"], seen["path"]) == (["job", "-x"], "job")
    assert str(launcher.folder) not in seen["paths"], "as under python itself"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of 3.11")
def test_a_safe_path_loses_no_entry(launcher: Launcher) -> None:
    """What stands first on it then is PYTHONPATH's, not the folder that `python -m` puts there."""
    ended = launcher.run(*ONE, launcher.script(LOOK, "look.py"), PYTHONSAFEPATH="1")
    assert ended.code == 0, ended.log
    seen = launcher.seen()
    assert str(launcher.folder) not in seen["paths"], "as under python itself"
    assert str(ROOT) in seen["paths"]


# off


def test_switched_off_it_is_torchrun(launcher: Launcher) -> None:
    script = launcher.script(LOOK)
    ended = launcher.run(*ONE, "--ttp-enable", "False", script, "-x")
    assert ended.code == 0, ended.log
    seen = launcher.seen()
    assert seen["modules"] == [], "nothing of the adaptor is imported"
    assert seen["argv"] == [script, "-x"]
    assert set(seen["env"]) == {"ENABLE_TTP", "WORLD_SIZE"}


def test_switched_off_a_failure_ends_as_under_torchrun(launcher: Launcher) -> None:
    script = launcher.script("import sys\nsys.exit(3)\n")
    ended = launcher.run(*ONE, script, ENABLE_TTP="0")
    as_torch = "import adaptor.launchers.ttprun as t, torch.distributed.run as r\nt.main = r.main"
    torchrun = launcher.run(*ONE, script, before=as_torch)
    assert ended.code == torchrun.code == 1
    assert ended.last_line == torchrun.last_line
    assert "ChildFailedError" in ended.log


def test_switched_off_a_program_need_not_be_python(launcher: Launcher) -> None:
    program = launcher.folder / "run.sh"
    program.write_text('#!/bin/sh\necho "arguments: $*, rank $RANK"\n')
    program.chmod(0o700)
    ended = launcher.run(*ONE, "--no-python", "./run.sh", "--flag", ENABLE_TTP="False")
    assert ended.code == 0, ended.log
    assert "arguments: --flag, rank 0" in ended.log


def test_switched_off_a_device_is_the_stand_ins_alone(launcher: Launcher) -> None:
    ended = launcher.run(*ONE, launcher.script(LOOK), "-x", ENABLE_TTP="False", TTP_DEVICE="cpu")
    assert ended.code == 0, ended.log
    seen = launcher.seen()
    assert "adaptor.devices.cpu" in seen["modules"]
    others = (
        "adaptor.protocol",
        "adaptor.controller",
        "adaptor.worker",
        "adaptor.checkpoint",
        "adaptor.launchers",
        "adaptor.patches.megatron",
    )
    assert [name for name in seen["modules"] if name.startswith(others)] == []
    assert seen["argv"] == ["script.py", "-x"]


# exit codes

BY_RANK = "import os, signal, sys\nif os.environ['RANK'] == '{rank}':\n    {what}\n{rest}\n"
WAIT = "import threading\nthreading.Event().wait(600)"


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 raised SystemExit: 3"),
        ("os._exit(4)", 4, "rank 1 exited with code 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was ended by SIGSEGV"),
        ("sys.exit('two\\nlines')", 1, "rank 1 raised SystemExit: two"),
        ("raise ValueError('two\\nlines')", 1, "rank 1 raised ValueError: two"),
        ("raise ValueError", 1, "rank 1 raised ValueError ({script}, line 3)"),
    ],
)
def test_a_job_ends_with_the_code_of_the_worker_that_failed(
    launcher: Launcher, what: str, code: int, words: str
) -> None:
    script = launcher.script(BY_RANK.format(rank=1, what=what, rest=WAIT))
    ended = launcher.run(*TWO, script)
    assert ended.code == code, ended.log
    told = "nothing to save: no step has finished: training had not begun on every rank"
    assert ended.last_line == f"[ttp] {words.format(script=launcher.folder / script)}; {told}"
    if "two" in what:
        assert "lines" in ended.log, "all of it is said before"


def test_a_note_on_an_exception_is_not_the_exception(launcher: Launcher) -> None:
    what = "e = ValueError('boom'); e.__notes__ = ['a note']; raise e"
    ended = launcher.run(*ONE, launcher.script(BY_RANK.format(rank=0, what=what, rest="")))
    assert ended.last_line.startswith("[ttp] rank 0 raised ValueError: boom; ")


def test_a_restart(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(f'start {count} of {os.environ[\"TTP_GENERATION\"]}', flush=True)\n"
        "sys.exit(0 if count == '2' else 5)\n"
    )
    ended = launcher.run(*ONE, "--max-restarts", "3", script)
    assert ended.code == 0, ended.log
    starts = [line for line in ended.log.splitlines() if line.startswith("start ")]
    assert [line.split()[1] for line in starts] == ["0", "1", "2"]
    assert len({line.split()[3] for line in starts}) == 3, "each generation has keys of its own"
    assert ended.log.count("[ttp] rank 0 raised SystemExit: 5") == 2


def starts(ended: Ended) -> int:
    """How often the script has run, which says so."""
    return ended.log.splitlines().count("start")


TRAINS = """
import os
from adaptor.worker import runtime
from adaptor.protocol.messages import Share
from tests.unit.trainee import CountingTrainee, Loop
from adaptor.checkpoint import tracker
from pathlib import Path
print("start", flush=True)
here = Path.cwd()
step = tracker.tracked_step(here) or 0
loop = Loop(runtime.get().session, CountingTrainee(str(here), (Share("g", 0, 1),)))
loop.begin(step)
while step < 9:
    step += 1
    {what}
    loop.step(step)
"""


@pytest.mark.robustness(
    "A3",
    "the same ValueError in the same step at each start, ten restarts",
    "the third time ends the job, with exit code 79, and the last line says so",
)
def test_a_fault_that_comes_again_and_again(launcher: Launcher) -> None:
    script = launcher.script(TRAINS.format(what="if step == 8: raise ValueError('bad sample')"))
    ended = launcher.run(*ONE, "--max-restarts", "10", script)
    assert (ended.code, starts(ended)) == (79, 3), ended.log
    stop = "ValueError at script.py:15 came 3 times after step 7 without a newer checkpoint (TTP_NO_PROGRESS)"
    assert f"; not started again: {stop}; the newest checkpoint in " in ended.last_line
    assert ended.last_line.startswith("[ttp] rank 0 raised ValueError: bad sample; nothing to save: ")


@pytest.mark.robustness("A3", "the same signal in the same step at each start", "the third time ends the job")
def test_a_signal_that_comes_again_and_again(launcher: Launcher) -> None:
    script = launcher.script(TRAINS.format(what="if step == 8: os.kill(os.getpid(), 11)"))
    ended = launcher.run(*ONE, "--max-restarts", "10", script)
    assert (ended.code, starts(ended)) == (79, 3), ended.log
    assert "; not started again: SIGSEGV came 3 times after step 7 without a newer " in ended.last_line


@pytest.mark.robustness("A3", "a fault in a later step at each start", "all restarts are used")
def test_a_job_that_makes_progress_uses_its_restarts(launcher: Launcher) -> None:
    again = "if step == 2 * (1 + int(os.environ['TORCHELASTIC_RESTART_COUNT'])): raise ValueError"
    ended = launcher.run(*ONE, "--max-restarts", "5", launcher.script(TRAINS.format(what=again)))
    assert (ended.code, starts(ended)) == (0, 5), ended.log


def test_as_often_as_one_likes(launcher: Launcher) -> None:
    script = launcher.script("print('start', flush=True)\nraise ValueError\n")
    ended = launcher.run(*ONE, "--max-restarts", "4", "--ttp-no-progress", "0", script)
    assert (ended.code, starts(ended)) == (1, 5), ended.log


@pytest.mark.robustness(
    "A3",
    "arguments that argparse refuses, a module that is missing, a syntax error, no NVIDIA driver",
    "no second start; one last line",
)
@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("import argparse; argparse.ArgumentParser().parse_args(['--wings'])", 2),
        ("import no_such_module", 1),
        ("from os import no_such_name", 1),
        ("exec('x =')", 1),
        ("raise RuntimeError('Found no NVIDIA driver on your system. Please check')", 1),
    ],
    ids=["arguments", "import", "name", "syntax", "driver"],
)
def test_a_mistake_is_not_tried_again(what: str, code: int, launcher: Launcher) -> None:
    ended = launcher.run(
        *TWO, "--max-restarts", "3", launcher.script(f"print('start', flush=True)\n{what}\n")
    )
    assert ended.code == code, ended.log
    assert starts(ended) == 2, "once on each rank"
    assert ended.last_line.endswith("; not started again: another start would fail in the same way"), (
        ended.log
    )


def test_what_worked_once_is_no_mistake(launcher: Launcher) -> None:
    """A file system that is away for a moment looks like a missing module."""
    script = launcher.script(
        "import os, sys\n"
        "print('start', flush=True)\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if count == '0': os._exit(3)\n"
        "if count == '1': import no_such_module\n"
    )
    ended = launcher.run(*ONE, "--max-restarts", "3", script)
    assert (ended.code, starts(ended)) == (0, 3), ended.log


@pytest.mark.robustness(
    "A6",
    "an operator reads the log of a job that has failed twice",
    "time with its zone, host, rank, pid and report of each fault; what each restart and all of it cost",
)
def test_what_an_operator_reads_at_night(launcher: Launcher) -> None:
    count = "int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    fails = f"if step == 3 * (1 + {count}) < 9: raise ValueError(os.getpid())"
    ended = launcher.run(*ONE, "--max-restarts", "3", launcher.script(TRAINS.format(what=fails)))
    assert ended.code == 0, ended.log
    said = [line for line in ended.log.splitlines() if line.startswith("[ttp] ")]
    # The line of the first finished step comes from a worker, before or after that of the restart.
    protected = [line for line in said if line.startswith("[ttp] protected from step ")]
    begun = [f"[ttp] protected from step {step} (split; any 1 rank)" for step in (1, 3, 6)]
    assert protected == begun, ended.log
    # Once, not at each start.
    restarts = (
        "[ttp] online recovery: no (its training loop cannot be called again); a fault restarts all ranks"
    )
    assert said.count(restarts) == 1, ended.log
    said = [line for line in said if line not in (*protected, restarts)]
    utc = r"\[ttp\] \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
    expected = []
    for number, step in ((1, 2), (2, 5)):
        pid = re.findall(r"raised ValueError: (\d+);", ended.log)[number - 1]
        report = re.escape(f"{launcher.folder}/logs/") + rf"[\dTZ]+-\d+/incidents/[\dTZ]+-{number}\.json"
        who = rf"rank 0 \(pid {pid}, host {socket.gethostname()}\)"
        expected += [
            rf"{utc}incident {number}, {who}, after step {step}, report {report}",
            rf"\[ttp\] rank 0 raised ValueError: {pid}; step {step} is saved, no finished step is lost",
            rf"{utc}restart {number} of 3: from step {step}, 0 steps lost, \d+\.\d s after the fault",
        ]
        (path,) = launcher.folder.glob(f"logs/*/incidents/*-{number}.json")
        assert json.loads(path.read_text())["blamed"] == 0
    sums = f"2 incidents, 0 steps lost; reports in {path.parent}"
    expected.append(rf"{utc}the job has come to its end, {re.escape(sums)}")
    assert len(said) == len(expected), ended.log
    assert all(map(re.fullmatch, expected, said)), ended.log
    assert ended.last_line == said[-1]


# A survivor whose collective breaks, in the words of gloo, and another rank that is killed.
ECHO = """
import os, signal
from pathlib import Path
from tests import waiting
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
waiting.written(Path(), lambda: list(Path("logs").glob("*.log")), "the agent logs the first fault")
raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer. GLHF!")
"""
SHOWS_TORCHS_SUMMARY = """
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
original = run.run
def shown(parsed):
    try:
        original(parsed)
    except ChildFailedError as error:
        print(error, flush=True)
        raise
run.run = shown
"""


@pytest.mark.robustness(
    "A6",
    "rank 1 is killed, rank 0 survives and raises because of it",
    "torch's summary names rank 1 alone; nothing of rank 0 stands before the verdict",
)
def test_a_survivor_is_no_failure(launcher: Launcher) -> None:
    ended = launcher.run(*TWO, launcher.script(ECHO), before=SHOWS_TORCHS_SUMMARY)
    assert ended.code == 137, ended.log
    summary = ended.log[ended.log.index("Failures:") :]
    assert "<NO_OTHER_FAILURES>" in summary
    root = summary[summary.index("Root Cause (first observed failure):") :]
    assert "rank      : 1 (local_rank: 1)" in root
    assert "exitcode  : -9 (pid: " in root
    assert "GLHF" not in ended.log, "the report has it"
    assert "failed (exitcode" not in ended.log
    assert ended.last_line.startswith("[ttp] rank 1 was ended by SIGKILL; ")
    (report,) = launcher.folder.glob("logs/*/incidents/*.json")
    assert json.loads(report.read_text())["blamed"] == 1


def test_a_broken_collective_that_nothing_else_explains_is_shown(launcher: Launcher) -> None:
    what = "raise RuntimeError('[gloo/transport/tcp/pair.cc:537] no route')"
    ended = launcher.run(*ONE, launcher.script(what))
    assert ended.code == 1, ended.log
    assert "Traceback (most recent call last):" in ended.log
    assert ended.last_line.startswith("[ttp] rank 0 raised RuntimeError: [gloo/")


def test_a_death_while_torch_looks_at_its_workers(launcher: Launcher) -> None:
    """In the moment between our look at them and torch's, which would end the survivors on the spot."""
    before = """
import os, signal
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
original = SubprocessContext._poll
def poll(self):
    if not all(handler.proc.poll() == 0 for handler in self.subprocess_handlers.values()):
        os.kill(self.subprocess_handlers[1].proc.pid, signal.SIGKILL)
        self.subprocess_handlers[1].proc.wait()
    return original(self)
SubprocessContext._poll = poll
"""
    script = launcher.script("import threading\nthreading.Event().wait(1)\n")
    ended = launcher.run(*TWO, script, before=before)
    assert ended.code == 0, ended.log


# the end of ttprun itself


def start_and_find_workers(launcher: Launcher, before: str = "") -> tuple[int, list[int]]:
    script = launcher.script(
        "import os, time\n"
        "from pathlib import Path\n"
        "Path(f'pid{os.environ[\"RANK\"]}').write_text(f'{os.getpid()} ')\n" + WAIT
    )
    pid = launcher.start(*TWO, script, before=before)
    files = [launcher.folder / f"pid{rank}" for rank in (0, 1)]
    waiting.written(launcher.folder, lambda: all(map(_says_all, files)), "the workers run")
    waiting.until(lambda: _watches(pid) == len(files), "the agent knows that they have been started")
    return pid, [int(file.read_text()) for file in files]


def _watches(pid: int) -> int:
    """Of how many processes this one would learn that they have ended."""
    return list(open_descriptors(pid).values()).count("anon_inode:[pidfd]")


@pytest.mark.robustness(
    "A4",
    "ttprun gets Ctrl-C, Ctrl-\\ (SIGQUIT), SIGTERM, or its terminal is closed (SIGHUP)",
    "a last line, exit code 128 + N, no process stays",
)
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_terminated_ttprun_takes_its_workers_along(by: signal.Signals, launcher: Launcher) -> None:
    # Where the tests themselves run under nohup it would be ignored.
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    pid, workers = start_and_find_workers(launcher, before)
    os.kill(pid, by)
    ended = launcher.wait(pid)
    assert ended.code == 128 + by, ended.log
    assert ended.last_line.startswith(f"[ttp] ttprun was told to end by {by.name}; nothing to save: ")
    host, logs = re.escape(socket.gethostname()), re.escape(f"{launcher.folder}/logs/")
    line = rf"^\[ttp\] \S+Z incident 1, ttprun \(pid {pid}, host {host}\), report {logs}\S+\.json$"
    assert re.search(line, ended.log, re.MULTILINE), ended.log
    assert all(is_gone(worker) for worker in workers)


def test_who_has_no_time_left_does_not_save(launcher: Launcher) -> None:
    """A worker that is stopped is not waited for any longer: it would not hear SIGTERM either."""
    script = launcher.script(
        "import os\n"
        "from pathlib import Path\n"
        "from adaptor.worker import runtime\n"
        "from adaptor.protocol.messages import Share\n"
        "from tests.unit.trainee import CountingTrainee, Loop\n"
        "loop = Loop(runtime.get().session, CountingTrainee(os.getcwd(), (Share('g', 0, 1),)))\n"
        "loop.begin(10)\n"
        "loop.step(11)\n"
        "Path('pid').write_text(f'{os.getpid()} ')\n" + WAIT
    )
    said = {"TTP_LOG_LEVEL": "DEBUG", "TTP_LOG_STDOUT": "1"}
    pid = launcher.start(*ONE, "--ttp-grace", "1", script, **said)
    file = launcher.folder / "pid"
    waiting.written(launcher.folder, lambda: _says_all(file), "the worker runs")
    knows = "rank 0: begins to train after step 10\n"
    waiting.written(launcher.folder, lambda: knows in launcher.log, "the agent knows of it")
    worker = int(file.read_text())
    stop(worker)
    begun = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    ended = launcher.wait(pid)
    assert time.monotonic() - begun < TORCH_WAITS_S
    assert ended.code == 128 + signal.SIGTERM, ended.log
    assert "[ttp] not saved within 1 s (TTP_GRACE) of SIGTERM\n" in ended.log
    none = f"no checkpoint is in {launcher.folder}"
    assert ended.last_line == f"[ttp] ended by SIGTERM, and the workers with it; {none}"
    assert is_gone(worker)


def test_a_killed_ttprun_takes_its_workers_along(launcher: Launcher) -> None:
    pid, workers = start_and_find_workers(launcher)
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(pid).code == -signal.SIGKILL
    waiting.ended(workers)


def test_an_orphan_of_the_test_would_be_seen() -> None:
    """`is_gone` is what the two tests above stand on."""
    with subprocess.Popen(["sleep", "600"]) as process:
        assert not is_gone(process.pid)
        process.kill()
        process.wait(LONG_S)
        assert is_gone(process.pid)


# nodes that find each other by a store on one of them


def start_two(
    zygote: subprocess.Popen[str], folder: Path, text: str, host: int = 0
) -> tuple[list[Launcher], list[int]]:
    """Two agents with a worker each; the store is with agent `host`."""
    port, store = free_ports(2)
    nodes, started = [], []
    for number in (0, 1):
        (folder / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, folder / f"node{number}"))
        where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store}")
        host_or_not = ("--rdzv-conf", f"is_host={number == host}")
        options = ("--max-restarts", "2", "--ttp-port", str(port), "--monitor-interval", "0.05")
        started.append(node.start(*where, *host_or_not, *options, node.script(text)))
    return nodes, started


def test_both_start_again_together(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    text = "import os, sys\nsys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 5)\n"
    nodes, started = start_two(zygote, tmp_path, text)
    for node, pid in zip(nodes, started, strict=True):
        ended = node.wait(pid)
        assert ended.code == 0, ended.log
        assert ended.log.count("raised SystemExit: 5; nothing to save") == 1


@pytest.mark.robustness(
    "A3",
    "on two nodes: a fault that comes again, a module that is missing",
    "both nodes end, with the same code",
)
@pytest.mark.parametrize(
    ("what", "code", "count", "words"),
    [
        (
            "raise ValueError",
            79,
            3,
            (
                "; not started again: ValueError at script.py:2 came 3 times before training without a newer "
                "checkpoint (TTP_NO_PROGRESS)"
            ),
        ),
        ("import no_such_module", 1, 1, "; not started again: another start would fail in the same way"),
    ],
    ids=["again", "mistake"],
)
def test_no_node_starts_again(
    what: str, code: int, count: int, words: str, zygote: subprocess.Popen[str], tmp_path: Path
) -> None:
    nodes, started = start_two(zygote, tmp_path, f"print('start', flush=True)\n{what}\n")
    for node, pid in zip(nodes, started, strict=True):
        ended = node.wait(pid)
        assert (ended.code, starts(ended)) == (code, count), ended.log
        assert ended.last_line.endswith(words), ended.log
    # c10d says which of them has the controller.
    assert sum(", before training, report on node 0" in node.log for node in nodes) == 1
    assert sum(f", before training, report {node.folder}/logs/" in node.log for node in nodes) == 1


@pytest.mark.robustness(
    "A4",
    "a node is lost, and nobody comes in its place; Ctrl-C",
    "a line names what is missing; the last line has the verdict, and what it waited for",
)
def test_a_node_whose_place_stays_empty(zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    text = "import os\nfrom pathlib import Path\nPath('here').write_text(os.environ['RANK'] + ' ')\n" + WAIT
    nodes, started = start_two(zygote, tmp_path, text)
    waiting.written(
        tmp_path, lambda: all(_says_all(node.folder / "here") for node in nodes), "the workers run"
    )
    lost = int((nodes[1].folder / "here").read_text())
    os.kill(started[1], signal.SIGKILL)
    nodes[1].wait(started[1])
    where, verdict = "1 more of 2 nodes at localhost:", f"[ttp] node {lost} is lost; "

    def since_the_verdict() -> str:  # on a slow machine the other one was awaited at the start, too
        return nodes[0].log.partition(verdict)[2]

    if lost == 0:  # c10d has given it the controller, and no job goes on without that node
        assert verdict in nodes[0].wait(started[0]).log
        assert "waiting for" not in since_the_verdict()
        return
    waits = f"[ttp] waiting for {where}"
    waiting.written(tmp_path, lambda: waits in since_the_verdict(), "it says for whom it waits")
    os.kill(started[0], signal.SIGINT)
    ended = nodes[0].wait(started[0])
    assert ended.code == 128 + signal.SIGINT, ended.log
    assert ended.last_line.startswith(f"{verdict}nothing to save: "), ended.log
    assert f"; ended by SIGINT while it waited for {where}" in ended.last_line
    assert "Traceback" not in ended.log


@pytest.mark.parametrize("host", [0, 1])
def test_the_node_with_the_store_is_lost(host: int, zygote: subprocess.Popen[str], tmp_path: Path) -> None:
    """One of them has the controller as well; the other node saves, and says why nobody starts again."""
    text = "import os\nfrom pathlib import Path\nPath('here').write_text(os.environ['RANK'] + ' ')\n" + WAIT
    nodes, started = start_two(zygote, tmp_path, text, host)
    waiting.written(
        tmp_path, lambda: all(_says_all(node.folder / "here") for node in nodes), "the workers run"
    )
    lost = int((nodes[host].folder / "here").read_text())
    os.kill(started[host], signal.SIGKILL)
    nodes[host].wait(started[host])
    ended = nodes[1 - host].wait(started[1 - host])
    assert ended.code == 128 + signal.SIGKILL, ended.log
    assert ended.last_line.startswith(f"[ttp] node {lost} is lost; nothing to save: ")
    assert ended.last_line.endswith("; nodes cannot meet again, for their store is lost") == (lost == 1)
    assert "Traceback" not in ended.log
    events = [path for node in nodes for path in (node.folder / "logs").glob("*/events.jsonl")]
    assert len({path.parent.name for path in events}) == 1, "a node that takes over writes to the same folder"
    assert ('"took-over"' in events[-1].read_text()) == (lost == 0)

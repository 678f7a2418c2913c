"""The flags and settings of ttprun: the help, and refusals before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from adaptor import config
from adaptor.launchers.cli import flags, start_checks, ttprun
from adaptor.mindio import client
from tests.unit.launching import ONE, Launcher, clean, launcher, zygote

__all__ = ["clean", "launcher", "zygote"]


def test_an_engine_that_is_not_installed(launcher: Launcher) -> None:
    result = launcher.run(*ONE, "--ttp-engine", "mindio", launcher.script("print('started')"), code=2)
    assert result.last_line == (
        "ttprun: error: TTP_ENGINE is 'mindio', but mindio_ttp is not installed: install it, or leave "
        "TTP_ENGINE out"
    )
    assert "started" not in result.log


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
    (package / "__init__.py").write_text("\n".join(f"{name} = None" for name in client.NEEDED))
    result = launcher.run(
        *ONE,
        "--ttp-engine",
        "mindio",
        launcher.script(does),
        prelude="import sys; sys.path.insert(0, 'sdk')",
        code=code,
    )
    # What torch makes of it is not said of a job that was refused.
    refused = "ttprun: error: no such thing" in result.log.splitlines()
    assert (refused, "Root Cause" in result.log) == (code == 2, code != 2)


@pytest.mark.usefixtures("clean")
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
    assert not any(setting.variable in os.environ for setting in config.settings())
    assert flags.parse(["--ttp-ot", "20", "--ttp-port=9001", *arguments]) == torchs
    assert (os.environ["TTP_OT"], os.environ["TTP_PORT"]) == ("20", "9001")


@pytest.mark.usefixtures("clean")
def test_our_flags_stand_anywhere_before_the_script() -> None:
    text = "--t 3 --ttp-ot 20 --standalone --ttp-port=9001 -m --ttp-device cpu package --ttp-ot 30 --t"
    parsed = flags.parse(text.split())
    assert (parsed.tee, parsed.standalone, parsed.module) == ("3", True, True)
    assert parsed.training_script == "package"
    assert parsed.training_script_args == ["--ttp-ot", "30", "--t"]
    assert [os.environ[name] for name in ("TTP_OT", "TTP_PORT", "TTP_DEVICE")] == ["20", "9001", "cpu"]


@pytest.mark.usefixtures("clean")
def test_our_flags_after_the_script_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    ttprun.main(["absent.py", "--lr", "1", "--ttp-hang=30"])
    assert "[ttp] --ttp-hang is an argument of the script" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
def test_help_shows_the_flags_of_both(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        ttprun.main([flag])
    assert exited.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ttprun")
    assert all(f"  {flag}" in shown for flag in ("--nproc-per-node", *(s.flag for s in config.settings())))


def test_the_short_help_is_short_and_has_each_setting_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ttprun.main(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 110
    assert all(len(re.findall(rf"^  {s.flag}\s", shown, re.MULTILINE)) == 1 for s in config.settings())
    assert "exit codes:" in shown
    assert "--logs-specs" not in shown


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ttprun.main(["--version"]) == 0
    assert re.fullmatch(r"ttprun of ttp-adaptor \S+, torch \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: training_script, training_script_args"),
        (
            ["--max-restarts", "x", "script.py"],
            "argument --max-restarts/--max_restarts: invalid int value: 'x'",
        ),
    ],
)
def test_a_wrong_flag_of_torchrun_is_two_lines(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        ttprun.main(arguments)
    assert exited.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ttprun [flags] script.py")
    assert line == f"ttprun: error: {message}"


@pytest.mark.usefixtures("clean")
def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dump = tmp_path / "dump.json"
    dump.write_text('{"steps": 2}')
    for setting in config.settings():
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
        "TTP_FAILED_SAVE": "stop",
        "TTP_VERIFY_SAVES": "1",
        "TTP_DRILL_EVERY": "100",
        "TTP_ALLOW_DRILL": "1",
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
        "TTP_STORE_ALSO": "logs",
        "TTP_STORE_ENDPOINT": "https://storage.example.com",
        "TTP_PULL": "s3://bucket/data=/cache/data",
        "TTP_HOST_COPY": "0",  # another value is refused together with TTP_PROVIDE_MINDIO
        "TTP_LOG_PATH": "here",
        "TTP_LOG_LEVEL": "ERROR",
        "TTP_LOG_STDOUT": "1",
        "TTP_SERVE": "127.0.0.1:9002",
        "TTP_SERVE_TOKEN": "token",
        "TTP_NOTIFY": "file:/tmp/notices",
        "TTP_NOTIFY_SECRET": "secret",
        "TTP_PROFILE": "steps=2",
        "TTP_DUMP": str(dump),
        "TTP_LAYOUT_ONLY": str(tmp_path / "layout"),
        "TTP_BATCH": "nearest",
        "TTP_VERIFY_EVERY": "0",  # as TTP_HOST_COPY
        "TTP_REPLAY_EVERY": "0",  # needs TTP_VERIFY_EVERY
        "TTP_TRANSCRIPT": "0",
        "TTP_CORRUPTION": "report",
        "TTP_RESHAPE": "tp=2,pp=1",
    }
    assert texts.keys() == {setting.variable for setting in config.settings()}
    for setting in config.settings():
        text = texts[setting.variable]
        monkeypatch.setenv(setting.variable, setting.default)
        if setting.variable == "TTP_PROVIDE_MINDIO":  # steps of a script for MindIO are not recorded
            monkeypatch.setenv("TTP_PROFILE", "")
            monkeypatch.setenv("TTP_DUMP", "")
        flags.parse([setting.flag, text, "script.py"])
        assert os.environ[setting.variable] == text, "workers read it there"
        assert config.load().value(setting) == setting.parse(text)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--ttp-ot", "5"], "TTP_OT is '5': it must be a number of seconds from 10 to 3600"),
        (["--ttp-enable", "maybe"], "ENABLE_TTP is 'maybe': it must be True, 1, False or 0"),
        (["--ttp-log-path", "/dev/null/logs"], "TTP_LOG_PATH is '/dev/null/logs': the folder cannot be made"),
        (["--ttp-log-path", "/proc"], "TTP_LOG_PATH is '/proc': the folder cannot be written"),
        (["--ttp-wings", "2"], "there is no flag --ttp-wings: ttprun --help-all has all of them"),
        (["--ttp-wings=2"], "there is no flag --ttp-wings: "),
        (["--ttp-en", "0"], "there is no flag --ttp-en: "),
        (["--wings"], "there is no flag --wings: ttprun --help-all has all of them"),
        (["--ttp-relpica", "split"], "there is no flag --ttp-relpica: --ttp-replica is one"),
        (["--ttp-localcopy=1"], "there is no flag --ttp-localcopy: --ttp-local-copy is one"),
        (["--tpp-hang", "5"], "there is no flag --tpp-hang: --ttp-hang is one"),
        (
            ["--max-restrats", "3", "--ttp-hang", "5"],
            "there is no flag --max-restrats: --max-restarts is one",
        ),
        (["--ttp-ot", "--standalone"], "argument --ttp-ot: expected one argument"),
        (["--nproc-per-node", "0"], "--nproc-per-node is '0': it must be a number of processes from 1 on"),
        (["--nproc-per-node", "many"], "--nproc-per-node is 'many': it must be a number of processes"),
        (["--nnodes", "0"], "--nnodes is '0': it must be a number of nodes from 1 on, or MIN:MAX"),
        (["--nnodes", "3:2"], "--nnodes is '3:2': it must be a number of nodes"),
        (["--nnodes", "1:2:3"], "--nnodes is '1:2:3': it must be a number of nodes"),
        (["--nnodes", "two"], "--nnodes is 'two': it must be a number of nodes"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank is 2: it must be from 0 to 1"),
        (["--standalone", "--nnodes", "2"], "--nnodes is 2: with --standalone no other node can come"),
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
def test_contradictory_flags_start_nothing(
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
    result = launcher.run(*ONE, launcher.script("print('started')"), TTP_HNAG="0")
    line = "ttprun: error: TTP_HNAG is set: there is no such setting; TTP_HANG is one\n"
    assert (result.code, result.log) == (2, line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rdzv-backend", "post"], "ValueError: The rendezvous backend 'post' is not registered."),
        (["--rdzv-conf", "fast"], "ValueError: The rendezvous configuration option 'fast' must have a value"),
        (["--log-dir", "/proc/logs"], "FileNotFoundError: [Errno 2] No such file or directory: '/proc/logs'"),
    ],
)
def test_flags_that_torch_refuses(arguments: list[str], line: str, launcher: Launcher) -> None:
    result = launcher.run(*arguments, launcher.script("print('started')"), code=2)
    assert "Traceback" not in result.log
    assert result.last_line.startswith(f"ttprun: error: torch does not start: {line}")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("named", ["eth99", "lo,eth99"])
def test_a_network_interface_that_is_not_there(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    (tmp_path / "script.py").touch()
    assert ttprun.main(["script.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    beginning = (
        f"ttprun: error: GLOO_SOCKET_IFNAME is '{named}': this node has no network interface 'eth99', it has "
    )
    assert line.startswith(beginning)
    assert "lo" in line.removeprefix(beginning)


def test_the_label_of_an_address_is_an_interface_for_gloo() -> None:
    start_checks.require_interfaces("lo:1")


def test_a_limit_of_online_recoveries_that_another_shortens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_OT", "60")
    monkeypatch.delenv("TTP_ONLINE")
    assert start_checks.shortens_online(config.load()) == "", "the default"
    monkeypatch.setenv("TTP_ONLINE", "30")
    assert start_checks.shortens_online(config.load()) == ""
    monkeypatch.setenv("TTP_ONLINE", "45")
    assert start_checks.shortens_online(config.load()) == (
        "[ttp] TTP_ONLINE is 45, and TTP_OT is 60: an online recovery has half of TTP_OT, 30 s; set a larger"
        " TTP_OT or a smaller TTP_ONLINE"
    )

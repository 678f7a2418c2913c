"""`ttp doctor`: what it finds on a machine that is not as it should be."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adaptor.launchers import ttp
from tests import certificates


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if "TTP" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TTP_DEVICE", "cpu")
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = ttp.main(["doctor", "--json", *arguments])
    return code, {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_a_node_on_which_a_job_can_be_protected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, findings = found(capsys, "--save", str(tmp_path / "save" / "of" / "job"), "--write-mib", "1")
    assert (code, [one for one in findings.values() if one["level"] == "FAIL"]) == (0, [])
    assert {"software", "kernel", "network", "save", "rename", "lock", "speed"} <= set(findings)
    assert not (tmp_path / "save").exists()
    assert not (tmp_path / "logs").exists()


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert ttp.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "OK   settings     every setting makes sense"
    assert lines[-1].endswith(f"{len(lines) - 1} checks, 0 failed")


@pytest.mark.parametrize(
    ("variable", "value", "name", "words"),
    [
        ("TTP_HANG", "soon", "settings", "TTP_HANG is 'soon'"),
        ("TTP_HNAG", "5", "settings", "TTP_HNAG is set: there is no such setting"),
        ("TTP_DEVICE", "gpu", "device", "TTP_DEVICE is 'gpu'"),
        ("TTP_ENGINE", "foo", "settings", "TTP_ENGINE is 'foo'"),
        ("GLOO_SOCKET_IFNAME", "eth77", "network", "this node has no network interface 'eth77'"),
        ("TTP_LOG_PATH", "/proc/logs", "logs", "/proc/logs cannot be written"),
    ],
)
def test_what_a_job_would_be_refused_for(
    variable: str,
    value: str,
    name: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    code, findings = found(capsys)
    assert (code, findings[name]["level"]) == (1, "FAIL")
    assert words in findings[name]["words"]


@pytest.mark.parametrize(("days", "level"), [(100, "OK"), (3, "WARN"), (-1, "FAIL")])
def test_when_a_certificate_ends(
    days: int,
    level: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, path in certificates.Authority(tmp_path / "tls", days=200).settings("n", days).items():
        monkeypatch.setenv(name, path)
    _, findings = found(capsys)
    assert findings["certificates"]["level"] == level


def test_a_save_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, findings = found(capsys, "--save", str(tmp_path / "file"))
    assert (code, findings["save"]["level"]) == (1, "FAIL")


def test_few_descriptors_are_said(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))

    words = subprocess.run(
        [sys.executable, "-m", "adaptor.launchers.ttp", "doctor"],
        preexec_fn=few,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "WARN descriptors  256 for each process: ulimit -n 4096 (the hard limit is 1024)" in words


@pytest.mark.parametrize("amount", ["0", "-1", "much", str(1 << 21)])
def test_an_amount_that_is_none(amount: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ttp.main(["doctor", "--write-mib", amount])
    assert ended.value.code == 2
    assert "it must be a number of MiB" in capsys.readouterr().err

"""`ttp doctor`: its findings on a misconfigured machine."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor import config
from adaptor.checkpoint.manifest import Manifest
from adaptor.launchers.cli import ttp
from adaptor.launchers.doctor import doctor_job
from adaptor.launchers.doctor.doctor_job import Save, Speed
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.records import ProtectionPlan, Replicas
from tests import certificates


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if "TTP" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TTP_DEVICE", "cpu")
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))


def doctor_findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = ttp.main(["doctor", "--json", *arguments])
    return code, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_a_node_on_which_a_job_can_be_protected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, findings = doctor_findings(
        capsys, "--save", str(tmp_path / "save" / "of" / "job"), "--write-mib", "1"
    )
    assert (code, [finding for finding in findings.values() if finding["level"] == "FAIL"]) == (0, [])
    assert {"software", "kernel", "network", "save", "rename", "lock", "speed"} <= set(findings)
    assert not (tmp_path / "save").exists()
    assert not (tmp_path / "logs").exists()


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert ttp.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "OK   settings     every setting makes sense"
    assert lines[-1].endswith(f"{len(lines) - 1} checks, 0 failed")


@pytest.mark.parametrize(
    ("variable", "value", "name", "message"),
    [
        ("TTP_HANG", "soon", "settings", "TTP_HANG is 'soon'"),
        ("TTP_HNAG", "5", "settings", "TTP_HNAG is set: there is no such setting"),
        ("TTP_DEVICE", "gpu", "device", "TTP_DEVICE is 'gpu'"),
        ("TTP_ENGINE", "foo", "settings", "TTP_ENGINE is 'foo'"),
        ("GLOO_SOCKET_IFNAME", "eth77", "network", "this node has no network interface 'eth77'"),
        ("TTP_LOG_PATH", "/proc/logs", "logs", "/proc/logs cannot be written"),
    ],
)
def test_settings_for_which_a_job_would_be_refused(
    variable: str,
    value: str,
    name: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    code, findings = doctor_findings(capsys)
    assert (code, findings[name]["level"]) == (1, "FAIL")
    assert message in findings[name]["words"]


@pytest.mark.parametrize(("days", "level"), [(100, "OK"), (3, "WARN"), (-1, "FAIL")])
def test_when_a_certificate_ends(
    days: int, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in certificates.Authority(tmp_path / "tls", days=200).settings("n", days).items():
        monkeypatch.setenv(name, path)
    _, findings = doctor_findings(capsys)
    assert findings["certificates"]["level"] == level


def test_a_save_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, findings = doctor_findings(capsys, "--save", str(tmp_path / "file"))
    assert (code, findings["save"]["level"]) == (1, "FAIL")


def test_few_descriptors_are_said(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))

    output = subprocess.run(
        [sys.executable, "-m", "adaptor.launchers.cli.ttp", "doctor"],
        preexec_fn=few,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "WARN descriptors  256 for each process: ulimit -n 4096 (the hard limit is 1024)" in output


@pytest.mark.parametrize("amount", ["0", "-1", "much", str(1 << 21)])
def test_an_amount_that_is_none(amount: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        ttp.main(["doctor", "--write-mib", amount])
    assert exit_info.value.code == 2
    assert "it must be a number of MiB" in capsys.readouterr().err


def compared(rate: float, pause_s: float, save: Save | None, room: int = 1 << 50) -> dict[str, Any]:
    """Return the findings for a save folder; TTP_GRACE is 25 s, TTP_OT 120 s."""
    findings = doctor_job.times(Speed(rate, pause_s), save, room, config.load({}))
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("rate", "level", "remedy"),
    [
        (4e9, "OK", ""),
        (2.1e9, "WARN", "set TTP_GRACE to 30 or more, and what the scheduler gives to more than that"),
        (1e9, "FAIL", "set TTP_GRACE to 63 or more, and what the scheduler gives to more than that"),
        (1e6, "FAIL", "name a --save that is faster: TTP_GRACE is 3600 at most"),
    ],
)
def test_the_time_of_a_save_when_the_job_is_told_to_end(rate: float, level: str, remedy: str) -> None:
    """100 GB from two nodes are 50 GB per node."""
    finding = compared(rate, 0.1, Save(100e9, 2, "by the arguments of the script"))["TTP_GRACE"]
    assert (finding.level, finding.remedy.partition(" (")[0]) == (level, remedy)
    assert "50.0 GB of a save in " in finding.words
    assert "(1 of 2 nodes, by the arguments of the script)" in finding.words


@pytest.mark.parametrize(
    ("pause_s", "level", "remedy"),
    [
        (1.0, "OK", ""),
        (20.0, "WARN", "set TTP_OT to 200 or more"),
        (130.0, "FAIL", "set TTP_OT to 1300 or more"),
        (1000.0, "FAIL", "name a --save on a disk that does not stand still"),
    ],
)
def test_the_time_of_a_save_without_progress(pause_s: float, level: str, remedy: str) -> None:
    """A save longer than TTP_OT is fine while it makes progress."""
    finding = compared(1e8, pause_s, Save(100e9, 1, ""))["TTP_OT"]
    assert (finding.level, finding.remedy.partition(":")[0]) == (level, remedy)
    assert "this node's part of a save takes 17 min" in finding.words


def test_how_much_can_be_written_where_nobody_knows_the_size_of_a_save() -> None:
    findings = compared(1e9, 0.1, None)
    assert findings["TTP_GRACE"].words == "25.0 GB can be written in it (25 s)"
    assert "120.0 GB could be written in them" in findings["TTP_OT"].words
    assert {finding.level for finding in findings.values()} == {"OK"}


def test_a_folder_without_room_for_a_save() -> None:
    finding = compared(1e9, 0.1, Save(2e9, 4, "by the arguments of the script"), room=10**9)["room"]
    assert (finding.level, finding.words) == (
        "FAIL",
        "a save has 2.0 GB (by the arguments of the script), and 1.0 GB are free there",
    )


def test_the_newest_checkpoint_tells_how_large_a_save_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / naming.final_name(40)
    folder.mkdir()
    manifest = Manifest.now(40, [FileEntry("a", 3 * 10**15, None), FileEntry("b", 10**15, None)], {}, 16)
    (folder / naming.MANIFEST).write_bytes(manifest.encode())
    (tmp_path / naming.TRACKER).write_text("40")
    code, findings = doctor_findings(capsys, "--save", str(tmp_path), "--write-mib", "1", "--nnodes", "8")
    assert (code, findings["room"]["level"], findings["TTP_GRACE"]["level"]) == (1, "FAIL", "FAIL")
    assert "500000.0 GB of a save" in findings["TTP_GRACE"]["words"]
    assert "(1 of 8 nodes, as large as that of step 40)" in findings["TTP_GRACE"]["words"]


def replica(kind: str, memory: float, *, chosen: bool = False) -> Replicas:
    return Replicas(kind, chosen, memory, 1e3, memory, 0.0, f"what {kind} does")


def memory_findings(split: float, training: float = 1e6, **settings: str) -> dict[str, Any]:
    """Return the memory findings for a rank that needs `split` bytes more."""
    rows = [replica("split", split, chosen=True), replica("mirror", split / 1e9), replica("none", 0.0)]
    of_job = ProtectionPlan(
        8, 2, 1e6, training, tuple(rows), 1e6, 1e6, makes_copies="TTP_HOST_COPY" in settings
    )
    findings = doctor_job.memory(of_job, config.load({"TTP_DEVICE": "cpu", **settings}))
    return {finding.name: finding for finding in findings}


def test_memory_for_the_replica() -> None:
    finding = memory_findings(2e6)
    assert set(finding) == {"replica"}
    assert (finding["replica"].level, finding["replica"].remedy) == ("OK", "")
    assert "split takes 2.0 MB more on a rank, 3.0 MB with weights" in finding["replica"].words
    assert finding["replica"].words.endswith("of 4 ranks; activations come on top")


def test_too_little_memory_for_the_replica() -> None:
    finding = memory_findings(1e15)["replica"]
    assert (finding.level, finding.remedy) == (
        "FAIL",
        "TTP_REPLICA=mirror takes 1.0 MB more, and survives what mirror does",
    )
    finding = memory_findings(1e15, training=1e15)["replica"]
    assert (finding.level, finding.remedy) == (
        "FAIL",
        "spread the job over more ranks: no kind of replica fits",
    )


def test_the_device_with_the_least_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions are replaced to show two devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at: ((3 - at) * 10**9, 80 * 10**9))
    finding = memory_findings(1e9, training=1.5e9, TTP_DEVICE="")["replica"]
    assert (finding.level, finding.remedy) == (
        "FAIL",
        "TTP_REPLICA=mirror takes 1 bytes more, and survives what mirror does",
    )
    assert finding.words.endswith("2.5 GB with weights, gradients and optimizer; 2.0 GB are free on cuda:1")
    assert memory_findings(1e8, training=1.5e9, TTP_DEVICE="")["replica"].level == "OK"


def test_too_little_memory_for_host_copies() -> None:
    finding = memory_findings(1e15, TTP_HOST_COPY="10")["host copies"]
    assert (finding.level, finding.remedy) == (
        "FAIL",
        "leave TTP_HOST_COPY out, or give the node more memory",
    )
    assert finding.words.startswith("the copies of this node take 8000000.0 GB")
    finding = memory_findings(1e15, TTP_HOST_COPY="auto")["host copies"]
    assert finding.level == "WARN"
    assert finding.words.startswith("the copies of this node would take 8000000.0 GB, and ")
    assert finding.words.endswith(" are free: none are made")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--nnodes", "2", "--", "train.py"), "--nnodes is 2: say --nproc-per-node, too"),
        (("--", "nowhere.py"), "there is no script nowhere.py"),
        (("--nodes", "2"), "--nodes is 2: name the folder in which they meet: --save DIR"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ttp.main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err == f"ttp: error: {line}\n"

"""Contradictory settings are refused in one line, before any training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from adaptor.checkpoint.lease import Lease
from adaptor.checkpoint.lease_content import Owner
from adaptor.protocol import naming
from tests.faults import harness, outcome, warm
from tests.faults.harness import DP2, Job, Layout, job_in
from tests.frameworks import prepare

REFUSED = 2


def _assert_refused(result: harness.Ended, *fragments: str) -> None:
    """Assert that the last line has the fragments and is the only error, and that no step was made."""
    assert result.code == REFUSED
    assert [line for line in result.said if "error" in line] == [result.last_line]
    assert result.last_line.startswith("ttprun: error: ")
    for word in fragments:
        assert word in result.last_line
    assert "Traceback" not in result.log
    assert not any(result.records.values())


@pytest.mark.parametrize(
    ("environment", "options", "line"),
    [
        ({"ENABLE_TTP": "maybe"}, [], "ENABLE_TTP is 'maybe': it must be True, 1, False or 0"),
        ({"TTP_OT": "5"}, [], "TTP_OT is '5': it must be a number of seconds from 10 to 3600"),
        ({}, ["--ttp-ot", "99999"], "TTP_OT is '99999': it must be a number of seconds from 10 to 3600"),
        ({"TTP_PORT": "none"}, [], "TTP_PORT is 'none': it must be a port from 1 to 65535"),
        ({}, ["--ttp-device", "gpu"], "TTP_DEVICE is 'gpu': it must be one of cpu, cuda, npu, or nothing"),
    ],
    ids=["enable", "timeout", "timeout-flag", "port", "device-flag"],
)
def test_a_setting_that_makes_no_sense(
    environment: dict[str, str], options: list[str], line: str, tmp_path: Path
) -> None:
    """Nothing is launched: the line is the only output."""
    result = harness.run(job_in(tmp_path, DP2, options=options, environment=environment), code=REFUSED)
    (last_line,) = result.log.splitlines()
    assert last_line.startswith(f"ttprun: error: {line}")


def test_no_folder_to_save_to(tmp_path: Path) -> None:
    result = harness.run(Job(tmp_path / "job", DP2))
    _assert_refused(result, "--save is missing")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Below a file no folder can be made, whoever asks."""
    (tmp_path / "file").touch()
    result = harness.run(Job(tmp_path / "job", DP2, save=tmp_path / "file" / "save"))
    _assert_refused(result, f"--save is {tmp_path}/file/save: it cannot be written")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout("dp1", 1, replica="split"), "the data-parallel size is 1: there is no second rank"),
        (Layout("dp3", 3, replica="split"), "the data-parallel size is 3, which is odd"),
        (Layout("tp2-dp1", 2, tp=2, replica="mirror"), "the data-parallel size is 1"),
    ],
    ids=["size-1", "size-3", "size-1-of-2"],
)
def test_a_replica_that_the_size_does_not_allow(layout: Layout, message: str, tmp_path: Path) -> None:
    result = harness.run(job_in(tmp_path, layout))
    _assert_refused(result, message, f"TTP_REPLICA is {layout.replica}", "use auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer-cpu-offload"], "--optimizer-cpu-offload is True"),
        (["--num-experts", "4", "--expert-tensor-parallel-size", "1"], "--expert-tensor-parallel-size is 1"),
    ],
    ids=["offload", "experts-without-folders"],
)
def test_a_layout_that_is_not_protected_yet(arguments: list[str], message: str, tmp_path: Path) -> None:
    layout = Layout("refused", 4, tp=2)
    result = harness.run(job_in(tmp_path, layout, arguments=arguments))
    _assert_refused(result, message, "ENABLE_TTP=False")


def test_a_framework_that_does_not_match(tmp_path: Path) -> None:
    tree = tmp_path / "megatron-lm"
    shutil.copytree(
        prepare.megatron_lm(), tree, ignore=shutil.ignore_patterns("__pycache__", "tests", "docs")
    )
    file = tree / "megatron/training/checkpointing.py"
    text = file.read_text()
    old = "def get_checkpoint_name(checkpoints_path, iteration, release=False,"
    assert old in text
    file.write_text(
        text.replace(old, "def get_checkpoint_name(root, checkpoints_path, iteration, release=False,")
    )
    result = harness.run(job_in(tmp_path, DP2, framework=tree))
    _assert_refused(
        result,
        "megatron.training.checkpointing:get_checkpoint_name",
        "expected (checkpoints_path, iteration, release=, ...)",
        "found (root, checkpoints_path, iteration, release=, ",
        "megatron-lm 0.15.0rc5",
    )


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return warm.run(command, env={**os.environ, **environment}, cwd=prepare.megatron_lm(), timeout=200)


def test_enabled_after_the_framework_was_imported() -> None:
    completed = _python(
        "import megatron.core.parallel_state, adaptor; adaptor.enable()", TTP_AGENT="somewhere"
    )
    assert completed.returncode == 1
    line = completed.stderr.rstrip().rpartition("\n")[2]
    assert "adaptor.enable() was called after megatron.core.parallel_state was imported" in line
    assert "call it before" in line


def test_enabled_but_not_started_by_ttprun() -> None:
    completed = _python("import adaptor; adaptor.enable()")
    assert completed.returncode == 1
    line = completed.stderr.rstrip().rpartition("\n")[2]
    assert "start the job with ttprun instead of torchrun, or set ENABLE_TTP=False" in line


def test_off_is_plain_torchrun(tmp_path: Path) -> None:
    """With ENABLE_TTP=False a failure is torch's business, and nothing of the adaptor is in the workers."""
    job = job_in(
        tmp_path,
        DP2,
        environment={"ENABLE_TTP": "False"},
        faults=["rank=1,step=2,phase=backward,kind=os._exit,code=7"],
    )
    result = harness.run(job)
    assert result.code == 1  # torchrun's, whatever the worker's was
    assert list(tmp_path.joinpath("save").glob("*")) == []
    assert result.said == []


@pytest.mark.cold
def test_off_no_worker_imports_the_adaptor(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint('modules:', [n for n in sys.modules if n.startswith(('adaptor', 'wrapt'))])\n"
    )
    job = Job(
        tmp_path / "job",
        Layout("one", 1),
        environment={"ENABLE_TTP": "False"},
        options=["--ttp-device", ""],
        script=script,
    )
    result = harness.run(job, code=0)
    assert "modules: []" in result.log


@pytest.mark.robustness(
    "A1",
    "a job evaluates only (--skip-train), with and without a folder to save to",
    "it ends as under torchrun: nothing is refused, nothing is said of protection, nothing is written",
)
@pytest.mark.parametrize("saves", [True, False])
def test_a_job_that_only_evaluates(saves: bool, tmp_path: Path) -> None:
    save = tmp_path / "save"
    arguments = ["--skip-train", "--eval-iters", "1", "--split", "90,10,0"]
    result = harness.run(
        Job(tmp_path / "job", DP2, save=save if saves else None, arguments=arguments), code=0
    )
    assert "skipping training (--skip-train is on)" in result.log
    assert "validation loss at" in result.log
    assert not any("rotected" in line or "PROTECTED" in line for line in result.said), result.said
    assert not list(save.glob("*")) if saves else not save.exists()


@pytest.mark.robustness(
    "B10",
    "ttprun is started while another job saves in the same folder, and again once that one is killed",
    "refused in one line that names machine, process and start; then it takes over, and leaves no lease",
)
def test_a_second_job_in_the_save_folder(tmp_path: Path) -> None:
    save = tmp_path / "save"
    unfinished = save / naming.temporary_name(3, generation="first")
    unfinished.mkdir(parents=True)
    first = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        Lease(save, Owner.of(first.pid)).take()
        result = harness.run(Job(tmp_path / "second", DP2, save=save))
        _assert_refused(result, f"--save is {save}: the job of process {first.pid} on ", ", started 20")
        assert unfinished.exists(), "the first job is writing there"
    finally:
        first.kill()
        first.communicate()
    faults = ["rank=1,step=5,phase=backward,kind=sigkill"]
    result = harness.run(Job(tmp_path / "third", DP2, save=save, restarts=1, faults=faults), code=0)
    assert "which is gone: this job saves there now" in result.log
    assert outcome.steps_in(save) == [4, 8]
    assert not unfinished.exists()
    assert not (save / naming.LEASE).exists()

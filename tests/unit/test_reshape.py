"""A job with TTP_RESHAPE transforms the checkpoint before the load; no crash loses a checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adaptor import context, output
from adaptor.__main__ import main
from adaptor.checkpoint import disk, left_overs, manifest, tracker
from adaptor.errors import ResumeError, UnsupportedError
from adaptor.frameworks import reshape, reshape_sizes
from adaptor.protocol import naming
from adaptor.transform import run
from adaptor.transform.source import sizes_at
from tests.faults.warm import Warm
from tests.unit import small_checkpoint
from tests.unit.small_checkpoint import STEP, contents, job_arguments
from tests.unit.test_checkpoint_publish import CLOCK, Crash, crash_before

pytestmark = pytest.mark.usefixtures("group_of_one")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("reshape_script.py")
FOLDER, KEPT = naming.final_name(STEP), naming.before_reshape_name(STEP, 1)
FIRST = (0, 0, 0)


@pytest.fixture(autouse=True)
def wanted_setting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TTP_RESHAPE", "auto")
    context.forget()
    return monkeypatch


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with two tensor ranks."""
    root = tmp_path_factory.mktemp("pristine")
    small_checkpoint.write(root / "one")
    sizes = ("--tp", "2", "--workers", "1")
    assert main(["transform", str(root / "one"), str(root / "two"), *sizes]) == 0
    return root / "two"


@pytest.fixture(scope="module")
def expected(pristine: Path) -> dict[str, bytes]:
    """Return the files of the pristine checkpoint for one tensor rank, as the command writes them."""
    transformed = pristine.parent / "made"
    assert (
        main(["transform", str(pristine), str(transformed), "--tp", "1", "--dp", "1", "--workers", "1"]) == 0
    )
    return contents(transformed)


@pytest.fixture
def save(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "save"))


def assert_whole(save: Path, pristine: Path, expected: dict[str, bytes]) -> None:
    """Assert that the checkpoint equals the output of the command, and that its source is kept."""
    assert manifest.defects(save / FOLDER) == []
    assert contents(save) == expected
    assert tracker.tracked_step(save) == STEP
    kept, source = save / KEPT, pristine / FOLDER
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    assert all((kept / file).read_bytes() == (source / file).read_bytes() for file in files)
    assert [name for name in tracker.entry_names(save) if naming.is_reshape(name)] == []


def test_a_checkpoint_of_these_sizes_stays_as_it_is(save: Path) -> None:
    files_before = sorted(save.rglob("*"))
    left_over = save / naming.reshape_name(STEP - 1)
    left_over.mkdir()
    reshape.bring_to_sizes(job_arguments(save, tp=2, dp=4), FIRST)
    assert sorted(save.rglob("*")) == files_before


def test_other_loops_are_refused(wanted_setting: pytest.MonkeyPatch) -> None:
    """ModelLink and a loop of a user load by other functions."""
    with pytest.raises(UnsupportedError, match=r"^TTP_RESHAPE is set: "):
        context.part(reshape_sizes.ReshapeHooks).require_other_loop(2)
    wanted_setting.setenv("TTP_RESHAPE", "no")
    context.forget()
    context.part(reshape_sizes.ReshapeHooks).require_other_loop(2)


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [({"tp": 2}, False), ({"tp": 2, "dp": 4}, False), ({}, True), ({"tp": 2, "pp": 2}, True)],
)
def test_without_the_setting_other_sizes_are_refused(
    sizes: dict[str, int], refused: bool, save: Path, tmp_path: Path
) -> None:
    """The line names sizes that fit; a checkpoint of another job is left to the framework."""
    if refused:
        line = "^step 7 in .*/save has TP2 PP1, and the job has TP.*: give --ttp-reshape auto, .* start with "
        with pytest.raises(ResumeError, match=f"{line}--tensor-model-parallel-size 2 --pipeline-model-"):
            reshape_sizes.require_sizes_of_checkpoint(job_arguments(save, **sizes))
    else:
        reshape_sizes.require_sizes_of_checkpoint(job_arguments(save, **sizes))
    reshape_sizes.require_sizes_of_checkpoint(job_arguments(tmp_path, save, **sizes))


def test_without_the_setting_sharded_optimizer_state_of_other_sizes_is_refused(
    pristine: Path, tmp_path: Path
) -> None:
    """Unless the framework loads the state in any sizes, or would not load the state."""
    save = tmp_path / "save"
    sizes = ("--tp", "2", "--workers", "1")
    assert main(["transform", str(pristine), str(save), *sizes, "--format", "torch_dist"]) == 0
    arguments = job_arguments(save)
    reshape_sizes.require_sizes_of_checkpoint(arguments)
    common = save / FOLDER / "common.pt"
    body = torch.load(common, weights_only=False)
    body["content_metadata"]["distrib_optim_sharding_type"] = "dp_reshardable"
    torch.save(body, common)
    with pytest.raises(ResumeError, match="has TP2 PP1, and the job has TP1 PP1: give --ttp-reshape auto"):
        reshape_sizes.require_sizes_of_checkpoint(arguments)
    reshape_sizes.require_sizes_of_checkpoint(job_arguments(save, tp=2))
    arguments.no_load_optim = True
    reshape_sizes.require_sizes_of_checkpoint(arguments)


def test_there_and_back(
    save: Path, pristine: Path, expected: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    reshape.bring_to_sizes(job_arguments(save), FIRST)
    assert_whole(save, pristine, expected)
    output.finish()
    stdout = capfd.readouterr().out
    assert f"step 7 in {save} has TP2 PP1, and the job has TP1 PP1: it is transformed (TTP_RESHAPE)" in stdout
    assert f"has TP1 PP1 now; what it was made from stays as {KEPT}, until somebody removes it" in stdout


@pytest.mark.integration
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two-renames"])
def test_after_any_crash_the_next_start_goes_on(
    pristine: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    exchanges: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the file system can exchange two names, the final name is always that of a whole checkpoint."""
    exchange = disk.exchange

    def watched(left: Path, right: Path) -> bool:
        CLOCK.tick("renameat2")
        return exchanges and exchange(left, right)

    monkeypatch.setattr(disk, "exchange", watched)
    between = 0
    for call in itertools.count(1):
        root = Path(shutil.copytree(pristine, tmp_path / str(call)))
        try:
            with crash_before(call) as clock:
                reshape.bring_to_sizes(job_arguments(root), FIRST)
            break
        except Crash:
            pass
        between += not (root / FOLDER).exists()
        left_overs.clean(root)  # as every start does
        # Whoever loads now finds one of the two, whole.
        assert manifest.defects(root / FOLDER) == []
        reshape.bring_to_sizes(job_arguments(root), FIRST)
        assert_whole(root, pristine, expected)
        shutil.rmtree(root)
    assert clock.calls.count("renameat2") == 1
    assert between == (0 if exchanges else 1), "moments at which nothing has the name"


def test_a_crash_in_the_middle_of_an_exchange_of_a_step_that_the_user_chose(save: Path) -> None:
    """The tracker names another step, and the next start takes up something else: nothing is lost."""
    reshaped = save / naming.reshape_name(STEP) / FOLDER
    shutil.copytree(save / FOLDER, reshaped)
    source_files = sorted((save / FOLDER).rglob("*"))
    (save / FOLDER / "which").write_text("the one that it was made from")
    (save / naming.TRACKER).write_text(str(STEP + 1))
    renamed = reshaped.with_name(f"{FOLDER}.{reshaped.stat().st_ino}")
    reshaped.rename(renamed)
    if not disk.exchange(renamed, save / FOLDER):
        pytest.skip("this file system does not exchange names")
    left_overs.clean(save)
    assert (save / KEPT / "which").exists()
    assert sorted((save / FOLDER).rglob("*")) == source_files
    assert manifest.defects(save / FOLDER) == manifest.defects(save / KEPT) == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 5}, "TTP_RESHAPE: .* heads"),
        ({"pp": 3}, "TTP_RESHAPE: --pp 3: 4 layers are not divisible by 3"),
    ],
)
def test_sizes_that_do_not_divide(sizes: dict[str, int], message: str, save: Path) -> None:
    with pytest.raises(ResumeError, match=message):
        reshape.bring_to_sizes(job_arguments(save, **sizes), FIRST)
    assert str(sizes_at(save, STEP)) == "TP2 PP1"


def test_a_folder_that_is_only_loaded_from_is_not_touched(pristine: Path, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"only in the --save folder .* transform .*two DST --tp 1 --pp 1`"):
        reshape.bring_to_sizes(job_arguments(tmp_path, pristine), FIRST)
    assert list(tmp_path.iterdir()) == []
    # What is no checkpoint of the framework's is for the framework.
    foreign = tmp_path / "foreign"
    (foreign / FOLDER).mkdir(parents=True)
    tracker.advance(foreign, STEP)
    reshape.bring_to_sizes(job_arguments(tmp_path, foreign), FIRST)


def test_a_disk_that_is_too_small(save: Path, wanted_setting: pytest.MonkeyPatch) -> None:
    wanted_setting.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(ResumeError, match=r"TTP_RESHAPE: .*: 0\.000 GB are free, the transform needs 0\.00"):
        reshape.bring_to_sizes(job_arguments(save), FIRST)
    assert manifest.defects(save / FOLDER) == []


def _ranks(tmp_path: Path, save: Path, size: int, *dies: str) -> list[tuple[int, str]]:
    """Run so many ranks; return how each has ended, and its lines."""
    store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
    started = [
        Warm(
            [sys.executable, str(SCRIPT), str(store), str(rank), str(size), str(save), *dies],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, outputs, strict=True)]


def test_files_of_an_interrupted_start_are_kept(save: Path, pristine: Path, tmp_path: Path) -> None:
    """Rank 2 of 3 is killed; only this rank writes files in the next start."""
    folder = run.temporary_folder(Path(naming.reshape_name(STEP)), STEP)
    (code, _), *_ = reversed(_ranks(tmp_path, save, 3, "2", f"{folder}/mp_rank_00.done.json"))
    assert code == -9
    assert manifest.defects(save / FOLDER) == []
    assert str(sizes_at(save, STEP)) == "TP2 PP1"
    files = [save / folder / "mp_rank_00" / name for name in (naming.MODEL_FILE, naming.OPTIMIZER_FILE)]
    inodes_before = [path.stat().st_ino for path in files]
    left_overs.clean(save)
    assert [code for code, _ in _ranks(tmp_path, save, 3)] == [0, 0, 0]
    assert [(save / FOLDER / "mp_rank_00" / path.name).stat().st_ino for path in files] == inodes_before
    transformed = tmp_path / "made"
    assert main(["transform", str(pristine), str(transformed), "--tp", "3", "--dp", "1"]) == 0
    assert_whole(save, pristine, contents(transformed))


def test_all_ranks_are_refused_alike(save: Path, tmp_path: Path) -> None:
    """Main params differ from the weights: a rank that reads them raises the error, as do all other ranks."""
    for folder in ("mp_rank_00", "mp_rank_01"):
        small_checkpoint.change(save / FOLDER / folder / naming.OPTIMIZER_FILE, _spoil)
    results = _ranks(tmp_path, save, 3)
    refusals = {line for _, text in results for line in text.splitlines() if line.startswith("refused: ")}
    (line,) = refusals
    assert "the main params of the optimizer do not round to the weights" in line
    assert "refused: TTP_RESHAPE: rank " in line
    assert [text.count("refused: ") for _, text in results] == [1, 1, 1]
    assert str(sizes_at(save, STEP)) == "TP2 PP1"


def _spoil(content: dict[int, dict[object, dict[str, object]]]) -> None:
    """Let the main params be others than the weights."""
    ((_, tensors),) = content[0].items()
    tensors["param"].add_(1)  # type: ignore[attr-defined]

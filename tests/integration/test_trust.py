"""Neither an existing checkpoint nor the state of a holder is trusted."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from adaptor.checkpoint import hashing, manifest, tracker
from adaptor.protocol import naming
from tests.faults import flips, harness, hooks, outcome
from tests.faults.harness import DP2, DP4, ITERATIONS, Ended, Job, Layout, job_in
from tests.faults.same import differences
from tests.faults.scenario import Baseline, BaselineOf, assert_last_words, ends
from tests.integration.test_formats import DIST


@pytest.mark.parametrize(
    ("layout", "name"),
    [(DP2, "mp_rank_00/distrib_optim.pt"), (DIST, "__0_0.distcp")],
    ids=["torch", "torch_dist"],
)
def test_a_byte_of_the_last_words_is_changed(
    layout: Layout, name: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    baseline = baseline_of(layout)
    save = tmp_path / "save"
    harness.run(
        Job(
            tmp_path / "first",
            layout,
            save=save,
            save_interval=4,
            faults=["rank=1,step=7,phase=backward,kind=sigkill"],
        ),
        code=137,
    )
    assert_last_words(save, 6, baseline)
    damaged = save / "iter_0000006" / name
    text = bytearray(damaged.read_bytes())
    text[len(text) // 2] ^= 1
    damaged.write_bytes(text)

    result = harness.run(Job(tmp_path / "job", layout, save=save, load=save), code=0)
    (line,) = [line for line in result.said if damaged.name in line]
    assert line == (
        f"[ttp] {damaged}: checksum differs from the manifest, kept in aside_iter_0000006.1;"
        " the newest intact checkpoint is step 4"
    )
    assert (save / naming.aside_name(6, 1) / name).read_bytes() == text
    assert outcome.steps_in(save) == [4, ITERATIONS]
    assert tracker.tracked_step(save) == ITERATIONS
    last = (root / naming.final_name(ITERATIONS) for root in (save, baseline.checkpoints))
    # What a resumed run says of itself in its arguments.
    assert [line for line in differences(*last) if "/args." not in line] == []
    _assert_goes_on_from(4, result, baseline)

    # The tracker of what is loaded names a damaged step, and the user chooses an older one.
    (save / naming.final_name(ITERATIONS) / name).write_bytes(b"damaged")
    job = Job(tmp_path / "back", layout, save=tmp_path / "new", load=save, arguments=["--ckpt-step", "4"])
    result = harness.run(job, code=0)
    _assert_goes_on_from(4, result, baseline)


def _assert_goes_on_from(step: int, result: Ended, baseline: Baseline) -> None:
    """The job has made every later step, as the undisturbed one has, and no other."""
    steps = range(step + 1, ITERATIONS + 1)
    outcome.assert_same_training(result, baseline.records, steps=steps)
    assert {line["iteration"] for lines in result.records.values() for line in lines} == set(steps)


def test_a_copy_that_is_not_finite_is_not_saved(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The device of rank 1 has computed nonsense, which the framework notices; rank 3 has the same shard."""
    job = job_in(tmp_path, DP4, faults=["rank=1,step=6,phase=between,kind=nan"])
    result, _ = ends(job, baseline_of(DP4), code=1, saved={6})
    assert "what rank 1 held of mp_rank_00 was not finite, so another copy is saved" in result.last_line


@pytest.mark.robustness(
    "B9",
    "ttprun in a folder without its tracker, with a stray iter_00000015, a FIFO and a manifest of brackets",
    "Megatron-LM goes on from the newest intact checkpoint, bitwise; lines say why and what was ignored",
)
def test_a_save_folder_that_somebody_has_been_in(tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(DP2)
    save = tmp_path / "save"
    fault = "rank=1,step=7,phase=backward,kind=sigkill"
    harness.run(Job(tmp_path / "first", DP2, save=save, save_interval=4, faults=[fault]), code=137)
    assert_last_words(save, 6, baseline)
    (save / naming.TRACKER).unlink()
    (save / "iter_00000015").mkdir()
    (save / "iter_0000003_tmp_x").write_text("whose is it?")
    os.mkfifo(save / "iter_0000009")
    (save / naming.final_name(7)).mkdir()
    (save / naming.final_name(7) / naming.MANIFEST).write_bytes(b"[" * 100_000)

    result = harness.run(Job(tmp_path / "job", DP2, save=save, load=save), code=0)
    assert "no checkpoint, and ignored: iter_00000015, iter_0000003_tmp_x" in result.log
    (line,) = [line for line in result.said if "missing beside checkpoints" in line]
    assert line.endswith("the newest intact checkpoint is step 6")
    _assert_goes_on_from(6, result, baseline)
    assert tracker.tracked_step(save) == ITERATIONS


@pytest.mark.parametrize("layout", [DP2, DIST], ids=["torch", "torch_dist"])
def test_a_tracker_that_is_ahead_of_the_files_is_not_believed(
    layout: Layout, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Files of the framework, without a manifest: those of step 4 have the name of step 6."""
    baseline, save = baseline_of(layout), tmp_path / "save"
    for step, name in {2: 2, 4: 6}.items():
        shutil.copytree(baseline.checkpoints / naming.final_name(step), save / naming.final_name(name))
    (save / naming.TRACKER).write_text("6")
    result = harness.run(Job(tmp_path / "job", layout, save=save, load=save), code=0)
    (line,) = [line for line in result.said if "have loaded step 4" in line]
    assert line.startswith(f"[ttp] {save / naming.final_name(6)}: ")
    assert line.endswith("kept in aside_iter_0000006.1; the newest intact checkpoint is step 2")
    _assert_goes_on_from(2, result, baseline)


COMPARED = {"TTP_VERIFY_SAVES": "True"}


def test_a_checkpoint_with_a_state_that_differs_from_the_agreement_is_refused(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The bytes match the manifest, but the optimizer state is that of an earlier step."""
    baseline, name = baseline_of(DP2), "mp_rank_00/distrib_optim.pt"
    save = tmp_path / "save"
    fault = "rank=1,step=7,phase=backward,kind=sigkill"
    environment = {**COMPARED, "TTP_DRILL_EVERY": "2"}
    job = Job(tmp_path / "first", DP2, save=save, save_interval=4, faults=[fault], environment=environment)
    harness.run(job, code=137)
    (status,) = (tmp_path / "first").glob("logs/*/status.json")
    drilled = json.loads(status.read_text())
    assert (drilled["drill_step"] in (2, 4, 6), drilled["drill_problem"]) == (True, "")
    assert_last_words(save, 6, baseline)
    earlier, lie = save / naming.final_name(4), save / naming.final_name(6)
    lie_manifest = manifest.read(lie)
    assert lie_manifest.state is not None
    assert [shard.holders for shard in lie_manifest.state.groups["mp_rank_00"].shards] == [(0,)]
    regular = manifest.read(earlier).state
    assert regular is not None
    assert [len(state.groups["mp_rank_00"].random) for state in (lie_manifest.state, regular)] == [1, 1]
    shutil.copy(earlier / name, lie / name)
    files = [hashing.entry_of(lie / file.path, file.path) for file in lie_manifest.files]
    described = manifest.Manifest.now(
        6,
        files,
        lie_manifest.groups,
        lie_manifest.world_size,
        lie_manifest.generation,
        state=lie_manifest.state,
    )
    (lie / naming.MANIFEST).write_bytes(described.encode())
    assert manifest.defects(lie) == []

    result = harness.run(Job(tmp_path / "job", DP2, save=save, load=save), code=0)
    (line,) = [line for line in result.said if "have loaded another state" in line]
    assert line.startswith(f"[ttp] {lie}: the ranks have loaded another state than that on which the holders")
    assert "exp_avg of shard 0 of mp_rank_00 on rank 0" in line
    assert line.endswith("kept in aside_iter_0000006.1; the newest intact checkpoint is step 4")
    _assert_goes_on_from(4, result, baseline)


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [(DP2, []), (DIST, []), (DIST, ["--async-save"])],
    ids=["torch", "torch_dist", "async"],
)
def test_saves_that_lie_are_refused(layout: Layout, arguments: list[str], tmp_path: Path) -> None:
    """Among them writers that keep the first tensors of a buffer (NeMo-RL#3312)."""
    save = tmp_path / "save"
    environment = {**COMPARED, flips.LYING: "1"}
    job = Job(
        tmp_path / "job", layout, save=save, save_interval=1, arguments=arguments, environment=environment
    )
    result = harness.run(job, code=0)
    refused = [line for line in result.said if "could not be saved" in line]
    assert [int(re.findall(r"step (\d+) could not be saved", line)[0]) for line in refused] == [*hooks.LIES]
    assert outcome.steps_in(save) == [1, 7, ITERATIONS]
    for step in (1, 7, ITERATIONS):
        folder = save / naming.final_name(step)
        assert manifest.read(folder).state is not None
        assert manifest.defects(folder) == []

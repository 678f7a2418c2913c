"""A job that saves in `torch_dist` has its last words in `torch_dist`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from adaptor.checkpoint import manifest
from tests.faults import harness, keeping, outcome, scenario
from tests.faults.harness import DP2, ITERATIONS, TP2_DP2, Job, Layout, job_in
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf
from tests.integration.test_online import online, trains_on

OPTIONS_OF_ASYNC_SAVES = re.compile(r"common\.pt/args\./(async_save|ckpt_assume_constant_structure): ")
TORCH_DIST = ("--ckpt-format", "torch_dist")
DIST = replace(DP2, name="dp2-torch-dist", extra=TORCH_DIST)
RESHARDABLE = replace(
    TP2_DP2,
    name="tp2-dp2-torch-dist-mirror",
    extra=(*TORCH_DIST, "--dist-ckpt-optim-fully-reshardable"),
    replica="mirror",
)
# The whole state of the optimizer is one object there, with all tensors in it.
AS_OBJECT = replace(
    DP2,
    name="dp2-torch-dist-object",
    extra=(*TORCH_DIST, "--dist-ckpt-save-pre-mcore-014", "--no-ckpt-fully-parallel-save"),
    replica="mirror",
)
# Experts in one param, which is saved turned round; each rank has a shard that ends within one of them.
GROUPED = replace(
    harness.MOE_DP2,
    name="moe-dp2-grouped",
    extra=(*harness.EXPERTS, *TORCH_DIST, "--moe-grouped-gemm", "--dist-ckpt-optim-fully-reshardable"),
)
WITH_GROUPED_GEMM = {"PYTHONPATH": str(harness.ROOT / "tests/standins/grouped")}
# The same model on two ranks, each with half of the layers and the whole of their tensors.
PIPELINE = Layout("pp2-torch-dist", 2, pp=2, extra=RESHARDABLE.extra, batch=RESHARDABLE.batch)


def test_torch_dist(tmp_path: Path, baseline_of: BaselineOf) -> None:
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DIST,
        save=save,
        save_interval=4,
        restarts=1,
        faults=["rank=1,step=7,phase=backward,kind=sigkill-beside-a-spare"],
    )
    result = scenario.restarts(job, baseline_of(DIST), saved={6})
    assert "import by themselves" not in result.log  # the workers of the restart are forks of the spare
    assert outcome.steps_in(save) == [4, 6, ITERATIONS]
    written = {file.path: file for file in manifest.read(save / "iter_0000006").files}
    assert {*written} == {".metadata", "__0_0.distcp", "common.pt", "metadata.json", "ttp_layout.json.gz"}
    in_place = [path for path, file in written.items() if file.xxh3_128 is None]  # nobody has the whole
    assert in_place == ["__0_0.distcp"]
    regular = manifest.read(save / "iter_0000004").files
    assert [file.path for file in regular if file.xxh3_128 is None] == []
    assert sum(file.path.endswith(".distcp") for file in regular) > 1
    spent = outcome.spent(job.out / "logs")  # the restarted job has loaded what it had saved
    assert min(spent[use] for use in ("data", "save", "other", "startup", "load", "recovery")) > 0


LESS = ("--no-save-optim", "--no-save-rng")


def test_last_words_have_more_than_regular_saves(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Last words equal a save of the framework without these options, and the job continues bitwise."""
    job = job_in(
        tmp_path,
        DIST,
        save_interval=4,
        restarts=1,
        arguments=LESS,
        faults=["rank=1,step=7,phase=backward,kind=sigkill"],
    )
    result = scenario.restarts(job, baseline_of(DIST), saved={6})
    assert result.log.count("[ttp] --no-save-optim: last words have the optimizer's state all the same") == 1


def test_a_restart_from_a_save_without_optimizer(tmp_path: Path) -> None:
    """Nobody is left to save the newest step: the job goes on from the regular save."""
    faults = [f"rank={rank},step=7,phase=backward,kind=sigkill" for rank in (0, 1)]
    job = job_in(tmp_path, DP2, save_interval=4, restarts=1, arguments=LESS, faults=faults)
    result = harness.run(job, code=0)
    line = "[ttp] the save of step 4 was made with --no-save-optim, --no-save-rng: the job goes on from it"
    assert result.log.count(line) == 1
    assert outcome.steps_in(job.save) == [4, ITERATIONS]
    rates = re.findall(r"iteration +(5|6)/.*learning rate: (\S+) ", result.log)
    assert (len(rates), len(set(rates))) == (4, 2), "both times, the scheduler goes on from step 4"


def test_saves_after_an_online_recovery(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A new process makes its first save where the others have made some: all communicate alike."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill"]
    trains_on(online(tmp_path, DIST, faults, save_interval=2), baseline_of(DIST))


def test_a_pending_asynchronous_save_is_abandoned_in_an_online_recovery(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The survivor's writer of step 3 never ends. The saves of steps 6 and 8 need the new process, too."""
    save, baseline = tmp_path / "save", baseline_of(DIST)
    faults = [
        "rank=0,step=3,phase=save-background,kind=deadlock",
        "rank=1,step=5,phase=backward,kind=sigkill",
    ]
    arguments = ("--async-save", "--ckpt-assume-constant-structure")
    result = harness.run(online(tmp_path, DIST, faults, save_interval=3, arguments=arguments), code=0)
    assert "the regular save of step 3 was incomplete when the incident began" in result.log
    assert "1 incident (1 without a restart), 0 steps lost" in result.log
    assert outcome.steps_in(save) == [4, 6, ITERATIONS]
    for step in (4, 6, ITERATIONS):
        name = f"iter_{step:07d}"
        assert manifest.defects(save / name) == []
        unlike = differences(save / name, baseline.checkpoints / name)
        assert [line for line in unlike if not OPTIONS_OF_ASYNC_SAVES.search(line)] == []
    outcome.assert_saved(save, ITERATIONS)
    outcome.assert_same_training(result, baseline.records, steps=set(range(1, ITERATIONS + 1)) - {4})


def test_another_layout(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The survivors' checkpoint trains on in another layout, as does the framework's own checkpoint."""
    baseline = baseline_of(RESHARDABLE)
    job = job_in(tmp_path, RESHARDABLE, faults=["rank=0,step=7,phase=backward,kind=sigkill"])
    scenario.survives(job, baseline, code=137, saved={6})
    files = manifest.read(job.save / "iter_0000006").files
    assert {file.path for file in files if file.xxh3_128 is None} == {"__0_0.distcp", "__1_0.distcp"}
    from_last_words, from_framework = (
        harness.run(
            Job(tmp_path / name, PIPELINE, launcher="torchrun", load=load, arguments=["--ckpt-step", "6"])
        )
        for name, load in (("ours", job.save), ("theirs", baseline.checkpoints))
    )
    assert (from_last_words.code, from_framework.code) == (0, 0), (
        from_last_words.log[-3000:] + from_framework.log[-3000:]
    )
    outcome.assert_same_training(from_last_words, from_framework.records, steps=(7, 8))


def _in_place(save: Path) -> set[str]:
    """The files of the last words that no rank has written as a whole."""
    return {file.path for file in manifest.read(save / "iter_0000006").files if file.xxh3_128 is None}


def test_a_whole_state_in_one_object(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = job_in(tmp_path, AS_OBJECT, faults=["rank=0,step=7,phase=backward,kind=sigkill"])
    scenario.survives(job, baseline_of(AS_OBJECT), code=137, saved={6})
    assert _in_place(tmp_path / "save") == {"__0_0.distcp"}


def test_weights_that_are_saved_turned_round(tmp_path: Path) -> None:
    baseline_of = scenario.baselines(keeping.KEPT, environment=WITH_GROUPED_GEMM)
    job = job_in(
        tmp_path, GROUPED, environment=WITH_GROUPED_GEMM, faults=["rank=0,step=7,phase=backward,kind=sigkill"]
    )
    baseline = baseline_of(GROUPED)
    scenario.survives(job, baseline, code=137, saved={6})
    assert _in_place(tmp_path / "save") == {"__0_0.distcp"}
    resumed = Job(
        tmp_path / "resumed",
        GROUPED,
        launcher="torchrun",
        load=tmp_path / "save",
        environment=WITH_GROUPED_GEMM,
    )
    outcome.assert_same_training(harness.run(resumed), baseline.records, steps=(7, 8))


@pytest.mark.parametrize("arguments", [[], ["--use-persistent-ckpt-worker"]], ids=["", "persistent-writer"])
def test_an_asynchronous_save(arguments: list[str], tmp_path: Path, baseline_of: BaselineOf) -> None:
    """At the death other processes may still write: that save is complete under its name, or missing.

    A persistent writer has named semaphores, which the killed rank must not leave behind.
    """
    baseline = baseline_of(DIST)
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DIST,
        save=save,
        save_interval=3,
        restarts=1,
        arguments=["--async-save", *arguments],
        faults=["rank=1,step=7,phase=backward,kind=sigkill"],
    )
    result = harness.run(job, code=0)
    steps = outcome.steps_in(save)
    assert {6, ITERATIONS} <= set(steps) <= {3, 6, ITERATIONS}, "nobody waits for the save of step 3"
    assert [manifest.defects(save / f"iter_{step:07d}") for step in steps] == [[]] * len(steps)
    outcome.assert_saved(save, ITERATIONS)
    outcome.assert_same_training(result, baseline.records)


def test_the_framework_removes_a_checkpoint_when_an_asynchronous_save_has_its_name(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DIST,
        save=save,
        save_interval=3,
        arguments=["--async-save", "--save-retain-interval", "6"],
    )
    result = harness.run(job, code=0)
    assert outcome.steps_in(save) == [6, ITERATIONS], "that of step 3 is removed"
    assert manifest.defects(save / "iter_0000006") == []
    outcome.assert_saved(save, ITERATIONS)
    outcome.assert_same_training(result, baseline_of(DIST).records)

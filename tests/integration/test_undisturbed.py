"""Without a fault in its training the adaptor changes nothing, and neither does a fault behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, ITERATIONS, TP2_DP2, Job, Layout
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf
from tests.frameworks import prepare

# A trace of two steps, and what all modules compute in two others.
RECORDED = ("--ttp-profile", "steps=2-3,ranks=1", "--ttp-dump", '{"steps": "3,5", "ranks": [0, 3]}')


@pytest.mark.parametrize(
    ("layout", "options"),
    [pytest.param(DP2, (), marks=pytest.mark.cold), (TP2_DP2, RECORDED)],
    ids=["dp2", "tp2-dp2-recorded"],
)
def test_no_fault(layout: Layout, options: tuple[str, ...], tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(layout)
    save = tmp_path / "save"
    ended = harness.run(Job(tmp_path / "job", layout, save=save, save_interval=4, options=options))
    assert ended.code == 0, ended.log[-3000:]
    recorded = [line for line in ended.said if "TTP_PROFILE" in line or "TTP_DUMP" in line]
    assert len(recorded) == (3 if options else 0), recorded
    assert {path.name for path in (tmp_path / "job/logs").glob("record-*/*")} == (
        {"profile-rank1-steps2-3", "dump-rank0.jsonl", "dump-rank3.jsonl"} if options else set()
    )
    protected, replicas = sorted(set(ended.said) - set(recorded))
    assert replicas.startswith("[ttp] second copies of optimizer shards by split, 2 instances: ")
    assert protected == "[ttp] protected from step 1 (split; any 1 rank)"
    outcome.assert_same_training(ended, baseline.records)
    outcome.assert_saved(save, ITERATIONS)
    assert outcome.steps_in(save) == [4, ITERATIONS]
    for step in (4, ITERATIONS):
        name = f"iter_{step:07d}"
        assert differences(save / name, baseline.checkpoints / name) == []


def test_a_death_behind_the_training_starts_nothing_again(tmp_path: Path) -> None:
    job = Job(
        tmp_path / "job",
        DP2,
        save=tmp_path / "save",
        save_interval=4,
        restarts=1,
        faults=["rank=1,phase=finished,kind=sigsegv"],
    )
    ended = harness.run(job)
    assert ended.code == 0, ended.log[-3000:]
    outcome.assert_saved(tmp_path / "save", ITERATIONS)
    assert ended.said[-2] == "[ttp] rank 1 was ended by SIGSEGV; nothing to save: the training was over"
    assert ended.last_line.split("; ")[0].endswith(" 1 incident, 0 steps lost"), ended.last_line


class OwnLoop:
    """A `Program` of the harness: a framework with a training loop of its own, and Megatron-LM's parser."""

    environment: dict[str, str] = {}  # noqa: RUF012

    def __call__(self, job: Job) -> list[str]:
        script = prepare.megatron_lm() / "pretrain_gpt.py"
        return [str(harness.ROOT / "tests/frameworks/own_loop.py"), str(script), *harness.training(job)]


@pytest.mark.robustness(
    "A1",
    "a framework with a training loop of its own uses Megatron-LM's parser, and no plug-in is installed",
    "it trains and saves bitwise as under torchrun, with one optimizer instance; one line says so",
)
def test_a_job_that_is_not_protected_is_that_of_torchrun(tmp_path: Path) -> None:
    ended, theirs = (
        harness.run(
            Job(
                tmp_path / launcher,
                layout,
                launcher=launcher,
                save=tmp_path / launcher / "save",
                save_interval=4,
                program=OwnLoop(),
            )
        )
        for launcher, layout in (("ttprun", DP2), ("torchrun", replace(DP2, replica="none")))
    )
    assert (ended.code, theirs.code) == (0, 0), ended.log[-3000:]
    (line,) = [line for line in ended.said if "[ttp]" in line]
    assert line.startswith(
        "[ttp] NOT PROTECTED: FusedAdam makes updates outside of the training loop of Mega"
    )
    outcome.assert_same_training(ended, theirs.records)
    for name in ("iter_0000004", f"iter_{ITERATIONS:07d}"):
        ours, other = (tmp_path / launcher / "save" / name for launcher in ("ttprun", "torchrun"))
        assert {path.name for path in ours.iterdir()} == {path.name for path in other.iterdir()}
        assert differences(ours, other) == []

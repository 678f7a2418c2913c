"""What every fault that can be survived has to leave: the last words, and a way to go on from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import harness, keeping, outcome
from tests.faults.harness import ITERATIONS, Ended, Job, Layout, Program
from tests.faults.same import differences
from tests.frameworks import prepare, record


@dataclass(frozen=True)
class Baseline:
    """A run of the unmodified framework that never failed: its records, and a checkpoint of each step."""

    records: dict[int, list[dict[str, Any]]]
    checkpoints: Path


BaselineOf = Callable[[Layout], Baseline]


def baselines(
    root: Path,
    framework: Path | None = None,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    *,
    of_a_user: bool = False,
    program: Program | None = None,
) -> BaselineOf:
    """Train a layout when it is first asked for, and keep the run below `root`.

    Args:
        root: for all baselines; several processes, and later runs, may use it (`keeping`).
        framework: the tree of Megatron-LM; None: the one that the tests train.
        device: of the jobs.
        environment: of the jobs, besides what every job has.
        program: that trains in the place of Megatron-LM's own script.
        of_a_user: whether the jobs have the environment of a user's (`Job.of_a_user`).
    """
    tree = framework or prepare.megatron_lm()

    def baseline(layout: Layout) -> Baseline:
        def train(out: Path) -> None:
            job = Job(
                out,
                layout,
                launcher="torchrun",
                save=out / "checkpoints",
                save_interval=1,
                framework=framework,
                device=device,
                environment=dict(environment or {}),
                of_a_user=of_a_user,
                program=program,
            )
            ended = harness.run(job)
            assert ended.code == 0, ended.log[-3000:]

        key = keeping.key(
            tree, layout, device, sorted((environment or {}).items()), of_a_user, type(program).__name__
        )
        out = keeping.once(root / f"{layout.name}-{key[:16]}", train)
        return Baseline(record.read(out / "record"), out / "checkpoints")

    return baseline


def ends(job: Job, baseline: Baseline, *, code: int, saved: Collection[int]) -> tuple[Ended, int]:
    """The job ends with `code` and the last words of one of the steps `saved`; returns it and the step.

    Up to its end it has trained as the baseline has, and its checkpoint is what the framework saved there.
    """
    assert job.save is not None
    before = outcome.steps_in(job.save) if job.save.exists() else []
    ended = harness.run(job)
    assert set(ended.codes) == {code}, ended.log[-3000:]
    (step,) = set(outcome.steps_in(job.save)) - set(before) - _regular(job)
    assert step in saved
    assert_last_words(job.save, step, baseline)
    outcome.assert_same_training(ended, baseline.records, steps=range(1, step))
    return ended, step


def assert_last_words(save: Path, step: int, baseline: Baseline) -> None:
    """The newest checkpoint is the one that the framework itself saved at this step."""
    outcome.assert_saved(save, step)
    assert_as_saved(save, (step,), baseline)


def assert_as_saved(save: Path, steps: Collection[int], baseline: Baseline) -> None:
    """The checkpoints of these steps are those that the framework itself saved.

    The steps are from before the first restart: later arguments name the loaded iteration.
    """
    for step in steps:
        name = f"iter_{step:07d}"
        assert differences(save / name, baseline.checkpoints / name) == []


def first_of_each(layouts: Sequence[Layout]) -> list[bool]:
    """Return for each layout whether it is the first of its state: what `survives` takes for `resumed`."""
    states = [layout.state for layout in layouts]
    return [state not in states[:number] for number, state in enumerate(states)]


def goes_on(job: Job, baseline: Baseline, step: int) -> None:
    """The unmodified framework resumes from what `job` has left and trains as if nothing had happened."""
    # Of the environment on a CPU only where packages are, and what torch reads: the rest is for the adaptor.
    environment = {
        name: value
        for name, value in job.environment.items()
        if job.device != "cpu" or name == "PYTHONPATH" or name.startswith("TORCH_")
    }
    resumed = harness.run(
        Job(
            job.out / "resumed",
            job.layout,
            launcher="torchrun",
            load=job.save,
            framework=job.framework,
            device=job.device,
            environment=environment,
            program=job.program,
        )
    )
    assert resumed.code == 0, resumed.log[-3000:]
    assert {line["iteration"] for lines in resumed.records.values() for line in lines} == set(
        range(step + 1, ITERATIONS + 1)
    )
    outcome.assert_same_training(resumed, baseline.records, steps=range(step + 1, ITERATIONS + 1))


def survives(
    job: Job, baseline: Baseline, *, code: int, saved: Collection[int], resumed: bool = False
) -> Ended:
    """The job ends with its last words, and says that nothing is lost.

    The last words are bit for bit the files that the framework saved at that step, so what resumes from one
    resumes from the other: a second job would show nothing new but once for each kind of state, whatever
    the layout. The matrix (`tests/integration/matrix.py`) resumes in each of its cells.

    Args:
        job: what is run.
        baseline: of its layout.
        code: with which the job must end.
        saved: the steps that it may save.
        resumed: whether the unmodified framework must also train on from the last words.
    """
    ended, step = ends(job, baseline, code=code, saved=saved)
    assert ended.last_line.startswith("[ttp] "), ended.last_line
    assert f"step {step} is saved, no finished step is lost" in ended.last_line
    if resumed:
        goes_on(job, baseline, step)
    return ended


def restarts(job: Job, baseline: Baseline, *, saved: Collection[int]) -> Ended:
    """The job saves its last words, starts again by itself and trains to the end as the baseline has."""
    assert job.save is not None
    assert job.restarts > 0
    ended = harness.run(job)
    assert set(ended.codes) == {0}, ended.log[-3000:]
    (step,) = set(outcome.steps_in(job.save)) - _regular(job) - {ITERATIONS}
    assert step in saved
    outcome.assert_saved(job.save, ITERATIONS)
    assert_as_saved(job.save, (step,), baseline)
    outcome.assert_same_training(ended, baseline.records)
    again = {line["iteration"] for lines in ended.records.values() for line in lines if line["restart"] == 1}
    assert again == set(range(step + 1, ITERATIONS + 1))
    return ended


def _regular(job: Job) -> set[int]:
    return {*range(job.save_interval, ITERATIONS, job.save_interval), *job.layout.saves}

"""The outcomes that every survivable fault must have: correct last words, and correct training after a
resume.
"""

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
    """An undisturbed run of the unmodified framework: its records, and a checkpoint of each step."""

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
    """Return a function that trains the baseline of a layout at its first call, and keeps the run.

    Args:
        root: the folder of all baselines; shared by processes and by later runs (`keeping`).
        framework: the source tree of Megatron-LM; None: the tests' own.
        device: of the jobs.
        environment: of the jobs, in addition to that of every job.
        program: a training script in place of Megatron-LM's.
        of_a_user: whether the jobs have the environment of a user's job (`Job.of_a_user`).
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
            harness.run(job, code=0)

        key = keeping.key(
            tree, layout, device, sorted((environment or {}).items()), of_a_user, type(program).__name__
        )
        out = keeping.once(root / f"{layout.name}-{key[:16]}", train)
        return Baseline(record.read(out / "record"), out / "checkpoints")

    return baseline


def ends(job: Job, baseline: Baseline, *, code: int, saved: Collection[int]) -> tuple[Ended, int]:
    """Assert that the job ends with `code` and with correct last words of one of the steps `saved`.

    Earlier steps must be trained as in the baseline, and the checkpoint must equal the baseline's.

    Returns:
        The job, and the step of its last words.
    """
    assert job.save is not None
    steps_before = outcome.steps_in(job.save) if job.save.exists() else []
    result = harness.run(job, code=code)
    (step,) = set(outcome.steps_in(job.save)) - set(steps_before) - _regular(job)
    assert step in saved
    assert_last_words(job.save, step, baseline)
    outcome.assert_same_training(result, baseline.records, steps=range(1, step))
    return result, step


def assert_last_words(save: Path, step: int, baseline: Baseline) -> None:
    """Assert that the newest checkpoint equals the baseline's checkpoint of `step`."""
    outcome.assert_saved(save, step)
    assert_as_saved(save, (step,), baseline)


def assert_as_saved(save: Path, steps: Collection[int], baseline: Baseline) -> None:
    """Assert that the checkpoints of `steps` equal the baseline's.

    The steps must be from before the first restart: later arguments name the loaded iteration.
    """
    for step in steps:
        name = f"iter_{step:07d}"
        assert differences(save / name, baseline.checkpoints / name) == []


def first_of_each(layouts: Sequence[Layout]) -> list[bool]:
    """Return whether each layout is the first with its `state`: the value for `resumed` of `survives`."""
    states = [layout.state for layout in layouts]
    return [state not in states[:number] for number, state in enumerate(states)]


def goes_on(job: Job, baseline: Baseline, step: int) -> None:
    """Assert that the unmodified framework resumes from the job's last words and trains as the baseline."""
    # On a CPU keep only the paths of packages and torch's variables: the rest is for the adaptor.
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
        ),
        code=0,
    )
    assert {line["iteration"] for lines in resumed.records.values() for line in lines} == set(
        range(step + 1, ITERATIONS + 1)
    )
    outcome.assert_same_training(resumed, baseline.records, steps=range(step + 1, ITERATIONS + 1))


def survives(
    job: Job, baseline: Baseline, *, code: int, saved: Collection[int], resumed: bool = False
) -> Ended:
    """Assert that the job ends with correct last words, and that the last line reports no lost step.

    Last words equal the framework's own files of that step bit for bit. Both therefore resume alike, and one
    resumed job for each kind of state is enough. The matrix (`tests/integration/matrix.py`) resumes in each
    cell.

    Args:
        job: the job to run.
        baseline: the baseline of its layout.
        code: the expected exit code.
        saved: the possible steps of last words.
        resumed: whether the unmodified framework must also resume from the last words.
    """
    result, step = ends(job, baseline, code=code, saved=saved)
    assert result.last_line.startswith("[ttp] "), result.last_line
    assert f"step {step} is saved, no finished step is lost" in result.last_line
    if resumed:
        goes_on(job, baseline, step)
    return result


def restarts(job: Job, baseline: Baseline, *, saved: Collection[int]) -> Ended:
    """Assert that the job saves last words, restarts by itself and trains to the end as the baseline."""
    assert job.save is not None
    assert job.restarts > 0
    result = harness.run(job, code=0)
    (step,) = set(outcome.steps_in(job.save)) - _regular(job) - {ITERATIONS}
    assert step in saved
    outcome.assert_saved(job.save, ITERATIONS)
    assert_as_saved(job.save, (step,), baseline)
    outcome.assert_same_training(result, baseline.records)
    trained_after = {
        line["iteration"] for lines in result.records.values() for line in lines if line["restart"] == 1
    }
    assert trained_after == set(range(step + 1, ITERATIONS + 1))
    return result


def _regular(job: Job) -> set[int]:
    return {*range(job.save_interval, ITERATIONS, job.save_interval), *job.layout.saves}

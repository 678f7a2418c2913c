"""Megatron-core as a library, with a training loop of its own that `adaptor.protect` is told of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import outcome
from tests.faults.harness import ITERATIONS, Ended
from tests.faults.library import train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Without the adaptor."""
    ended = train(tmp_path_factory.mktemp("library") / "run", launcher="torchrun")
    assert ended.code == 0, ended.log[-3000:]
    return ended


@pytest.mark.parametrize(
    ("engine", "fault", "code", "step"),
    [
        ("builtin", "rank=0,step=6,phase=backward,kind=sigkill", 137, 5),
        ("builtin", "rank=3,step=6,phase=update,kind=sigkill", 137, 6),
        ("builtin", "rank=1,step=6,phase=reduction,kind=exception", 1, 5),
        ("mindio", "rank=1,step=6,phase=reduction,kind=exception", 1, 5),
    ],
    ids=["rank0-backward", "rank3-update", "rank1-exception", "mindio-rank1-exception"],
)
def test_a_fault(engine: str, fault: str, code: int, step: int, tmp_path: Path, undisturbed: Ended) -> None:
    save = tmp_path / "save"
    ended = train(tmp_path / "job", "--save", str(save), faults=[fault], engine=engine)
    assert ended.code == code, ended.log[-3000:]
    outcome.assert_saved(save, step)
    outcome.assert_same_training(ended, undisturbed.records, steps=range(1, step))
    resumed = train(tmp_path / "resumed", "--save", str(save), launcher="torchrun")
    assert resumed.code == 0, resumed.log[-3000:]
    outcome.assert_same_training(resumed, undisturbed.records, steps=range(step + 1, ITERATIONS + 1))


@pytest.mark.parametrize("engine", ["builtin", "mindio"])
def test_a_killed_rank_and_the_job_goes_on_by_itself(engine: str, tmp_path: Path, undisturbed: Ended) -> None:
    save = tmp_path / "save"
    fault = "rank=2,step=6,phase=backward,kind=sigkill"
    ended = train(tmp_path / "job", "--save", str(save), restarts=1, faults=[fault], engine=engine)
    assert ended.code == 0, ended.log[-3000:]
    outcome.assert_saved(save, 5)
    outcome.assert_same_training(ended, undisturbed.records)


def test_shared_sequences_and_a_frozen_part(tmp_path: Path) -> None:
    """Context parallelism: ranks that share a sequence share the optimizer state, like data-parallel ones."""
    layout = ("--context", "2", "--freeze")
    undisturbed = train(tmp_path / "undisturbed", *layout, launcher="torchrun")
    assert undisturbed.code == 0, undisturbed.log[-3000:]
    save = tmp_path / "save"
    fault = "rank=1,step=6,phase=update,kind=sigkill"
    ended = train(tmp_path / "job", *layout, "--save", str(save), faults=[fault])
    assert ended.code == 137, ended.log[-3000:]
    outcome.assert_saved(save, 6)
    outcome.assert_same_training(ended, undisturbed.records, steps=range(1, 6))
    resumed = train(tmp_path / "resumed", *layout, "--save", str(save), launcher="torchrun")
    assert resumed.code == 0, resumed.log[-3000:]
    outcome.assert_same_training(resumed, undisturbed.records, steps=range(7, ITERATIONS + 1))

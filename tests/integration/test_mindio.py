"""Scripts adapted to MindIO TTP by hand, on the builtin engine: the engine chooses the step, their handlers
save.

`test_the_interface` also checks the SDK, if installed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.faults import harness, sdk
from tests.faults.harness import Ended, Job, Layout
from tests.frameworks import sharded_adam

SCRIPT = harness.ROOT / "tests/frameworks/train_mindio.py"
FOUR = Layout("mindio", 4)


def train(
    out: Path, *arguments: str, restarts: int = 0, engine: str = "builtin", **environment: str
) -> tuple[Ended, Path, list[str]]:
    """Run a job; return its result, the folder of checkpoints, and the calls of handlers.

    With the engine `mindio` the script imports the installed SDK; without an SDK the test is skipped.
    """
    save = out.with_name(f"{out.name}-save")
    save.mkdir()
    paths, options = [str(harness.ROOT)], ["--ttp-provide-mindio", "1"]
    if engine == "mindio":
        paths += [*sdk.require(), os.environ.get("PYTHONPATH", "")]
        options = ["--ttp-engine", engine]
    result = harness.run(
        Job(
            out,
            FOUR,
            restarts=restarts,
            script=SCRIPT,
            options=options,
            arguments=["--save", str(save), *arguments],
            environment={"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
            cold=engine == "mindio" or harness.COLD in os.environ,
        )
    )
    calls = save / "calls"
    return result, save, calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture(scope="module")
def weights() -> dict[int, torch.Tensor]:
    """After each step of a run that never failed."""
    return sharded_adam.reference()


def assert_saved(save: Path, step: int, weights: dict[int, torch.Tensor]) -> None:
    """The script's own checkpoint of `step` is the newest, complete, and nothing is half written."""
    assert (save / "latest.txt").read_text() == str(step)
    assert not list(save.glob("*_tmp*"))
    saved = torch.load(save / f"iter_{step:07d}" / "state.pt")
    assert saved["step"] == step
    assert torch.equal(saved["weights"], weights[step])


def test_the_older_form_and_the_job_goes_on_by_itself(
    tmp_path: Path, weights: dict[int, torch.Tensor]
) -> None:
    """Rank 1 lacks the update of the others; its arguments belong to the step before."""
    faults = ("--fault", "3:5:ended:sigkill", "--fault", "1:5:barrier:break")
    result, save, calls = train(tmp_path / "job", "--form", "older", *faults, restarts=1)
    assert result.code == 0, result.log[-3000:]
    assert "[ttp] rank 3 was ended by SIGKILL; step 5 is saved, no finished step is lost" in result.log
    assert sorted(calls[:2]) == ["save 0 5 5 0 [0, 1]", "save 1 5 5 0 [0, 1]"]
    assert calls[2:] == ["rename 0 5"]
    assert_saved(save, 5, weights)
    assert torch.equal(torch.load(save / "final.pt"), weights[8])


@pytest.mark.parametrize("engine", ["builtin", "mindio"])
@pytest.mark.parametrize(("kind", "code"), [("exception", 1), ("sigkill", 137)])
def test_the_interface(
    engine: str, kind: str, code: int, tmp_path: Path, weights: dict[int, torch.Tensor]
) -> None:
    """The newer form on each engine: the ranks that must save, and a single rename after the saves."""
    fault = ("--fault", f"3:5:backward:{kind}")
    result, save, calls = train(tmp_path / "job", "--form", "newer", "--blocks", *fault, engine=engine)
    assert result.code == code, result.log[-3000:]
    assert_saved(save, 4, weights)
    assert sorted(calls[:2]) == [f"save {rank} 4 0 [0, 1] ctx" for rank in (0, 1)]
    assert calls[2] in ("rename 0 4", "rename 1 4")
    assert {call.partition(" ")[0] for call in calls[3:]} <= {"exit"}


def test_the_newer_form_goes_back_to_the_local_copy(tmp_path: Path, weights: dict[int, torch.Tensor]) -> None:
    """Rank 1 has the only copy of its shard left, and has not come to the update of step 5."""
    faults = ("--fault", "3:5:window:sigkill", "--fault", "1:5:reduced:stall", "--local-copy")
    result, save, calls = train(tmp_path / "job", "--form", "newer", *faults)
    assert result.code == 137, result.log[-3000:]
    assert result.last_line in {
        f"[ttp] rank 3 was ended by SIGKILL; step 4 is saved, {loss}"
        # Ranks 0 and 2 may have made the update of step 5 by then, or not.
        for loss in ("step 5 was not finished on every rank", "no finished step is lost")
    }
    assert_saved(save, 4, weights)
    assert sorted(calls[:2]) == ["save 0 4 0 [0, 1] ctx", "save 1 4 0 [0, 1] ctx"]
    assert calls[2] == "rename 0 4"
    assert sorted(calls[3:]) == ["exit 0 bye", "exit 1 bye", "exit 2 bye"]


def test_a_holder_dies_in_its_handler(tmp_path: Path, weights: dict[int, torch.Tensor]) -> None:
    """The handler of the other holder is called again, with the replacement; its device is reset each
    time.
    """
    faults = ("--fault", "3:5:backward:exception", "--fault", "0:4:save:sigkill")
    result, save, calls = train(tmp_path / "job", "--form", "newer", *faults, TTP_STOP_CLEAN_BEFORE_DUMP="1")
    assert result.code == 137, result.log[-3000:]
    assert result.last_line.endswith("; step 4 is saved, no finished step is lost")
    assert_saved(save, 4, weights)
    of_rank_1 = [line for line in calls if line.split()[1] == "1"]
    assert of_rank_1 == [
        *("stop 1", "clean 1 False", "save 1 4 0 [0, 1] ctx"),
        *("stop 1", "clean 1 False", "save 1 4 0 [2, 1] ctx"),
        *("rename 1 4", "exit 1 bye"),
    ]
    assert [line for line in calls if line.startswith("rename")] == ["rename 1 4"]


@pytest.mark.parametrize(
    ("layout", "odd"), [(FOUR, ()), (Layout("mindio-odd", 3), ("--odd", "--global-batch-size", "6"))]
)
def test_the_optimizers_that_the_guide_imports(layout: Layout, odd: tuple[str, ...], tmp_path: Path) -> None:
    """On a framework of ModelLink's shape: shards and copies give the files of the framework's own save."""
    small = harness.ROOT / "tests/frameworks/small"
    save, last_words = tmp_path / "save", tmp_path / "words"
    last_words.mkdir()
    os.mkfifo(f"{last_words}.made")
    result = harness.run(
        Job(
            tmp_path / "job",
            layout,
            script=small / "pretrain_adapted.py",
            options=["--ttp-provide-mindio", "1"],
            arguments=[
                *("--save", str(save), "--save-interval", "1", "--use-distributed-optimizer"),
                *("--words", str(last_words), "--die", "5", "--local-copy-os", *odd),
            ],
            environment={"PYTHONPATH": f"{small}:{harness.ROOT}"},
        ),
        code=137,
    )
    assert result.last_line.endswith("; step 4 is saved, step 5 was not finished on every rank")
    (last,) = last_words.iterdir()
    own_save = save / last.name / "mp_rank_00"
    assert last.name == "iter_0000004"
    joined, expected = (
        torch.load(folder / "distrib_optim.pt")[0][torch.float] for folder in (last, own_save)
    )
    assert list(joined) == list(expected) == ["param", "exp_avg", "exp_avg_sq"]
    assert all(torch.equal(joined[name], expected[name]) for name in expected)
    joined, expected = (
        torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]["language_model"]
        for folder in (last, own_save)
    )
    assert joined.keys() == expected.keys()
    for part, weights in expected.items():
        assert joined[part].keys() == weights.keys()
        assert all(torch.equal(joined[part][name], weights[name]) for name in weights)


def test_the_optimizers_and_the_patches_refuse_the_same_options(tmp_path: Path) -> None:
    """A script edited by hand has parsed its arguments without the adaptor."""
    small = harness.ROOT / "tests/frameworks/small"
    result = harness.run(
        Job(
            tmp_path / "job",
            Layout("mindio-fold", 2),
            script=small / "pretrain_adapted.py",
            options=["--ttp-provide-mindio", "1"],
            arguments=[
                *("--save", str(tmp_path / "save"), "--use-distributed-optimizer", "--foldx-mode", "fifo"),
                *("--words", str(tmp_path / "words"), "--die", "5", "--odd"),
            ],
            environment={"PYTHONPATH": f"{small}:{harness.ROOT}"},
        )
    )
    assert result.code != 0
    assert "--foldx-mode is fifo: a folded pipeline" in result.last_line

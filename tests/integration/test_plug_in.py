"""A framework, a device and a checkpoint format that only a plug-in knows: a rank is killed, and the job goes
on bitwise."""

from __future__ import annotations

from pathlib import Path

from tests.faults import harness, library, outcome
from tests.packaging.test_plug_in import SOURCE, install


def test_a_killed_rank_in_a_framework_of_ones_own(tmp_path: Path) -> None:
    site = install(SOURCE, tmp_path / "site")
    script = harness.ROOT / "tests/frameworks/train_lab.py"

    def train(
        name: str,
        launcher: str,
        restarts: int = 0,
        faults: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> harness.Ended:
        save = ("--save", str(tmp_path / name / "save"))
        return library.train(
            tmp_path / name / "job",
            *save,
            launcher=launcher,
            layout=harness.DP2,
            restarts=restarts,
            faults=faults,
            options=options,
            script=script,
            paths=[str(site)],
        )

    undisturbed = train("undisturbed", "torchrun")
    assert undisturbed.code == 0, undisturbed.log[-3000:]
    result = train(
        "killed",
        "ttprun",
        restarts=1,
        faults=("rank=1,step=6,phase=backward,kind=sigkill",),
        options=("--ttp-device", "lab"),
    )
    assert result.code == 0, result.log[-3000:]
    saved = outcome.assert_saved(tmp_path / "killed/save", 5)
    assert [path.name for path in (saved / "mp_rank_00").iterdir()] == ["lab.pt"]
    assert "lab: the state of its device is read" in result.log, "the device of the plug-in was not asked"
    outcome.assert_same_training(result, undisturbed.records)

"""A framework, a device and a checkpoint format that only a plug-in knows: a rank is killed, and the job goes
on bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults import harness, library, outcome
from tests.packaging.test_plug_in import SOURCE, install


def test_a_killed_rank_in_a_framework_of_ones_own(tmp_path: Path) -> None:
    site = install(SOURCE, tmp_path / "site")
    script = harness.ROOT / "tests/frameworks/train_lab.py"

    def train(name: str, **settings: Any) -> harness.Ended:
        folder = tmp_path / name
        settings |= {"layout": harness.DP2, "script": script, "paths": [str(site)], "code": 0}
        return library.train(folder / "job", "--save", str(folder / "save"), **settings)

    undisturbed = train("undisturbed", launcher="torchrun")
    result = train(
        "killed",
        restarts=1,
        faults=("rank=1,step=6,phase=backward,kind=sigkill",),
        options=("--ttp-device", "lab"),
    )
    saved = outcome.assert_saved(tmp_path / "killed/save", 5)
    assert [path.name for path in (saved / "mp_rank_00").iterdir()] == ["lab.pt"]
    assert "lab: the state of its device is read" in result.log, "the device of the plug-in was not asked"
    outcome.assert_same_training(result, undisturbed.records)

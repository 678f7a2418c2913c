"""Without the files of optional parts, save the stand-ins for a CPU: a rank is killed, the losses go on."""

from __future__ import annotations

from pathlib import Path

from tests.faults import library, outcome
from tests.faults.harness import DP2
from tests.unit.test_core_alone import installation


def test_a_killed_rank_without_optional_parts(tmp_path: Path) -> None:
    site = installation(tmp_path / "site", "cpu stand-ins")
    with (site / "adaptor/library.py").open("a") as file:
        file.write('print("this installation is used")\n')
    result = library.train(
        tmp_path / "job",
        *("--save", str(tmp_path / "save")),
        restarts=1,
        faults=("rank=1,step=6,phase=backward,kind=sigkill",),
        layout=DP2,
        options=("--ttp-online", "0"),
        paths=[str(site)],
        code=0,
    )
    assert "this installation is used" in result.log
    outcome.assert_saved(tmp_path / "save", 5)
    outcome.assert_same_training(result, library.undisturbed(layout=DP2))

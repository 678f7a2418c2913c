"""Every patch on a framework that is not at hand fits the signatures that were recorded of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches import recorded
from tests.patches.conftest import Run

REPORT = "import sys; from adaptor.__main__ import main; sys.exit(main(['report']))"
FRAMEWORKS = ("ascendspeed-af1347",)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_patch_fits(name: str, folder: Path, python: Run) -> None:
    signatures = recorded.read(name)
    recorded.write(folder, signatures)
    done = python("-c", REPORT)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    applied = {words[0] for words in lines if len(words) > 2 and words[2] == "applied"}
    # Neither is a patch without a record, nor the other way round.
    package = name.partition("-")[0]
    assert {target for target in applied if target.startswith(package)} == set(signatures)


def test_a_patch_point_that_moved_is_named(folder: Path, python: Run) -> None:
    signatures = recorded.read("ascendspeed-af1347")
    signatures["ascendspeed.training:train_step"] = "(forward_step_func, model, optimizer, lr_scheduler)"
    del signatures["ascendspeed.checkpointing:save_checkpoint"]
    recorded.write(folder, signatures)
    done = python("-c", REPORT)
    assert done.returncode == 1
    step, save = done.stderr.splitlines()
    assert step == (
        "python -m adaptor: ascendspeed.training:train_step (unit ascendspeed-training): expected "
        "(forward_step_func, data_iterator, model, optimizer, lr_scheduler, config), found "
        "(forward_step_func, model, optimizer, lr_scheduler) in ascendspeed of unknown version "
        "(tested: commit af1347)"
    )
    assert save == (
        "python -m adaptor: ascendspeed.checkpointing:save_checkpoint (unit ascendspeed-checkpointing): "
        "expected (iteration, model, optimizer, lr_scheduler), found no such name in ascendspeed of unknown "
        "version (tested: commit af1347)"
    )

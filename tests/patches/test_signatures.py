"""Every patch fits the signatures that were recorded of public frameworks (tests.frameworks.signatures)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import adaptor.patches as patches
from adaptor import patching
from adaptor.patching._target import Expected
from adaptor.patching._unit import Patch, Unit
from tests.patches import recorded
from tests.patches.conftest import Run

RECORDED = sorted(recorded.SIGNATURES.glob("*.json"))
REPORT = "import sys; from adaptor.__main__ import main; sys.exit(main(['report']))"


def _recorded(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _fits(patch: Patch, signature: str) -> bool:
    parameters = Expected.parse(signature).parameters
    return any(accepted.matches(parameters) for accepted in patch.accepts)


def _concerned(signatures: dict[str, str]) -> list[Unit]:
    """Return the units with patches for this framework."""
    patches.load("ttp")
    return [
        unit for unit in patching.units("ttp") if any(patch.target in signatures for patch in unit.patches)
    ]


def test_there_are_records() -> None:
    assert RECORDED


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_patch_fits(path: Path) -> None:
    record = _recorded(path)
    units = _concerned(record["found"])
    assert units
    for unit in units:
        for patch in unit.patches:
            if patch.target in record["found"]:
                assert _fits(patch, record["found"][patch.target]), patch.target
            else:
                optional = patch.optional is True or patch.optional in record.get("lacks", ())
                assert optional, f"{patch.target} is not in {record['name']}"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_patch_fits_the_replacement_of_the_framework(path: Path) -> None:
    record = _recorded(path)
    by_target = {patch.target: patch for unit in _concerned(record["found"]) for patch in unit.patches}
    for target, signature in record["replaced"].items():
        assert _fits(by_target[target], signature), target


def test_a_patch_point_that_moved_is_named(folder: Path, python: Run) -> None:
    signatures = recorded.read("ascendspeed-af1347")
    signatures["ascendspeed.training:train_step"] = "(forward_step_func, model, optimizer, lr_scheduler)"
    del signatures["ascendspeed.checkpointing:save_checkpoint"]
    recorded.write(folder, signatures)
    completed = python("-c", REPORT, code=1)
    step, save = completed.stderr.splitlines()
    assert step == (
        "python -m adaptor: ascendspeed.training:train_step (unit ascendspeed-training): expected "
        "(forward_step_func, data_iterator, model, optimizer, lr_scheduler, config), found "
        f"(forward_step_func, model, optimizer, lr_scheduler) in {folder}/ascendspeed/training.py, "
        "ascendspeed of unknown version (tested: commit af1347)"
    )
    assert save == (
        "python -m adaptor: ascendspeed.checkpointing:save_checkpoint (unit ascendspeed-checkpointing): "
        "expected (iteration, model, optimizer, lr_scheduler), found no such name in "
        f"{folder}/ascendspeed/checkpointing.py, ascendspeed of unknown version (tested: commit af1347)"
    )

"""Every patch fits the signatures that were recorded of public frameworks (tests.frameworks.signatures)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import adaptor.patches as patches
from adaptor import patching
from adaptor.patching._signature import Expected
from adaptor.patching._unit import Patch, Unit

RECORDED = sorted(Path(__file__).with_name("signatures").glob("*.json"))


def _recorded(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _fits(patch: Patch, signature: str) -> bool:
    parameters = Expected.parse(signature).parameters
    return any(accepted.matches(parameters) for accepted in patch.accepts)


def _concerned(found: dict[str, str]) -> list[Unit]:
    """The units that have something to patch there."""
    patches.load("ttp")
    return [unit for unit in patching.units("ttp") if any(patch.target in found for patch in unit.patches)]


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
                assert patch.optional, f"{patch.target} is not in {record['name']}"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_patch_fits_what_the_framework_replaces(path: Path) -> None:
    record = _recorded(path)
    by_target = {patch.target: patch for unit in _concerned(record["found"]) for patch in unit.patches}
    for target, signature in record["replaced"].items():
        assert _fits(by_target[target], signature), target

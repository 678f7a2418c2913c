"""A run of the unmodified framework that is kept is found again, and no other is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adaptor.worker import watchdogs
from tests.faults import keeping


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    (tmp_path / "pretrain.py").touch()
    return tmp_path


def test_an_update_in_this_process_changes_no_key(framework: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets a variable of its compiler when it makes the first one."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = keeping.key(framework)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight]).step()
    assert keeping.key(framework) == before


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", *watchdogs.VARIABLES, "TORCHELASTIC_RUN_ID"])
def test_a_variable_that_chooses_no_numbers(
    name: str, framework: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "before")
    before = keeping.key(framework)
    monkeypatch.setenv(name, "after")
    assert keeping.key(framework) == before


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_CBWR", "TORCH_SOMETHING"])
def test_a_variable_that_chooses_how_numbers_are_computed(
    name: str, framework: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "before")
    before = keeping.key(framework)
    monkeypatch.setenv(name, "after")
    assert keeping.key(framework) != before


def test_what_is_run(framework: Path) -> None:
    assert keeping.key(framework, "one layout") != keeping.key(framework, "another layout")

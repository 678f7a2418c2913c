"""The names offered by `import adaptor`, and the modules it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import adaptor
from adaptor import errors, library, patching
from adaptor.frameworks import kernel_timeout, optimizer_instances
from tests.waiting import captured


def test_every_public_name_is_there() -> None:
    assert {name for name in adaptor.__all__ if not hasattr(adaptor, name)} == set()


def test_public_errors_and_results_are_the_internal_classes() -> None:
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.AdaptorError)
    }
    assert {name: getattr(adaptor, name) for name in kinds} == kinds
    assert adaptor.Outcome is patching.Outcome
    assert adaptor.Protection is library.Protection


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'adaptor' has no attribute 'Outcomes'"):
        getattr(adaptor, "Outcomes")  # noqa: B009


def test_importing_it_imports_nothing_else() -> None:
    script = "import sys, adaptor; print(*(n for n in sys.modules if n.startswith(('adaptor', 'torch'))))"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["adaptor"]


CALLS = {
    "protect": "print(adaptor.protect(model=[], optimizer=None, save='save')._session)",
    "write_host_copies": "print(adaptor.write_host_copies(model=[], optimizer=None, save='save'))",
}


@pytest.mark.robustness(
    "A1", "a script that only calls protect() is started by torchrun", "one line that says to use ttprun"
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("setup", "environment", "does_nothing"),
    [
        ("", {}, False),
        ("", {"TTP_HANG": "-1"}, False),
        ("", {"ENABLE_TTP": "False"}, True),
        ("adaptor.disable()", {}, True),
    ],
    ids=["by torchrun", "a wrong setting", "off", "disabled"],
)
def test_calls_without_enable(call: str, setup: str, environment: dict[str, str], does_nothing: bool) -> None:
    inherited = {name: text for name, text in os.environ.items() if "TTP" not in name}
    script = f"import adaptor\n{setup}\n{call}"
    command = [sys.executable, "-c", script]
    completed = captured(command, env=inherited | environment)
    if does_nothing:
        assert (completed.returncode, completed.stdout) == (0, "None\n"), completed.stderr
        return
    message = (
        "TTP_HANG is '-1'" if environment else "this process was not started by ttprun: start the job with"
    )
    assert completed.returncode == 1
    (line,) = completed.stderr.splitlines()
    assert line.startswith("adaptor: error: ")
    assert message in line


def test_a_loop_of_ones_own_notes_when_kernels_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise a hang would be noticed only TTP_HANG after DeepEP's kernels ended."""
    core = SimpleNamespace(parallel_state=None, tensor_parallel=None)
    for name, module in (
        ("", core),
        (".core", core),
        (".core.package_info", SimpleNamespace(__version__="")),
    ):
        monkeypatch.setitem(sys.modules, f"megatron{name}", module)
    noted: list[Any] = []

    def note(options: Any) -> None:
        noted.append(options)
        raise StopIteration

    monkeypatch.setattr(kernel_timeout, "note", note)
    monkeypatch.setattr(patching, "check", lambda group: None)
    monkeypatch.setattr(optimizer_instances, "require_groups", lambda: None)
    from adaptor.frameworks import library_loop

    monkeypatch.setattr(library_loop, "_claim", lambda optimizer: None)
    chunk = SimpleNamespace(config=object(), ddp_config=object())
    optimizer = SimpleNamespace(get_loss_scale=None)
    with pytest.raises(StopIteration):
        library_loop.protect([chunk], optimizer, tmp_path, 0, 0, "torch")
    assert noted == [chunk.config]

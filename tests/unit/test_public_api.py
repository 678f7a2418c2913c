"""What `import adaptor` offers, and what it does not import for that."""

from __future__ import annotations

import subprocess
import sys

import pytest

import adaptor
from adaptor import errors, library, patching


def test_every_public_name_is_there() -> None:
    assert {name for name in adaptor.__all__ if not hasattr(adaptor, name)} == set()


def test_errors_and_results_are_those_that_are_raised_and_returned() -> None:
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["adaptor"]

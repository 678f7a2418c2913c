"""A module that already holds the original function is named and left unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_a_circular_import_is_named_and_not_rewritten(folder: Path, holds: Callable[..., None]) -> None:
    with (folder / "fake/core.py").open("a") as core:
        core.write("\nimport fake.circular\nalias = f\n")
    (folder / "fake/circular.py").write_text("from fake.core import f as mine\n")
    holds("""
import units
from adaptor import patching
patching.arm("ttp")
import fake.core, fake.user
assert patching.outcomes()[0].late == ("fake.circular:mine", "fake.core:alias"), patching.outcomes()[0].late
assert fake.circular.mine(1) == 2
assert fake.user.f(1) == 4
assert "goes past it: fake.circular:mine" in patching.format_outcomes(patching.outcomes())
""")


def test_looking_for_holders_loads_no_lazy_module(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "lazy.py").write_text("raise AssertionError('loaded')\n")
    holds("""
import importlib.util, sys, units
from adaptor import patching
spec = importlib.util.find_spec("lazy")
spec.loader = importlib.util.LazyLoader(spec.loader)
module = importlib.util.module_from_spec(spec)
sys.modules["lazy"] = module
spec.loader.exec_module(module)
patching.arm("ttp")
import fake.core
assert patching.outcomes()[0].late == ()
""")

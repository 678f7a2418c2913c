"""Before the first step, every unit is whole or not needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def test_half_a_unit_is_refused_and_does_nothing(holds: Callable[..., None]) -> None:
    holds("""
import units
from adaptor import patching
from adaptor.errors import StartError
patching.arm("ttp")
import fake.core
try:
    patching.check("ttp")
except StartError as error:
    assert str(error) == (
        "unit pair is half applied: fake.core:f is patched, fake.extra:g is not,"
        " because fake.extra was not imported"
    ), error
else:
    raise AssertionError("no error")
assert fake.core.f(1) == 2
import fake.extra
patching.check("ttp")
assert fake.core.f(1) == 4 and fake.extra.g(1, 2) == 1
""")


def test_a_unit_that_nobody_imported_is_not_needed(holds: Callable[..., None]) -> None:
    holds("""
import units
from adaptor import patching
patching.arm("ttp")
import fake
patching.check("ttp")
assert {outcome.status.value for outcome in patching.outcomes()} == {"not imported"}
assert {outcome.version for outcome in patching.outcomes()} == {None}
""")


@pytest.mark.parametrize("action", ["check", "require_modules"])
def test_a_module_that_the_framework_no_longer_has(
    action: str, folder: Path, holds: Callable[..., None]
) -> None:
    (folder / "fake/extra.py").unlink()
    holds(f"""
import units
from adaptor import patching
from adaptor.errors import DriftError
patching.arm("ttp")
import fake.core
try:
    patching.{action}("ttp")
except DriftError as error:
    assert "fake.extra:g (unit pair): expected (a, b), found no module fake.extra" in str(error), error
else:
    raise AssertionError("no error")
assert fake.core.f(1) == 2
""")


def test_before_all_is_imported_nothing_is_missing(holds: Callable[..., None]) -> None:
    holds("""
import units
from adaptor import patching
patching.arm("ttp")
patching.require_modules("ttp")
import fake.core
patching.require_modules("ttp")
assert fake.core.f(1) == 4
import fake.extra
patching.check("ttp")
""")


def test_optional_targets_may_be_missing(folder: Path, holds: Callable[..., None]) -> None:
    holds("""
import units
from adaptor import patching
@units.unit.patch("fake.core:newer", why="only in later versions", accepts="(x)", optional=True)
def nothing(wrapped, instance, args, kwargs): ...
@units.unit.patch("fake.gone:older", why="only in earlier versions", accepts="(x)", optional=True)
def nothing(wrapped, instance, args, kwargs): ...
patching.arm("ttp")
import fake.core, fake.extra
patching.check("ttp")
assert fake.core.f(1) == 4
status = [outcome.status.value for outcome in patching.outcomes()]
assert status == ["applied", "applied", "missing", "not imported"]
""")


@pytest.mark.parametrize("came_with", ["fake.gone", "fake.extra"])
def test_targets_of_an_optional_module_may_be_missing(came_with: str, holds: Callable[..., None]) -> None:
    fits = came_with == "fake.gone"
    holds(f"""
import units
from adaptor import patching
from adaptor.errors import DriftError
later = patching.Unit("later", framework="fake", tested=">=1")
@later.patch("fake.core:f", why="-", accepts="(x, y=)")
def nothing(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)
@later.patch("fake.core:newer", why="-", accepts="(x)", optional={came_with!r})
def nothing(wrapped, instance, args, kwargs): ...
@later.patch("fake.missing:newer", why="-", accepts="(x)", optional={came_with!r})
def nothing(wrapped, instance, args, kwargs): ...
patching.arm("ttp", raises=False)
import fake.core, fake.extra
status = [outcome.status.value for outcome in patching.outcomes() if outcome.unit == "later"]
misfits = [str(misfit) for misfit in patching.misfits("ttp")]
if {fits}:
    assert status == ["applied", "missing", "not imported"], status
    assert misfits == [], misfits
else:
    assert status == ["silenced", "drifted", "not imported"], status
    (misfit,) = misfits
    assert misfit.startswith("fake.core:newer (unit later): expected (x), found no such name"), misfit
""")


def test_unarmed_patches_are_refused(holds: Callable[..., None]) -> None:
    holds("""
import units
from adaptor import patching
from adaptor.errors import StartError
import fake.core, fake.extra
try:
    patching.check("ttp")
except StartError as error:
    assert "adaptor.enable()" in str(error)
else:
    raise AssertionError("no error")
""")

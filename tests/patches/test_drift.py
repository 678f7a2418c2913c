"""A target that does not fit stops the import and disables the rest of its unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

CHANGED = "def g(b, a):\n    return a - b\n"


def test_the_error_names_function_expected_and_found(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "fake/extra.py").write_text(CHANGED)
    holds(f"""
import sys, units
from adaptor import patching
from adaptor.errors import DriftError
patching.arm("ttp")
import fake.core
assert fake.core.f(1) == 4
for action in (lambda: __import__("fake.extra"), lambda: patching.check("ttp")):
    try:
        action()
    except DriftError as error:
        assert str(error) == (
            "fake.extra:g (unit pair): expected (a, b), found (b, a) in {folder}/fake/extra.py, "
            "fake 1.2.0rc1 (tested: >=1,<2)"
        ), error
    else:
        raise AssertionError("no error")
assert "fake.extra" not in sys.modules
assert fake.core.f(1) == 2, "half of a unit acts"
assert [outcome.status.value for outcome in patching.outcomes()] == ["silenced", "drifted"]
""")


def test_whichever_module_comes_first(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "fake/extra.py").write_text(CHANGED)
    holds("""
import units
from adaptor import patching
from adaptor.errors import DriftError
patching.arm("ttp")
try:
    import fake.extra
except DriftError:
    pass
import fake.core
assert fake.core.f(1) == 2
""")


def test_nothing_of_a_refused_module_is_patched(folder: Path, holds: Callable[..., None]) -> None:
    holds("""
import units
from adaptor import patching
from adaptor.errors import DriftError
other = patching.Unit("other", framework="fake", tested=">=1", version="fake.info:__version__")
@other.patch("fake.core:Base.method", why="does not fit", accepts="(other)")
def nothing(wrapped, instance, args, kwargs): ...
@other.patch("fake.core:Base.free", why="does not fit either", accepts="()")
def nothing(wrapped, instance, args, kwargs): ...
patching.arm("ttp")
try:
    import fake.core
except DriftError as error:
    assert str(error).endswith("(and 1 more in this module)"), error
status = [outcome.status.value for outcome in patching.outcomes()]
assert status == ["not imported", "not imported", "drifted", "drifted"]
""")


def test_a_report_goes_on_after_drift(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "fake/extra.py").write_text(CHANGED)
    holds("""
import units
from adaptor import patching
patching.arm("ttp", raises=False)
import fake.core, fake.extra
assert fake.core.f(1) == 2 and fake.extra.g(1, 2) == 1
assert [outcome.status.value for outcome in patching.outcomes()] == ["silenced", "drifted"]
""")

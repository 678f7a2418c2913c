"""wrapt forgets a hook that raised; the next import must not pass unpatched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_refused_again_then_patched_once_it_fits(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "fake/core.py").write_text("def f(z):\n    return z\n")
    holds("""
import pathlib, sys, units
from adaptor import patching
from adaptor.errors import DriftError
patching.arm("ttp")
for attempt in range(3):
    try:
        import fake.core
    except DriftError:
        assert "fake.core" not in sys.modules
    else:
        raise AssertionError("unpatched")
pathlib.Path("fake/core.py").write_text("def f(x, y=1):\\n    return x + y\\n")
import fake.core
assert fake.core.f(1) == 4
""")


def test_a_module_that_fails_by_itself_is_patched_when_it_succeeds(
    folder: Path, holds: Callable[..., None]
) -> None:
    (folder / "fake/core.py").write_text("raise OSError('not yet')\n")
    holds("""
import pathlib, units
from adaptor import patching
patching.arm("ttp")
try:
    import fake.core
except OSError:
    pass
pathlib.Path("fake/core.py").write_text("def f(x, y=1):\\n    return x + y\\n")
import fake.core
assert fake.core.f(1) == 4
""")

"""The version is reported, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("version", "in_range"),
    [
        ("1.0", True),
        ("1.2.0rc1", True),
        ("1.9+cpu", True),
        ("2.0", False),
        ("0.9", False),
        ("unreadable", None),
        (None, None),
    ],
)
def test_in_tested_range(
    version: str | None, in_range: bool | None, folder: Path, holds: Callable[..., None]
) -> None:
    (folder / "fake/info.py").write_text("" if version is None else f"__version__ = '{version}'\n")
    holds(f"""
import units
from adaptor import patching
patching.arm("ttp")
import fake.core, fake.extra
patching.check("ttp")
outcome = patching.outcomes()[0]
assert (outcome.version, outcome.in_tested_range) == {(version, in_range)}, outcome
assert fake.core.f(1) == 4
""")


def test_read_by_a_callable(holds: Callable[..., None]) -> None:
    holds("""
from adaptor import patching
unit = patching.Unit("unit", framework="fake", tested="==3.*", version=lambda: "3.1")
@unit.patch("fake.core:f", why="-", accepts="(...)")
def nothing(wrapped, instance, args, kwargs): ...
patching.arm("ttp")
assert patching.outcomes()[0].version is None
import fake.core
assert patching.outcomes()[0].version == "3.1" and patching.outcomes()[0].in_tested_range
""")


def test_megatron_is_read_from_package_info(folder: Path, holds: Callable[..., None]) -> None:
    core = folder / "megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("__version__ = '0.15.0rc5'\n")
    (core / "optimizer.py").write_text("def f(): ...\n")
    holds("""
from adaptor import patching
unit = patching.Unit("unit", framework="megatron-core", tested=">=0.15.0rc5,<0.17")
@unit.patch("megatron.core.optimizer:f", why="-", accepts="()")
def nothing(wrapped, instance, args, kwargs): ...
patching.arm("ttp")
import megatron.core.optimizer
assert patching.outcomes()[0].version == "0.15.0rc5" and patching.outcomes()[0].in_tested_range
""")

"""Valid and invalid targets of a patch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("target", "accepts", "reason"),
    [
        ("fake.user:f", "(x, y=)", "an import from fake.core (patch it there)"),
        ("fake.core:Base", "()", "a class (patch its __init__)"),
        ("fake.core:absent", "()", "no such name"),
        ("fake.core:Absent.method", "()", "no class Absent"),
        ("fake.core:f.method", "()", "f is not a class"),
        ("fake.core:Base.absent", "()", "no such name"),
        ("fake.core:Base.size", "()", "a property, not a function"),
        ("fake.core:NUMBER", "()", "a int, not a function"),
        ("fake.core:Base.method", "(self, x)", "(x)"),
        ("fake.core:builtin", "(mapping)", "(unknown)"),
    ],
)
def test_targets_that_do_not_fit(
    target: str, accepts: str, reason: str, folder: Path, holds: Callable[..., None]
) -> None:
    with (folder / "fake/core.py").open("a") as core:
        core.write("\nNUMBER = 1\nBase.size = property(lambda self: 1)\nbuiltin = dict.update\n")
    holds(f"""
from adaptor import patching
unit = patching.Unit("unit", framework="fake", tested=">=1", version="fake.info:__version__")
@unit.patch("{target}", why="-", accepts="{accepts}")
def nothing(wrapped, instance, args, kwargs): ...
patching.arm("ttp", raises=False)
import fake.core, fake.user
assert patching.outcomes()[0].status.value == "drifted"
assert patching.outcomes()[0].found == {reason!r}, patching.outcomes()[0].found
""")


@pytest.mark.parametrize("is_patched_there", [False, True])
def test_a_function_that_only_some_versions_define(
    is_patched_there: bool, holds: Callable[..., None]
) -> None:
    """If the module imports the function, it is wrapped at its definition or not at all: never twice."""
    holds(f"""
from adaptor import patching
there = patching.Unit("there", framework="fake", tested=">=1", version="fake.info:__version__")
if {is_patched_there}:
    @there.patch("fake.core:f", why="-", accepts="(x, y=)")
    def doubled(wrapped, instance, args, kwargs):
        return 2 * wrapped(*args, **kwargs)
here = patching.Unit("here", framework="fake", tested=">=1", version="fake.info:__version__")
@here.patch("fake.user:f", why="-", accepts="(x, y=)", unless_imported=True)
def tripled(wrapped, instance, args, kwargs):
    return 3 * wrapped(*args, **kwargs)
@here.patch("fake.core:f", why="-", accepts="(x, y=)", unless_imported=True)
def negated(wrapped, instance, args, kwargs):
    return -wrapped(*args, **kwargs)
patching.arm("ttp")
import fake.core, fake.user
statuses = [outcome.status.value for outcome in patching.outcomes()][-2:]
assert statuses == ["missing", "applied"], statuses
assert fake.user.f(3, 5) == -8 * (2 if {is_patched_there} else 1), fake.user.f(3, 5)
""")


def test_a_decorated_function_is_judged_by_the_decorated(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "fake/core.py").write_text("""
import functools
def noted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
@noted
def f(x, y=1):
    return x + y
""")
    holds("""
import units
from adaptor import patching
patching.arm("ttp")
import fake.core
assert fake.core.f(1) == 4
""")


def test_one_of_two_signatures(holds: Callable[..., None]) -> None:
    holds("""
from adaptor import patching
unit = patching.Unit("unit", framework="fake", tested=">=1", version="fake.info:__version__")
@unit.patch("fake.core:f", why="-", accepts=("(a, b)", "(x, ...)"))
def nothing(wrapped, instance, args, kwargs): return None
patching.arm("ttp")
import fake.core
assert fake.core.f(1) is None
assert patching.outcomes()[0].expected == "(a, b) or (x, ...)"
""")


def test_a_declaration_that_makes_no_sense(holds: Callable[..., None]) -> None:
    holds("""
from adaptor import patching
unit = patching.Unit("unit", framework="fake", tested=">=1")
for call in (
    lambda: patching.Unit("unit", framework="fake", tested=">=1"),
    lambda: unit.patch("fake.core.f", why="-", accepts="()")(print),
    lambda: unit.patch("fake.core:f", why="-", accepts="a, b")(print),
):
    try:
        call()
    except ValueError:
        continue
    raise AssertionError("accepted")
""")

"""Arm, disarm and import in every order, each order in its own process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

STEPS = {
    "arm": "patching.arm('ttp')",
    "disarm": "patching.disarm('ttp')",
    "core": "import fake.core",
    "user": "import fake.user",
}


@pytest.mark.parametrize("order", list(permutations(STEPS)), ids="-".join)
def test_any_order(order: tuple[str, ...], holds: Callable[..., None]) -> None:
    armed = order.index("arm") > order.index("disarm")
    bound_in_time = order.index("user") > order.index("arm")
    script = [
        "import types, units",
        "from adaptor import patching",
        *(STEPS[step] for step in order),
        f"assert fake.core.f(1) == {4 if armed else 2}",
        f"assert fake.user.f(1) == {4 if armed and bound_in_time else 2}",
    ]
    if armed:
        late = () if bound_in_time else ("fake.user:f",)
        script.append(f"assert patching.outcomes()[0].late == {late}, patching.outcomes()[0].late")
    else:
        script.append("assert type(fake.core.f) is types.FunctionType")
    holds("\n".join(script))


def test_armed_again_the_same_wrapper_serves(holds: Callable[..., None]) -> None:
    holds("""
import units
from adaptor import patching
patching.arm("ttp")
import fake.core, fake.user
patching.disarm("ttp")
assert fake.user.f(1) == 2
patching.arm("ttp")
assert fake.user.f is fake.core.f
assert fake.user.f(1) == 4
patching.arm("ttp")
assert fake.user.f(1) == 4
""")


def test_a_module_imported_afresh_is_patched_afresh(holds: Callable[..., None]) -> None:
    holds("""
import importlib, sys, units
from adaptor import patching
patching.arm("ttp")
import fake.core
importlib.reload(fake.core)
assert fake.core.f(1) == 4
del sys.modules["fake.core"]
importlib.import_module("fake.core")
assert sys.modules["fake.core"].f(1) == 4
""")


def test_undone_under_a_wrapper_that_came_later(holds: Callable[..., None]) -> None:
    holds("""
import functools, units
from adaptor import patching
patching.arm("ttp")
import fake.core
ours = fake.core.f
@functools.wraps(ours)
def theirs(*args):
    return ours(*args) + 100
fake.core.f = theirs
assert fake.core.f(1) == 104
patching.disarm("ttp")
assert fake.core.f is theirs and fake.core.f(1) == 102
patching.arm("ttp")
assert fake.core.f is theirs and fake.core.f(1) == 104
""")


def test_two_units_on_one_function(holds: Callable[..., None]) -> None:
    holds("""
import types, units
from adaptor import patching
other = patching.Unit("other", framework="fake", tested=">=1", version="fake.info:__version__")
@other.patch("fake.core:f", why="one more", accepts="(x, y=)")
def incremented(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) + 1
patching.arm("ttp")
import fake.core
assert fake.core.f(1) == 5
patching.disarm("ttp")
assert type(fake.core.f) is types.FunctionType and fake.core.f(1) == 2
""")

"""Methods of every kind, and inherited ones."""

from __future__ import annotations

from collections.abc import Callable

DECLARE = """
from adaptor import patching
import fake.core as core
seen = []
methods = patching.Unit("methods", framework="fake", tested=">=1", version="fake.info:__version__")
def declare(target, accepts="(x)", **how):
    @methods.patch(target, why="seen", accepts=accepts, **how)
    def noted(wrapped, instance, args, kwargs):
        seen.append((instance, args))
        return wrapped(*args, **kwargs)
"""


def test_methods_classmethods_and_staticmethods(holds: Callable[..., None]) -> None:
    holds(f"""{DECLARE}
before = dict(vars(core.Base))
for name in ("method", "named", "free"):
    declare(f"fake.core:Base.{{name}}")
patching.arm("ttp")
one = core.Base()
assert one.method(1) == 1 and core.Base.method(one, 2) == 2
assert core.Base.named(3) == ("Base", 3) and one.named(4) == ("Base", 4) and core.Sub.named(5) == ("Sub", 5)
assert core.Base.free(6) == 6 and one.free(7) == 7
assert seen == [
    (one, (1,)), (one, (2,)), (core.Base, (3,)), (core.Base, (4,)), (core.Sub, (5,)),
    (None, (6,)), (None, (7,)),
], seen
patching.disarm("ttp")
assert dict(vars(core.Base)) == before
""")


def test_an_inherited_method_leaves_no_copy_behind(holds: Callable[..., None]) -> None:
    holds(f"""{DECLARE}
declare("fake.core:Sub.method")
declare("fake.core:Sub.named")
patching.arm("ttp")
core.Sub().method(1); core.Sub.named(2); core.Base().method(3)
assert len(seen) == 2
assert "method" in vars(core.Sub)
patching.disarm("ttp")
assert "method" not in vars(core.Sub) and "named" not in vars(core.Sub)
core.Base.method = lambda self, x: -x
assert core.Sub().method(1) == -1
""")


def test_a_bound_method_kept_by_someone_is_reached_by_disarm(holds: Callable[..., None]) -> None:
    holds(f"""{DECLARE}
declare("fake.core:Base.method")
patching.arm("ttp")
kept = core.Base().method
patching.disarm("ttp")
assert kept(1) == 1 and not seen
""")


def test_a_plain_function_does_as_any_wrapper(holds: Callable[..., None]) -> None:
    """disarm reaches every module that holds or wraps the function; arming again wraps it once."""
    holds(f"""{DECLARE}
before = dict(vars(core.Base))
@methods.patch_plainly("fake.core:Base.method", why="seen")
def plainly(method, unit):
    def noted(self, x):
        if unit.acts:
            seen.append((self, x))
        return method(self, x)
    return noted
patching.arm("ttp")
one = core.Base()
kept = one.method
assert one.method(1) == 1 and one.method(x=2) == 2 and core.Base.method(one, 3) == 3 and kept(4) == 4
assert seen == [(one, 1), (one, 2), (one, 3), (one, 4)], seen
patching.disarm("ttp")
assert dict(vars(core.Base)) == before
assert kept(5) == 5 and len(seen) == 4

import functools
patching.arm("ttp")
ours = core.Base.method
@functools.wraps(ours)
def theirs(self, x):
    return ours(self, x)
core.Base.method = theirs
patching.arm("ttp")
assert one.method(6) == 6 and len(seen) == 5
patching.disarm("ttp")
assert one.method(7) == 7 and len(seen) == 5 and core.Base.method is theirs
""")


def test_a_plain_function_is_left_out_where_there_is_no_such_method(holds: Callable[..., None]) -> None:
    holds(f"""{DECLARE}
@methods.patch_plainly("fake.core:Base.gone", why="seen")
def plainly(method, unit):
    raise AssertionError("there is no such method")
declare("fake.core:Base.method")
patching.arm("ttp")
core.Base().method(1)
patching.check("ttp")
assert len(seen) == 1 and [one.status.value for one in patching.outcomes()] == ["missing", "applied"]
""")

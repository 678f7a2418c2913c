"""A wrapper is copied and pickled like the wrapped function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patches.conftest import Run

PATCHED = """
import copy, pickle
from adaptor import patching
unit = patching.Unit("all", framework="fake", tested=">=1", version="fake.info:__version__")
for target, accepts in {
    "f": "(x, y=)", "Base.method": "(x)", "Base.named": "(x)", "Base.free": "(x)", "Sub.method": "(x)"
}.items():
    @unit.patch(f"fake.core:{target}", why="copied", accepts=accepts)
    def noted(wrapped, instance, args, kwargs):
        return "patched", wrapped(*args, **kwargs)
patching.arm("ttp")
import fake.core as core
"""


@pytest.mark.parametrize("name", ["f", "Base.method", "Base.named", "Base.free", "Sub.method", "Sub.named"])
def test_copied_and_pickled_by_reference(name: str, holds: Callable[..., None]) -> None:
    holds(f"""{PATCHED}
expected = ["patched", *([core.Base()] if "method" in "{name}" else [])]
arguments = [core.Sub(), 1] if "method" in "{name}" else [1]
for duplicate in (
    copy.copy(core.{name}), copy.deepcopy(core.{name}), copy.deepcopy({{"held": [core.{name}]}})["held"][0],
    *(pickle.loads(pickle.dumps(core.{name}, protocol)) for protocol in range(2, 6)),
    pickle._loads(pickle._dumps(core.{name})),
):
    assert duplicate(*arguments)[0] == "patched"
assert copy.deepcopy(core.f) is core.f and pickle.loads(pickle.dumps(core.f)) is core.f
""")


def test_a_bound_method_goes_with_its_object(holds: Callable[..., None]) -> None:
    holds(f"""{PATCHED}
one = core.Base()
one.content = [1]
one.method_of_mine = one.method
assert copy.copy(one.method).__self__ is one
two = copy.deepcopy(one)
assert two.method_of_mine.__self__ is two and two.content is not one.content
assert two.method_of_mine(1) == ("patched", 1)
three = pickle.loads(pickle.dumps(one.method)).__self__
assert three.content == [1]
""")


@pytest.mark.parametrize("undone", [False, True])
def test_a_pickle_loads_without_the_adaptor(undone: bool, cold_python: Run, folder: Path) -> None:
    script = f"""{PATCHED}
held = core.f
bound = core.Sub().method
{"patching.disarm('ttp')" if undone else ""}
with open("held.pickle", "wb") as file:
    pickle.dump([held, core.Base.method, core.Base.named, core.Base.free, bound], file)
"""
    cold_python("-c", script, code=0)
    script = """
import pickle, sys
with open("held.pickle", "rb") as file:
    f, method, named, free, bound = pickle.load(file)
assert not {"adaptor", "wrapt"} & set(sys.modules)
assert (f(1), method(None, 2), named(3), free(4), bound(5)) == (2, 2, ("Base", 3), 4, 5)
"""
    cold_python("-c", script, code=0)


def test_the_pickle_has_the_bytes_of_the_plain_function(holds: Callable[..., None]) -> None:
    holds(f"""{PATCHED}
wrapped = pickle.dumps({{"function": core.f}})
patching.disarm("ttp")
assert wrapped == pickle.dumps({{"function": core.f}})
""")


def test_an_undone_wrapper_is_still_copied(holds: Callable[..., None]) -> None:
    holds(f"""{PATCHED}
held = core.f
patching.disarm("ttp")
assert copy.copy(held)(1) == copy.deepcopy(held)(1) == 2
assert pickle.loads(pickle.dumps(held)) is core.f
""")

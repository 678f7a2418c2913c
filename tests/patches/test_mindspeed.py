"""With a patch manager like MindSpeed's: patches survive its replacements, wrappers and repeated
applications.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patches.conftest import Run

# A small manager of our own. Each application makes a function anew: what was found first, or what it is
# replaced by, within the wrappers, which are known by the end of their names; then it is put wherever the one
# before was held.
MINDSPEED = {
    "mindspeed/__init__.py": "",
    "mindspeed/features_manager/__init__.py": "",
    "mindspeed/features_manager/feature.py": """
class MindSpeedFeature:
    def __init__(self, feature_name, optimization_level=2):
        self.feature_name, self.optimization_level = feature_name, optimization_level

    def register_patches(self, patch_manager, args):
        pass
""",
    "mindspeed/manager.py": """
import importlib, sys

def place(name):
    owner, attribute = name.rsplit(".", 1)
    try:
        return importlib.import_module(owner), attribute
    except ModuleNotFoundError:
        module, cls = owner.rsplit(".", 1)
        return getattr(importlib.import_module(module), cls), attribute

class Entry:
    def __init__(self, name):
        self.name, self.patch_func, self.wrappers, self.first = name, None, [], None

    def apply(self):
        owner, attribute = place(self.name)
        before = getattr(owner, attribute)
        self.first = self.first or before
        made = self.patch_func or self.first
        for wrapper in self.wrappers:
            made = wrapper(made)
        setattr(owner, attribute, made)
        for holder in list(sys.modules.values()):
            if getattr(holder, attribute, None) is before:
                setattr(holder, attribute, made)

class Manager:
    patches_info = {}

    @classmethod
    def register_patch(cls, name, function):
        entry = cls.patches_info.setdefault(name, Entry(name))
        if not function.__name__.endswith("wrapper"):
            entry.patch_func = function
        elif function not in entry.wrappers:
            entry.wrappers.append(function)
""",
    "mindspeed/features_manager/features_manager.py": """
from mindspeed.manager import Manager

class MindSpeedFeaturesManager:
    FEATURES_LIST = []

    @classmethod
    def apply_features_pre_patches(cls, mindspeed_args):
        print("its pre-patches")

    @classmethod
    def apply_features_patches(cls, mindspeed_args):
        for feature in cls.FEATURES_LIST:
            feature.register_patches(Manager, mindspeed_args)
        for entry in Manager.patches_info.values():
            entry.apply()
""",
    "features.py": """
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

class Feature(MindSpeedFeature):
    def __init__(self, **patches):
        super().__init__("test")
        self.patches = patches

    def register_patches(self, patch_manager, args):
        for name, function in self.patches.items():
            patch_manager.register_patch(name, function)

def apply(**patches):
    features = MindSpeedFeaturesManager.FEATURES_LIST
    features[:] = [Feature(**patches), *(f for f in features if not isinstance(f, Feature))]
    MindSpeedFeaturesManager.apply_features_patches(None)

def add_100_wrapper(function):
    def around(x, y=1):
        return function(x, y) + 100
    return around
""",
}
# Before there were features: an entry applies itself, and goes by the names of its parts.
FEATURES_UNUSED = {"mindspeed/features_manager/__init__.py": "FEATURES_LIST = []\n"}
WITHOUT_FEATURES = {
    "mindspeed/patch_utils.py": """
import importlib, sys

class Patch:
    def __init__(self, name, *functions):
        self.orig_module_name, self.orig_func_name = name.rsplit(".", 1)
        self.patch_func, self.wrappers = None, []
        for function in functions:
            if function.__name__.endswith("wrapper"):
                self.wrappers.append(function)
            else:
                self.patch_func = function

    def apply_patch(self):
        module = importlib.import_module(self.orig_module_name)
        made = self.patch_func or getattr(module, self.orig_func_name)
        for wrapper in self.wrappers:
            made = wrapper(made)
        setattr(module, self.orig_func_name, made)
""",
}
AGENT = {"TTP_AGENT": "somewhere"}


@pytest.fixture
def with_manager(folder: Path, holds: Callable[..., None]) -> Callable[[str], None]:
    """Runs a script beside the manager; `units` doubles `fake.core.f`, which is x + y."""
    _write(folder, MINDSPEED)
    return lambda script: holds(
        f"import adaptor, units\nadaptor.enable()\nimport fake.core, fake.user, features\n{script}", **AGENT
    )


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_around_a_replacement(with_manager: Callable[[str], None]) -> None:
    with_manager("""
def product(x, y=1):
    return x * y
features.apply(**{"fake.core.f": product})
assert fake.core.f(3, 5) == fake.user.f(3, 5) == 30
""")


def test_a_replacement_before_the_job_is_claimed(folder: Path, holds: Callable[..., None]) -> None:
    """MindSpeed-LLM replaces functions when it is imported; the arguments of the job are parsed later."""
    _write(folder, MINDSPEED)
    holds("""
import units
from adaptor import patches, patching
patches.load("ttp")
patching.arm("ttp", wait_for_claim=patching.units("ttp"))
import fake.core, fake.user, features
def product(x, y=1):
    return x * y
features.apply(**{"fake.core.f": product})
assert fake.core.f(3, 5) == fake.user.f(3, 5) == 15
patching.claim("ttp")
assert fake.core.f(3, 5) == fake.user.f(3, 5) == 30
""")


def test_once_when_it_is_applied_again(with_manager: Callable[[str], None]) -> None:
    with_manager("""
def product(x, y=1):
    return x * y
for _ in range(3):
    features.apply(**{"fake.core.f": product})
assert fake.core.f(3, 5) == fake.user.f(3, 5) == 30
assert len(features.MindSpeedFeaturesManager.FEATURES_LIST) == 2
""")


def test_once_within_wrappers(with_manager: Callable[[str], None]) -> None:
    with_manager("""
for _ in range(2):
    features.apply(**{"fake.core.f": features.add_100_wrapper})
assert fake.core.f(3, 5) == fake.user.f(3, 5) == 216
""")


@pytest.mark.parametrize(("function", "negated"), [("method", True), ("noting_wrapper", False)])
def test_a_method(function: str, negated: bool, with_manager: Callable[[str], None]) -> None:
    with_manager(f"""
from adaptor import patching
unit = patching.Unit("unit", framework="fake", tested=">=1", version="fake.info:__version__")
@unit.patch("fake.core:Base.method", why="-", accepts="(x)")
def noted(wrapped, instance, args, kwargs):
    return type(instance).__name__, wrapped(*args, **kwargs)
patching.arm("ttp")
def method(self, x):
    return -x
def noting_wrapper(function):
    return lambda self, x: function(self, x)
for _ in range(2):
    features.apply(**{{"fake.core.Base.method": {function}}})
assert fake.core.Base().method(1) == ("Base", {-1 if negated else 1})
assert fake.core.Sub().method(x=1) == ("Sub", {-1 if negated else 1})
""")


def test_the_patches_of_online_recovery(with_manager: Callable[[str], None]) -> None:
    with_manager("""
from adaptor import patching
unit = patching.Unit(
    "unit", framework="fake", tested=">=1", version="fake.info:__version__", group="online"
)
@unit.patch("fake.core:f", why="-", accepts="(...)")
def tripled(wrapped, instance, args, kwargs):
    return 3 * wrapped(*args, **kwargs)
patching.arm("online")
def product(x, y=1):
    return x * y
for _ in range(2):
    features.apply(**{"fake.core.f": product})
assert fake.core.f(3, 5) == 3 * 30, fake.core.f(3, 5)
patching.disarm("online")
assert fake.core.f(3, 5) == 30, fake.core.f(3, 5)
""")


def test_a_wrapper_that_does_not_call_the_wrapped_function(with_manager: Callable[[str], None]) -> None:
    with_manager("""
def product_wrapper(function):
    return lambda x, y=1: x * y
for _ in range(2):
    features.apply(**{"fake.core.f": product_wrapper})
assert fake.core.f(3, 5) == fake.user.f(3, 5) == 30
""")


def test_in_two_threads(with_manager: Callable[[str], None]) -> None:
    """While the main thread runs a patched function, another thread calls the original."""
    with_manager("""
import threading
before = fake.core.f
def asking_wrapper(function):
    def around(x, y=1):
        found = []
        thread = threading.Thread(target=lambda: found.append(before(x, y)))
        thread.start()
        thread.join()
        return found[0] + function(x, y)
    return around
features.apply(**{"fake.core.f": asking_wrapper})
assert fake.core.f(3, 5) == 2 * (16 + 8)
""")


def test_a_replacement_that_is_patched_where_it_is_defined(
    folder: Path, with_manager: Callable[[str], None]
) -> None:
    """As the training loop of MindSpeed-LLM: called by its own name, too."""
    (folder / "loop.py").write_text("def f(x, y=1):\n    return x * y\n")
    with_manager("""
from adaptor import patching
unit = patching.Unit("unit", framework="fake", tested=">=1", version="fake.info:__version__")
@unit.patch("loop:f", why="-", accepts="(x, y=)")
def tripled(wrapped, instance, args, kwargs):
    return 3 * wrapped(*args, **kwargs)
patching.arm("ttp")
import loop
features.apply(**{"fake.core.f": loop.f})
assert loop.f(3, 5) == fake.core.f(3, 5) == 45
""")


def test_a_replacement_that_does_not_fit(with_manager: Callable[[str], None]) -> None:
    with_manager("""
from adaptor import patching
from adaptor.errors import DriftError
def other(a, b):
    return a
import fake.extra
for act in (lambda: features.apply(**{"fake.core.f": other}), lambda: patching.check("ttp")):
    try:
        act()
    except DriftError as error:
        assert str(error) == (
            f"fake.core:f (unit pair): expected (x, y=), found (a, b) in {other.__code__.co_filename}, "
            "fake 1.2.0rc1 (tested: >=1,<2)"
        ), error
    else:
        raise AssertionError("no error")
assert fake.extra.g(1, 2) == -1, "half of a unit acts"
""")


def test_disabled_it_is_the_replacement(with_manager: Callable[[str], None]) -> None:
    with_manager("""
def product(x, y=1):
    return x * y
features.apply(**{"fake.core.f": product})
adaptor.disable()
assert fake.core.f(3, 5) == fake.user.f(3, 5) == 15
""")


@pytest.mark.parametrize("switch", ["enable_high_availability", "ttp_enabled"])
def test_a_second_system_is_refused(switch: str, folder: Path, cold_python: Run) -> None:
    _write(folder, MINDSPEED)
    script = f"""
import argparse, adaptor
adaptor.enable()
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
MindSpeedFeaturesManager.apply_features_pre_patches(argparse.Namespace({switch}=True))
"""
    completed = cold_python("-c", script, env=AGENT, code=1)
    (line,) = completed.stderr.splitlines()
    assert line.startswith(f"adaptor: error: --{switch.replace('_', '-')} is given")
    assert line.endswith("leave it out, or set ENABLE_TTP=False")
    assert completed.stdout == ""


@pytest.mark.parametrize("package", [FEATURES_UNUSED, {}], ids=["2.0", "of ModelLink 1.2"])
def test_before_there_were_features(
    package: dict[str, str], folder: Path, holds: Callable[..., None]
) -> None:
    _write(folder, {"mindspeed/__init__.py": "", **package, **WITHOUT_FEATURES})
    holds(
        """
import adaptor, units
adaptor.enable()
import fake.core
from adaptor import patching
from mindspeed.patch_utils import Patch
def product(x, y=1):
    return x * y
def add_100_wrapper(function):
    return lambda x, y=1: function(x, y) + 100
Patch("fake.core.f", product, add_100_wrapper).apply_patch()
assert fake.core.f(3, 5) == 230
again = Patch("fake.core.f", add_100_wrapper)
again.apply_patch()
assert fake.core.f(3, 5) == 430, "not once"
Patch("fake.core.Base", product).apply_patch()  # nothing of ours
import fake.extra
patching.check("ttp")
""",
        **AGENT,
    )

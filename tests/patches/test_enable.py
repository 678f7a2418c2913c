"""enable(), disable(), report()."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import adaptor
from tests.patches.conftest import Run

AGENT = {"TTP_AGENT": "somewhere"}


def test_importing_the_package_imports_nothing_else(cold_holds: Callable[..., None]) -> None:
    cold_holds("""
import sys
import adaptor
assert not {"torch", "wrapt", "packaging", "msgspec", "adaptor.patching"} & set(sys.modules)
""")


def test_enable_imports_no_framework(cold_holds: Callable[..., None]) -> None:
    cold_holds(
        """
import sys
import adaptor
adaptor.enable()
assert "wrapt" in sys.modules
assert not {"torch", "megatron"} & set(sys.modules)
""",
        **AGENT,
    )


def test_off_touches_no_module(holds: Callable[..., None]) -> None:
    holds(
        """
import sys, fake.core
before = set(sys.modules) - {"adaptor"}  # torch's launcher imports the package for its entry point
finders = list(sys.meta_path)
import adaptor
adaptor.enable()
ours = ("adaptor", "wrapt", "fake", "megatron")
new = {name for name in set(sys.modules) - before if name.startswith(ours)}
settings = set("config context errors hooks plug_ins setting_values protocol".split())
settings |= set("protocol.framework_options protocol.naming".split())
settings |= set("diagnostics diagnostics.requests mindio operations operations.settings".split())
settings |= set("store store.settings transform transform.sizes".split())
assert new == {"adaptor", *(f"adaptor.{name}" for name in settings)}, new
assert sys.meta_path == finders
""",
        ENABLE_TTP="False",
    )


def test_enabled_patches_act_until_disabled_and_again(holds: Callable[..., None]) -> None:
    holds(
        """
import adaptor, units
adaptor.enable()
adaptor.enable()
import fake.core, fake.user
assert fake.user.f(1) == 4
adaptor.disable()
adaptor.disable()
assert fake.user.f(1) == fake.core.f(1) == 2
adaptor.enable()
assert fake.user.f(1) == fake.core.f(1) == 4
assert "fake.core:f" in {outcome.target for outcome in adaptor.report()}
assert "f is doubled" in adaptor.format_report()
""",
        **AGENT,
    )


def test_after_the_framework_was_imported(cold_python: Run) -> None:
    """Whoever looks for the culprit touches no object: torch.distributed.reduce_op would warn."""
    script = """
import multiprocessing, fake.user, adaptor, units
class Deprecated:
    __class__ = property(lambda self: print("touched"))
name = Deprecated()
adaptor.enable()
"""
    completed = cold_python("-c", script, env=AGENT)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr.strip() == (
        "adaptor: error: adaptor.enable() was called after fake.core was imported (by __main__);"
        " call it before, e.g. as the first line of the script"
    )


@pytest.mark.parametrize(
    "script",
    ["import adaptor, units\nadaptor.enable()", "from adaptor.worker import runtime\nruntime.get()"],
    ids=["enable", "session"],
)
def test_outside_of_ttprun(cold_python: Run, script: str) -> None:
    completed = cold_python("-c", script, code=1)
    assert completed.stderr.strip().splitlines()[-1].partition("rror: ")[2] == (
        "the adaptor is enabled, but this process was not started by ttprun:"
        " start the job with ttprun instead of torchrun, or set ENABLE_TTP=False"
    )
    assert "enable" not in script or len(completed.stderr.splitlines()) == 1


def test_it_takes_no_settings() -> None:
    """Under ttprun settings would come too late: the adaptor is enabled before the script starts.

    The only argument is the interface for a script that needs no patches.
    """
    assert list(inspect.signature(adaptor.enable).parameters) == ["provide_mindio"]


def test_a_setting_that_makes_no_sense(cold_python: Run) -> None:
    completed = cold_python("-c", "import adaptor\nadaptor.enable()", env={"TTP_OT": "1", **AGENT}, code=1)
    assert completed.stderr.startswith("adaptor: error: TTP_OT is '1': it must be")
    assert len(completed.stderr.splitlines()) == 1


def test_the_patches_have_one_name(cold_python: Run) -> None:
    script = """
import importlib.util, adaptor.patches
spec = importlib.util.spec_from_file_location("patches", adaptor.patches.__file__)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
    completed = cold_python("-c", script)
    assert "ImportError: the directory patches/ is the package adaptor.patches" in completed.stderr

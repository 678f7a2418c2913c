"""`import mindio_ttp` finds the adaptor's where the user asked for it, and none is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patches.conftest import Run

AGENT = {"TTP_AGENT": "somewhere"}


def test_nobody_asked(cold_python: Run) -> None:
    completed = cold_python("-c", "import adaptor\nadaptor.enable()\nimport mindio_ttp", env=AGENT, code=1)
    assert "No module named 'mindio_ttp'" in completed.stderr


@pytest.mark.parametrize(
    ("call", "env"),
    [("provide_mindio=True", {}), ("", {"TTP_PROVIDE_MINDIO": "1"})],
    ids=["argument", "variable"],
)
def test_the_provided_interface_comes_without_patches(
    cold_holds: Callable[..., None], call: str, env: dict[str, str]
) -> None:
    cold_holds(
        f"""
import importlib.util, sys
import adaptor, units
adaptor.enable({call})
adaptor.enable({call})
assert importlib.util.find_spec("mindio_ttp") is not None
import fake.core
assert fake.core.f(1) == 2
assert not {{"torch", "mindio_ttp"}} & set(sys.modules)
from mindio_ttp.framework_ttp import tft_start_updating_os, ttp_to_persist
from mindio_ttp.framework_ttp.ttp_decorator import get_mindio_export_version, tft_get_repair_type
from mindio_ttp.controller_ttp import tft_notify_controller_dump
from mindio_ttp.utils import tft_set_update_start_time
adaptor.disable()
assert importlib.util.find_spec("mindio_ttp") is None
""",
        **AGENT,
        **env,
    )


def test_ttprun_has_armed_the_patches_before_the_script_asks(holds: Callable[..., None]) -> None:
    holds(
        """
import adaptor, units
adaptor.enable()
adaptor.enable(provide_mindio=True)
import fake.core, mindio_ttp
assert fake.core.f(1) == 2
""",
        **AGENT,
    )


@pytest.mark.parametrize("arguments", ["provide_mindio=True", ""])
def test_off_provides_nothing(cold_python: Run, arguments: str) -> None:
    env = {"ENABLE_TTP": "False", "TTP_PROVIDE_MINDIO": "1"}
    completed = cold_python("-c", f"import adaptor\nadaptor.enable({arguments})\nimport mindio_ttp", env=env)
    assert "No module named 'mindio_ttp'" in completed.stderr


def test_an_installed_one_is_not_replaced(cold_python: Run, folder: Path) -> None:
    (folder / "mindio_ttp").mkdir()
    (folder / "mindio_ttp" / "__init__.py").write_text("")
    completed = cold_python("-c", "import adaptor\nadaptor.enable(provide_mindio=True)", env=AGENT, code=1)
    (line,) = completed.stderr.splitlines()
    assert line.startswith("adaptor: error: TTP_PROVIDE_MINDIO is True, but mindio_ttp is installed (")
    assert line.endswith(
        "): uninstall it, or leave TTP_PROVIDE_MINDIO out and use the ttprun that came with it"
    )


def test_outside_of_ttprun(cold_python: Run) -> None:
    completed = cold_python("-c", "import adaptor\nadaptor.enable(provide_mindio=True)")
    assert "this process was not started by ttprun" in completed.stderr


def test_groups_are_there_before_the_framework_has_its_optimizer(holds: Callable[..., None]) -> None:
    holds(
        """
import adaptor, pytest
adaptor.enable(provide_mindio=True)
import mindio_ttp.modellink
from mindio_ttp.modellink import build_optimizer_replica_group, get_dp_rank_list
from mindio_ttp.modellink.os_shard_parallel import get_os_shard_group
from adaptor.errors import UnsupportedError
from adaptor.frameworks import mindio_modellink_groups
assert get_dp_rank_list() == []
with pytest.raises(
    UnsupportedError, match="3 data-parallel ranks cannot be cut in two: use an even number"):
    build_optimizer_replica_group([0, 1, 2])
with pytest.raises(
    UnsupportedError, match="build_optimizer_replica_group was not called for the data-parallel"):
    mindio_modellink_groups.half()
for name in ("TTPReplicaOptimizer", "TTPOddReplicaOptimizer"):
    with pytest.raises(ModuleNotFoundError, match="ascendspeed"):
        getattr(mindio_ttp.modellink, name)
""",
        **AGENT,
    )


def test_an_optimizer_that_mirrors_where_it_cannot(holds: Callable[..., None]) -> None:
    small = Path(__file__).parents[1] / "frameworks" / "small"
    holds(
        f"""
import adaptor, pytest, sys
sys.path.insert(0, {str(small)!r})
adaptor.enable(provide_mindio=True)
from ascendspeed.core import parallel_state
from mindio_ttp.modellink import TTPOddReplicaOptimizer
from adaptor.errors import UnsupportedError
from adaptor import context
from adaptor.frameworks import ascendspeed_shards
parallel_state.get_data_parallel_world_size = lambda: 1
with pytest.raises(
    UnsupportedError, match="the data-parallel size is 1: there is no second rank for a copy; use"):
    TTPOddReplicaOptimizer()
context.part(ascendspeed_shards.Halves).own = object()
with pytest.raises(
    UnsupportedError, match="build_optimizer_replica_group has cut the data-parallel group: leave"):
    TTPOddReplicaOptimizer()
""",
        **AGENT,
    )


def test_a_name_that_nobody_knows(cold_python: Run) -> None:
    code = "import adaptor\nadaptor.enable(provide_mindio=True)\nfrom mindio_ttp.modellink import nothing"
    assert "cannot import name 'nothing'" in cold_python("-c", code, env=AGENT).stderr

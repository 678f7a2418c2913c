"""Layouts and modes of Megatron that are refused, before anything is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptor.errors import LayoutError
from adaptor.replica import layout, split

# Megatron-LM's own defaults, and what the tests here are about.
PROTECTED = {
    "pipeline_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "num_moe_experts": None,
    "sequence_parallel": False,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "fp8": None,
    "fp4": None,
    "optimizer": "adam",
    "data_parallel_random_init": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "async_save": None,
    "non_persistent_save_interval": None,
    "no_save_optim": None,
    "no_save_rng": None,
    "ckpt_format": "torch",
    "world_size": 4,
}

REFUSED = [
    ("pipeline_model_parallel_size", 2),
    ("context_parallel_size", 2),
    ("expert_model_parallel_size", 2),
    ("num_experts", 8),
    ("num_moe_experts", 8),
    ("sequence_parallel", True),
    ("use_megatron_fsdp", True),
    ("use_torch_fsdp2", True),
    ("use_precision_aware_optimizer", True),
    ("optimizer_cpu_offload", True),
    ("fp8", "hybrid"),
    ("fp4", "e2m1"),
    ("optimizer", "sgd"),
    ("data_parallel_random_init", True),
    ("overlap_grad_reduce", True),
    ("overlap_param_gather", True),
    ("async_save", True),
    ("non_persistent_save_interval", 100),
    ("no_save_optim", True),
    ("no_save_rng", True),
    ("ckpt_format", "zarr"),
]


def args(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**PROTECTED, **changed})


def test_what_is_protected_is_accepted() -> None:
    layout.require_protected(args())
    layout.require_protected(args(ckpt_format="torch_dist", tensor_model_parallel_size=2))
    layout.require_protected(args(async_save=False, no_save_rng=False))


def test_an_argument_that_this_version_does_not_have_is_no_obstacle() -> None:
    layout.require_protected(SimpleNamespace())


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_is_not_protected_is_one_line_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.require_protected(args(**{name: value}))
    line = str(caught.value)
    assert line.startswith(f"--{name.replace('_', '-')} is {value}: ")
    assert line.endswith("or set ENABLE_TTP=False")
    assert "\n" not in line


def test_one_of_several_configs_is_enough_to_refuse() -> None:
    layout.require_protected(args(), SimpleNamespace(overlap_grad_reduce=False))
    with pytest.raises(LayoutError, match="--overlap-grad-reduce is True"):
        layout.require_protected(args(), SimpleNamespace(overlap_grad_reduce=True))


def test_every_refusal_is_tested() -> None:
    assert [name for name, _ in REFUSED] == [name for name, _, _ in layout._PROTECTED]


@pytest.mark.parametrize(("world", "tensor", "size"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (8, 4, 2), (6, 2, 3)])
def test_the_data_parallel_size(world: int, tensor: int, size: int) -> None:
    assert layout.data_parallel_size(args(world_size=world, tensor_model_parallel_size=tensor)) == size


@pytest.mark.parametrize("size", [2, 4, 64])
@pytest.mark.parametrize("replica", ["auto", "split"])
def test_an_even_size_is_split_in_two(size: int, replica: str) -> None:
    assert layout.split_instances(size, replica) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_none_leaves_the_group_as_it_is(size: int) -> None:
    assert layout.split_instances(size, "none") == 1


@pytest.mark.parametrize("replica", ["auto", "split"])
@pytest.mark.parametrize(("size", "words"), [(1, "the data-parallel size is 1"), (3, "is 3, which is odd")])
def test_a_size_that_cannot_be_split_is_refused(size: int, words: str, replica: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        layout.split_instances(size, replica)
    assert "TTP_REPLICA=none" in str(caught.value)


@pytest.fixture
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_distributed_optimizer", None)
    monkeypatch.delenv("TTP_REPLICA", raising=False)


@pytest.mark.usefixtures("_undecided")
def test_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split.instances(4, asked=1) == 2
    assert split.instances(8, asked=4) == 4, "the user asked the framework for more"
    assert split.instances(3, asked=1) == 1, "nobody has said whether the optimizer is distributed"
    with pytest.raises(LayoutError, match="odd"):
        split.require_instances(3, made=1)
    with pytest.raises(LayoutError, match="is 1"):
        split.require_instances(1, made=1)
    split.require_instances(4, made=2)
    split.decide(False)
    assert split.instances(3, asked=1) == 1, "without a distributed optimizer every rank is a copy"
    split.decide(True)
    assert split.instances(4, asked=1) == 2
    with pytest.raises(LayoutError, match="odd"):
        split.instances(3, asked=1)
    monkeypatch.setenv("TTP_REPLICA", "none")
    assert split.instances(4, asked=1) == 1
    split.require_instances(3, made=1)

"""Main params as weights and the lower halves of their bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.errors import UnsupportedError
from adaptor.frameworks import master_params
from adaptor.replica.optimizer_state import storage_of


def _optimizer(**changed: Any) -> SimpleNamespace:
    """A distributed optimizer around Transformer Engine's Adam of one weight, without an update so far."""
    torch.manual_seed(1)
    values = {"master_weights": True, "store_param_remainders": True, **changed}
    inner = SimpleNamespace(
        name_to_dtype_map={"master_param": values.pop("dtype", torch.float32), "exp_avg": torch.bfloat16},
        param_groups=[{"params": [torch.randn(4).to(values.pop("weights", torch.bfloat16))]}],
        state={},
        **values,
    )
    return SimpleNamespace(optimizer=inner, buffers=[])


def _attached(**changed: Any) -> tuple[Any, Any]:
    optimizer = _optimizer(**changed)
    master_params.attach(optimizer)
    return optimizer.optimizer, storage_of(optimizer)


def test_halves_are_joined_as_they_were_parted() -> None:
    inner, storage = _attached()
    (weight,) = inner.param_groups[0]["params"]
    assert torch.equal(storage.param(weight), weight.float())  # before the first update
    mains = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    # Half of the way between two weights: rounded up, where torch rounds to the even one.
    mains[:2] = torch.tensor([0x3F808000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    weights = storage.cast(mains, torch.bfloat16)
    assert weights[:2].view(torch.int16).tolist() == [0x3F81, -0x407F]
    assert torch.equal(weights[2:], mains[2:].to(torch.bfloat16))
    lower = storage.as_saved({0: {"kind": {"param": mains}}})[0]["kind"]["param"]
    loaded = storage.loadable({"param": lower, "exp_avg": mains, "padding": False})
    assert loaded.keys() == {"param", "exp_avg"}
    assert loaded["param"].dtype == storage.saved_dtype("param") == torch.int16
    assert storage.saved_dtype("exp_avg") == torch.float32
    inner.state[weights] = {"master_param": loaded["param"], "exp_avg": mains}
    assert torch.equal(storage.param(weights), mains)
    assert storage.state(weights).keys() == {"exp_avg"}


def test_whole_main_params_are_rounded_as_by_torch() -> None:
    inner, storage = _attached(store_param_remainders=False)
    (weight,) = inner.param_groups[0]["params"]
    main = torch.randn(4)
    inner.state[weight] = {"master_param": main, "exp_avg": main}
    assert torch.equal(storage.param(weight), main)
    storage.make_weights()
    assert torch.equal(weight, main.to(torch.bfloat16))
    world = {0: {"kind": {"param": main}}}
    assert storage.as_saved(world) is world
    assert storage.saved_dtype("param") == torch.float32


@pytest.mark.parametrize("changed", [{"dtype": torch.float16}, {"weights": torch.float32}])
def test_other_types_are_refused(changed: dict[str, torch.dtype]) -> None:
    with pytest.raises(UnsupportedError, match="--use-precision-aware-optimizer is True: main params"):
        _attached(**changed)


def test_an_optimizer_without_main_params_of_its_own_has_no_storage() -> None:
    assert _attached(master_weights=False)[1] is None

"""Megatron's legacy format: the places of the weights in the saved model."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from adaptor.checkpoint.format_torch import TorchFormat


def test_weights_are_found_in_a_model_that_saves_its_parts() -> None:
    saved = {
        "embedding": {"words": {"weight": torch.zeros(2)}},
        "layers": {"0.weight": torch.zeros(3), "0._extra_state": None},
        "scale": torch.zeros(1),
    }
    places = TorchFormat().places(saved)
    assert [name for name, _, _ in places] == ["embedding.words.weight", "layers.0.weight", "scale"]
    for number, (_, value, put) in enumerate(places):
        put(torch.full_like(value, number + 1.0))
    assert saved["embedding"]["words"]["weight"].tolist() == [1, 1]
    assert saved["layers"]["0.weight"].tolist() == [2, 2, 2]
    assert saved["scale"].tolist() == [3]


def test_a_model_that_is_no_module_of_megatron_core() -> None:
    """Megatron-core's DDP accepts any module, but calls a method that other modules lack."""
    module = torch.nn.Linear(2, 1)
    chunk = SimpleNamespace(ddp_config=None, module=module, state_dict_for_save_checkpoint=None)
    assert TorchFormat().model({"model": chunk})["model"].keys() == {"weight", "bias"}

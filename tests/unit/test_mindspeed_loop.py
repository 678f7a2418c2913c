"""The tail of a step in MindSpeed-LLM's loop, repeated by an online recovery."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from adaptor.frameworks.mindspeed_memory import MindspeedLoop, forget_swapped_activations


class SwapPrefetch:
    """MindSpeed's manager (`mindspeed/core/memory/swap_attention/prefetch.py`), in the middle of a step."""

    swap_prefetch: SwapPrefetch | None = None

    def __init__(self) -> None:
        self.prefetch_stream, self.pp, self.vpp, self.interval, self.first_layer_id = object(), 2, 1, 1, 0
        self.layer_name = "layers.0"
        self.swap_tensors, self.data_ptr = ["a tensor"], {7: 0}
        self.prefetch_list, self.prefetch_data_ptr_list = [[["a tensor"]]], [[{7: 0}]]
        self.slice_tensor_storage_ptr, self.slice_tensor_storage_ptr_list = {7: ["0_0"]}, [[{}]]
        self.cur_micro_num, self.remove_num = 1, 1
        self.forward_flag = self.eval_end_flag = True


def test_activations_of_the_abandoned_step_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --swap-attention; the layers keep the manager itself."""
    module = types.ModuleType("mindspeed.core.memory.swap_attention.prefetch")
    vars(module)["SwapPrefetch"] = SwapPrefetch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    manager = SwapPrefetch()
    monkeypatch.setattr(SwapPrefetch, "swap_prefetch", manager)
    forget_swapped_activations()
    remaining = {name for name, value in vars(manager).items() if value}
    assert SwapPrefetch.swap_prefetch is manager
    assert remaining == {"prefetch_stream", "pp", "vpp", "interval", "layer_name"}


@pytest.mark.parametrize(
    ("step", "last_only", "converted"), [(4, False, [4]), (3, False, []), (4, True, []), (8, True, [8])]
)
def test_a_checkpoint_is_converted_behind_its_save(
    step: int, last_only: bool, converted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --enable-mg2hf-convert, as in the loop."""
    args = SimpleNamespace(
        save="save",
        save_interval=4,
        train_iters=8,
        enable_mg2hf_convert=True,
        only_convert_last_checkpoint=last_only,
    )
    saved, chmod, conversions = [], [], []
    training = types.ModuleType("mindspeed_llm.training.training")
    vars(training).update(
        is_distributed_ckpt_complete=lambda save, step: saved[-1:] == [step],
        _convert_weights_mg2hf=lambda arguments, step: conversions.append(step),
        update_save_checkpoint_chmod=chmod.append,
    )
    megatron = types.ModuleType("megatron.training.training")
    vars(megatron)["checkpoint_and_decide_exit"] = lambda *arguments: saved.append(arguments[3])
    parent = types.ModuleType("megatron.training")
    vars(parent).update(get_args=lambda: args, training=megatron)
    for name in ("mindspeed_llm", "mindspeed_llm.training", "megatron"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (training, megatron, parent):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    loop = MindspeedLoop.__new__(MindspeedLoop)
    vars(loop).update(_model=[], _optimizer=None, _scheduler=None)
    assert loop.save(step, 0.0) is False
    assert conversions == converted
    assert chmod == (["save"] if step % 4 == 0 else [])

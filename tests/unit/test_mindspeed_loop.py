"""What MindSpeed-LLM's loop does behind a step, where an online recovery makes that again."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from adaptor.frameworks.mindspeed_loop import MindspeedLoop


@pytest.mark.parametrize(
    ("step", "last_only", "converted"), [(4, False, [4]), (3, False, []), (4, True, []), (8, True, [8])]
)
def test_a_checkpoint_is_converted_behind_its_save(
    step: int, last_only: bool, converted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --enable-mg2hf-convert, as the loop does it."""
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
        _convert_weights_mg2hf=lambda given, step: conversions.append(step),
        update_save_checkpoint_chmod=chmod.append,
    )
    megatron = types.ModuleType("megatron.training.training")
    vars(megatron)["checkpoint_and_decide_exit"] = lambda *given: saved.append(given[3])
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

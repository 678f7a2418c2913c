"""MindSpeed-LLM's own training loop in an online recovery; its parts equal Megatron-LM 0.12's.

Lines are those of 2.2.0 (`mindspeed_llm/training/training.py`); the names are the same to 26.1.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.training_state import FLOPS
from adaptor.frameworks.megatron_online import MegatronLoop

LLM = "mindspeed_llm"
_UTILS = "mindspeed_llm.training.utils"
# Where MindSpeed keeps activations that are on the host until the backward pass (--swap-attention).
_PREFETCH = (
    "mindspeed.core.memory.swap_attention.prefetch",
    "mindspeed.core.memory.adaptive_recomputing.prefetch",  # before 2.1
)
# What one step has left of them, and the value at its begin; the manager is bound to the layers, and stays.
_SWAPPED = {
    **dict.fromkeys(("swap_tensors", "prefetch_list", "prefetch_data_ptr_list"), list),
    **dict.fromkeys(("slice_tensor_storage_ptr_list",), list),
    **dict.fromkeys(("data_ptr", "slice_tensor_storage_ptr"), dict),
    **dict.fromkeys(("cur_micro_num", "remove_num"), int),
    **dict.fromkeys(("forward_flag", "eval_end_flag"), bool),
}


def forget_swapped_activations() -> None:
    """Forget the activations of the abandoned step that are on the host, or on their way."""
    for name in _PREFETCH:
        swapping = getattr(sys.modules.get(name), "SwapPrefetch", None)
        if (manager := getattr(swapping, "swap_prefetch", None)) is not None:
            for field, make in _SWAPPED.items():
                setattr(manager, field, make())


class MindspeedLoop(MegatronLoop):
    """MindSpeed-LLM's training loop, as it was called (`rejoin.Loop`)."""

    module = "mindspeed_llm.training.training"
    rerun = False
    uncounted = 0  # mindspeed/core/megatron_basic/count_zero_fix.py

    def __init__(self, train_call: Mapping[str, Any], start_answers: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(train_call, start_answers)
        # The loop counts its floating-point operations from 0 whenever it is called (553).
        self._missing: float = 0
        self._counted_with_next: float = 0

    def settle(self, step: int) -> None:
        super().settle(step)
        # What the count of operations takes from the data of the abandoned step (2.3 and later).
        clear = getattr(importlib.import_module(_UTILS), "clear_actual_attn_ratio", None)
        if clear is not None:
            clear()
        forget_swapped_activations()

    def put_back(self, record: StepRecord) -> None:
        super().put_back(record)
        self._missing, self._counted_with_next = record.counters.get(FLOPS, 0), 0

    def end_step(self) -> None:
        self._counted_with_next, self._missing = self._missing, 0

    def missing_operations(self) -> float:
        """Return, once, the operations of the steps before the loop was called again; between two steps."""
        missing, self._counted_with_next = self._counted_with_next, 0
        return missing

    def save(self, step: int, operations: float) -> bool:
        from megatron.training import get_args
        from megatron.training.training import checkpoint_and_decide_exit

        args = get_args()
        # It saves without a context and without the data (742), and then does two things more.
        context = data = None
        state = (self._model, self._optimizer, self._scheduler)
        ends = bool(checkpoint_and_decide_exit(*state, step, operations, context, data))
        training = importlib.import_module(self.module)
        is_due = args.save_interval and step % args.save_interval == 0
        if args.save and is_due and getattr(args, "enable_mg2hf_convert", False):
            last_only = getattr(args, "only_convert_last_checkpoint", False) and step != args.train_iters
            if training.is_distributed_ckpt_complete(args.save, step) and not last_only:
                training._convert_weights_mg2hf(args, step)
        if args.save and (ends or is_due):
            training.update_save_checkpoint_chmod(args.save)
        return ends

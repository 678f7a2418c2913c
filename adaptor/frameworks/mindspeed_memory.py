"""The place of main params and moments between two updates in MindSpeed, for two of its options.

`--reuse-fp32-param`  the bf16 weight of an element is the upper half of its main param, rounded, and a
                      residual is the lower half. Inside an update the halves are one float32 number, in the
                      memory of the weights of this rank and of another one.
`--swap-optimizer`    the host has main params and moments; an update brings them to the device, part by part.

Invariant: the memory of an optimizer changes inside the update window alone. MindSpeed joins the halves
before the gradient norm is computed, when this rank may have to give its state; the adaptor joins the halves
after the door, and parts them again before the window closes. The values are the same: nothing reads the
values in between.

`MindspeedLoop` is MindSpeed-LLM's own training loop in an online recovery; its parts equal Megatron-LM
0.12's. Lines are those of 2.2.0 (`mindspeed_llm/training/training.py`); the names are the same to 26.1.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from adaptor.checkpoint import shards
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import ProtectedState
from adaptor.checkpoint.training_state import FLOPS
from adaptor.errors import UnsupportedError
from adaptor.frameworks.megatron_online import MegatronLoop
from adaptor.replica import twin
from adaptor.replica.optimizer_state import Storage

# What MindSpeed adds to a main param before the lower half is cut off: it rounds to the nearest weight.
_HALF = 32768
_JOIN, _PART = "fp16_tensor_convert_to_fp32_tensor", "fp32_tensor_convert_to_fp16_tensor"
_SWAP = "param_to_cpu_states_map"
# The optimizer of --o2-optimizer, whose moments are in bf16.
_HALF_MOMENTS = "O2AdamW"
_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
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


def attach(optimizer: Any) -> Any:
    """Locate the state of an optimizer of Megatron's chain, and return the actions around its updates.

    Returns:
        An object with `before_update` and `after_update`; None: the tensors of the optimizer have its state.

    Raises:
        UnsupportedError: this version of MindSpeed has an unknown place for the state.
    """
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        return None
    if type(inner).__name__ == _HALF_MOMENTS:
        inner.register_load_state_dict_post_hook(_halve_moments)
    memory: Any = None
    if hasattr(optimizer, _JOIN):
        memory = ReusedMemory(optimizer)
    elif hasattr(optimizer, _SWAP):
        memory = SwappedMemory(optimizer)
    if memory is not None:
        setattr(inner, twin.STORAGE, memory)
    return memory


def _halve_moments(optimizer: torch.optim.Optimizer) -> None:
    """Return moments to the type in which the optimizer makes them: a load gives them the type of params."""
    for state in optimizer.state.values():
        for key in _MOMENTS & state.keys():
            state[key] = state[key].to(torch.bfloat16)


class ReusedMemory(Storage):
    """The halves of the main params of a distributed optimizer with `--reuse-fp32-param`."""

    def __init__(self, optimizer: Any) -> None:
        if not hasattr(optimizer, "shard_main_param_res_buffers") or any(
            buffer.param_data.dtype != torch.bfloat16 for buffer in optimizer.buffers
        ):
            raise UnsupportedError(
                "--reuse-fp32-param is True: only a distributed optimizer whose weights are all in bf16 is"
                " protected with it; leave it out, or set ENABLE_TTP=False"
            )
        self._optimizer = optimizer
        self._join: Callable[[], None] = getattr(optimizer, _JOIN)
        self._part: Callable[[], None] = getattr(optimizer, _PART)
        setattr(optimizer, _JOIN, _do_nothing)
        setattr(optimizer, _PART, _do_nothing)
        self._halves: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}
        for number, index, param, local in _params(optimizer):
            self._halves[_main_of(optimizer, param)] = self._places(number, index, param, local)

    def _places(
        self, number: int, index: int, param: torch.Tensor, local: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of the lower and of the upper halves of a param's part of this rank."""
        optimizer, buffer = self._optimizer, self._optimizer.buffers[number]
        rank, count = shards.shard_of(optimizer)
        if count == 1:
            memory = optimizer.shard_main_param_res_buffers[number]
            start, end, _ = buffer.param_index_map[param]
            return memory[2 * start : start + end], memory[start + end : 2 * end]
        weights = buffer.buckets[index].param_data
        size = weights.numel() // count
        own_weights = weights[rank * size : (rank + 1) * size]
        residuals = optimizer.model_param_bucket_and_res_map[weights]
        return residuals[local.start : local.end], own_weights[local.start : local.end]

    def before_update(self) -> None:
        """Join the halves."""
        self._join()

    def after_update(self) -> None:
        """Part the main params into halves."""
        self._part()

    def param(self, param: torch.Tensor) -> torch.Tensor:
        # On the host: a device may be full, or have no time for a kernel.
        lower, upper = (half.detach().cpu() for half in self._halves[param])
        joined = torch.stack((lower, upper), -1).reshape(-1).view(torch.int32)
        if not self._optimizer.first_sub_flag:  # until the first update the lower halves are 0
            joined -= _HALF
        return joined.view(torch.float32)

    def state(self, param: torch.Tensor) -> Mapping[str, Any]:
        entries: Mapping[str, Any] = self._optimizer.optimizer.state.get(param, {})
        return entries

    @torch.no_grad()
    def store(self, values: torch.optim.Optimizer) -> None:
        optimizer = self._optimizer
        if optimizer.first_sub_flag and shards.shard_of(optimizer)[1] > 1:
            for residuals in optimizer.shard_main_param_res_buffers:  # between params, too
                residuals.copy_(_parted(torch.zeros(residuals.numel()))[0])
        optimizer.first_sub_flag = False
        optimizer.optimizer.state.clear()
        for param, value in zip(twin.params(optimizer.optimizer), twin.params(values), strict=True):
            for half, parted in zip(self._halves[param], _parted(value), strict=True):
                half.copy_(parted)
            for key, entry in values.state.get(value, {}).items():
                is_tensor = isinstance(entry, torch.Tensor)
                optimizer.optimizer.state[param][key] = entry.to(param.device) if is_tensor else entry

    def make_weights(self) -> None:
        """Do nothing: the upper halves are the weights."""

    def cast(self, main: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _parted(main)[1].contiguous()

    def as_saved(self, world: dict[Any, Any]) -> dict[Any, Any]:
        """Return the content of the framework's saves: the memory in which main params are inside an update,
        as it is between updates, and the lower halves of all shards.
        """
        optimizer = self._optimizer
        count = shards.shard_of(optimizer)[1]
        saved, residuals = dict(world), []
        for number, buffer in enumerate(optimizer.buffers):
            ((dtypes, tensors),) = world[number].items()
            memory = torch.zeros_like(tensors["param"])
            saved[number] = {dtypes: {**tensors, "param": memory}}
            lower: list[list[torch.Tensor]] = [[] for _ in range(count)]
            for bucket in shards.buckets_of(optimizer, buffer):
                padded = torch.zeros(bucket.shard * count)
                padded[: bucket.unpadded] = tensors["param"][bucket.world :][: bucket.unpadded]
                halves = _parted(padded)
                for index, half in enumerate(torch.split(halves[0], bucket.shard)):
                    lower[index].append(half)
                raw = _memory(*halves, count, _params_of(optimizer, buffer, bucket))
                memory[bucket.world :][: bucket.unpadded] = raw[: bucket.unpadded]
            residuals.append(torch.cat([half for halves in lower for half in halves]).view(torch.float16))
        if count > 1:
            saved["shard_main_param_res"] = residuals
        return saved

    def make_twin(
        self, params: Sequence[list[torch.Tensor]], groups: Sequence[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        return twin.make(self._optimizer.optimizer, params, groups)


class SwappedMemory(Storage):
    """The main params and the moments of a distributed optimizer with `--swap-optimizer`."""

    is_on_host = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._on_host: Mapping[torch.Tensor, dict[str, Any]] = getattr(optimizer, _SWAP)

    def after_update(self) -> None:
        """Let later work on the device, the end of the update included, wait for the state of the host."""
        torch.cuda.current_stream().wait_stream(self._optimizer.swap_to_host_stream)

    def param(self, param: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self._on_host[param].get("param", param)  # weights in float32 stay
        return value

    def state(self, param: torch.Tensor) -> Mapping[str, Any]:
        entries = self._optimizer.optimizer.state.get(param, {})
        return {key: self._on_host[param].get(key, value) for key, value in entries.items()}

    @torch.no_grad()
    def store(self, values: torch.optim.Optimizer) -> None:
        for param, value in zip(twin.params(self._optimizer.optimizer), twin.params(values), strict=True):
            self.param(param).copy_(value)
            entries = self.state(param)
            for key, entry in values.state.get(value, {}).items():
                if isinstance(entry, torch.Tensor):
                    entries[key].copy_(entry)

    @torch.no_grad()
    def make_weights(self) -> None:
        for param in twin.params(self._optimizer.optimizer):
            if "param" in self._on_host[param]:
                self._optimizer.main_param_to_model_param_map[param].copy_(self.param(param))

    def make_twin(
        self, params: Sequence[list[torch.Tensor]], groups: Sequence[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        owner = self._optimizer.optimizer
        made = twin.make(owner, params, groups)
        device = self._optimizer.buffers[0].grad_data.device
        vars(made)["step"] = partial(_update_on_device, made, device)
        return made


@torch.no_grad()
def _update_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make the update of `swap_adamw_step` on params and moments that the host has."""
    from mindspeed.core.optimizer.swap_optimizer.swap_optimizer import npu_apply_fused_adamw_v2

    for group in optimizer.param_groups:
        count = int(group.get("step", 0)) + 1
        group["step"] = torch.tensor(count, dtype=torch.int64, device=device)
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state[param]
            on_host = [param]
            for key in ("exp_avg", "exp_avg_sq"):
                on_host.append(state.setdefault(key, torch.zeros_like(param)))
            on_device = [tensor.to(device) for tensor in on_host]
            beta1, beta2 = group["betas"]
            npu_apply_fused_adamw_v2(
                on_device[0],
                param.grad.to(device),
                *on_device[1:],
                None,
                group["step"],
                group["lr"],
                beta1,
                beta2,
                group["weight_decay"],
                group["eps"],
                False,
                group["maximize"],
            )
            for tensor, updated in zip(on_host, on_device, strict=True):
                if tensor is not updated:
                    tensor.copy_(updated)


def _parted(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper halves of main params: residuals and weights."""
    halves = (main.contiguous().view(torch.int32) + _HALF).view(torch.bfloat16).view(-1, 2)
    return halves[:, 0], halves[:, 1]


def _memory(
    lower: torch.Tensor, upper: torch.Tensor, count: int, params: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the memory of a bucket's main params, between updates, as float32 numbers; 0 between params.

    Args:
        lower, upper: halves, padded.
        count: of shards. The memory of a shard is the memory of its weights and of the previous shard's
            weights; for the first shard, of the second shard's weights.
        params: start and end of each param in the bucket.
    """
    memory = torch.zeros(upper.numel())
    if count == 1:
        for start, end in params:
            halves = torch.cat((lower[start:end], upper[start:end]))
            memory[start:end] = halves.view(torch.float32)
        return memory
    size = upper.numel() // count
    weights = upper.contiguous()
    raw = torch.cat(
        [weights[max(0, index - 1) * size :][: 2 * size].view(torch.float32) for index in range(count)]
    )
    for start, end in params:
        memory[start:end] = raw[start:end]
    return memory


def _params_of(optimizer: Any, buffer: Any, bucket: shards.Bucket) -> list[tuple[int, int]]:
    return [
        (start - bucket.offset, end - bucket.offset)
        for start, end, index in buffer.param_index_map.values()
        if index == bucket.index
    ]


def _params(optimizer: Any) -> Iterator[tuple[int, int, torch.Tensor, Any]]:
    """Return the numbers of buffer and bucket, the model's param, and the range in this rank's shard, of each
    param.
    """
    for number, buffers in enumerate(optimizer.gbuf_ranges):
        (ranges,) = buffers.values()
        for index, bucket in enumerate(ranges):
            for param, param_range in bucket["param_map"].items():
                yield number, index, param, param_range["gbuf_local"]


def _main_of(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    group, order = optimizer.model_param_group_index_map[param]
    main: torch.Tensor = optimizer.optimizer.param_groups[group]["params"][order]
    return main


def _do_nothing() -> None:
    """In the place of a conversion of MindSpeed that is made at another time."""


def forget_swapped_activations() -> None:
    """Forget the activations of the abandoned step that are on the host, or on their way."""
    for name in _PREFETCH:
        swapping = getattr(sys.modules.get(name), "SwapPrefetch", None)
        if (manager := getattr(swapping, "swap_prefetch", None)) is not None:
            for field, make in _SWAPPED.items():
                setattr(manager, field, make())


class MindspeedLoop(MegatronLoop):
    """MindSpeed-LLM's training loop, as it was called (`online.state.Loop`)."""

    module = "mindspeed_llm.training.training"
    uncounted = 0  # mindspeed/core/megatron_basic/count_zero_fix.py

    def __init__(self, protected: ProtectedState, train_call: Mapping[str, Any]) -> None:
        super().__init__(protected, train_call)
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

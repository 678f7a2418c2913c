"""The contexts in which modules compute in fp8 or get fp8 weights; the rules of delayed scaling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class FP8GlobalStateManager:
    """The recipes of the contexts that are open, and what delayed scaling reduces over ranks at their ends.

    Attributes:
        recipe: in which modules compute; None: not in fp8
        weights: in which weights are made; None: not in fp8
        global_amax_buffer: of each recipe, group and direction: the newest row of each module's history, in
            the order of the modules' first forward passes
    """

    recipe: Any = None
    group: Any = None
    weights: Any = None
    keeps_init_value = False
    depth = 0
    is_first = False
    autocast_arguments: dict[str, Any]
    global_amax_buffer: dict[str, list[torch.Tensor]]
    global_amax_history_buffer: dict[str, list[torch.Tensor]]
    global_scale_buffer: dict[str, list[torch.Tensor]]
    fp8_tensors_recompute_buffer: list[Any]

    @classmethod
    def reset(cls) -> None:
        cls.recipe = cls.group = cls.weights = None
        cls.keeps_init_value, cls.depth, cls.is_first = False, 0, False
        cls.autocast_arguments = {}
        cls.global_amax_buffer, cls.global_amax_history_buffer, cls.global_scale_buffer = {}, {}, {}
        cls.fp8_tensors_recompute_buffer = []

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first, cls.is_first = cls.is_first, False
        return first

    @staticmethod
    def get_buffer_info() -> str:
        return "buffer_index_and_autocast_key"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        if cls.get_buffer_info() in fp8_meta:
            return
        places = fp8_meta[cls.get_buffer_info()] = []
        for direction, name in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            key = f"{direction}_{fp8_meta['recipe']}:{hash(fp8_meta['fp8_group'])}"
            state = fp8_meta[name]
            cls.global_amax_buffer.setdefault(key, []).append(state.amax_history[0])
            cls.global_amax_history_buffer.setdefault(key, []).append(state.amax_history)
            cls.global_scale_buffer.setdefault(key, []).append(state.scale)
            places += [len(cls.global_amax_buffer[key]) - 1, key]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        for key, amaxes in cls.global_amax_buffer.items():
            direction, _, autocast_key = key.partition("_")
            if (direction == "forward") != forward:
                continue
            recipe, group = cls.autocast_arguments[autocast_key]
            reduced = torch.cat(amaxes)
            if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group=group) > 1:
                dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
            largest = recipe.fp8_format.value.max_fwd if forward else recipe.fp8_format.value.max_bwd
            fused_amax_and_scale_update_after_reduction(
                reduced,
                cls.global_amax_history_buffer[key],
                cls.global_scale_buffer[key],
                recipe.amax_compute_algo,
                largest,
                recipe.margin,
            )


FP8GlobalStateManager.reset()


@torch.no_grad()
def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor,
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    algorithm: str,
    largest: float,
    margin: float,
) -> None:
    """Take the newest row of each history as the last one, and choose scales: `kernel_bulk` of
    `common/recipe/delayed_scaling.cu`.

    Args:
        reduced: the newest rows, over all ranks; where it is 0 the row of this rank counts.
        largest: the largest number of the type in fp8.
    """
    scaled = torch.tensor(largest * 2.0**-margin)  # a number would be multiplied by the reciprocal
    parts = reduced.split([scale.numel() for scale in scales])
    for part, history, scale in zip(parts, histories, scales, strict=True):
        last = torch.where(part != 0, part, history[0])
        rolled = torch.cat((history[1:], last[None]))
        amax = last
        if algorithm == "max":
            amax = torch.where(last != 0, rolled.nan_to_num(nan=0, posinf=torch.inf).amax(0), 0)
        rolled[0] = 0
        history.copy_(torch.where(last != 0, rolled, history))
        chosen = torch.where(torch.isfinite(amax) & (amax > 0), scaled / amax, scale)
        scale.copy_(chosen.clamp(max=torch.finfo(torch.float32).max))


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    manager = FP8GlobalStateManager
    before = manager.recipe, manager.group, manager.is_first
    manager.autocast_arguments[f"{fp8_recipe}:{hash(fp8_group)}"] = fp8_recipe, fp8_group
    manager.recipe, manager.group = (fp8_recipe, fp8_group) if enabled else (None, None)
    if manager.depth == 0:
        manager.is_first = True
    manager.depth += 1
    try:
        yield
    finally:
        manager.recipe, manager.group, manager.is_first = before
        manager.depth -= 1
        if enabled and manager.depth == 0 and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    before = FP8GlobalStateManager.weights, FP8GlobalStateManager.keeps_init_value
    FP8GlobalStateManager.weights = recipe if enabled else None
    FP8GlobalStateManager.keeps_init_value = preserve_high_precision_init_val
    try:
        yield
    finally:
        FP8GlobalStateManager.weights, FP8GlobalStateManager.keeps_init_value = before

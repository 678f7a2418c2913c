"""The state of Transformer Engine's delayed scaling: scales, and the largest elements of earlier tensors.

Forward and backward passes change this state of a module, so it belongs to the next step long before its
update; a checkpoint has it as the module's `_extra_state`. Names and formats are those of the versions 2.0 to
2.20 (`module/base.py`, `quantization.py`).

Invariant: between two steps the state of a module is equal on all ranks of the recipe's group, which includes
the data-parallel ranks with the same weights: rows are reduced where the passes of a micro-batch end. Only an
evaluation ends without that. Its row is the rank's own until the next forward pass takes the maximum over
ranks; copies have that maximum (`after_evaluation`), so any of them may stand for any rank.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_DIRECTIONS = {"fwd": "scaling_fwd", "bwd": "scaling_bwd"}
# Keys of `fp8_meta`: the places of a module's tensors among those that are reduced, and that are kept for
# recomputation.
_PLACES = ("buffer_index_and_autocast_key", "global_fp8_buffer_pos_fwd_recompute")
# The tensors of a product: input, weight and output forward; two gradients backward.
_FORWARD, _BOTH_DIRECTIONS = 3, 5


def _modules(model: Sequence[torch.nn.Module]) -> list[Any]:
    modules = (module for chunk in model for module in chunk.modules())
    return [module for module in modules if isinstance(vars(module).get("fp8_meta"), dict)]


def _tensors(module: Any) -> list[torch.Tensor]:
    """Return the scale and the history of the module, forward, then backward; empty without a history."""
    if not hasattr(module.fp8_meta.get("scaling_fwd"), "amax_history"):  # quickly: most jobs, in each step
        return []
    states = [module.fp8_meta.get(key) for key in _DIRECTIONS.values()]
    if not all(hasattr(state, "amax_history") for state in states):
        return []
    return [tensor for state in states for tensor in (state.scale, state.amax_history)]


class AmaxHistories:
    """The state of delayed scaling of the chunks of a model; a copy is empty without such a recipe."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._modules = _modules(model)
        self._evaluated: tuple[torch.Tensor, ...] | None = None

    @property
    def most_bytes(self) -> int:
        """Return the largest size of a copy, also before the first step."""
        size = 0
        for module in self._modules:
            rows = 1 + getattr(getattr(module, "config", None), "fp8_amax_history_len", 1)
            size += 4 * rows * _BOTH_DIRECTIONS * max(3, getattr(module, "num_gemms", 1))
        return size

    def take_between_steps(self) -> tuple[torch.Tensor, ...]:
        """Return a copy; after an evaluation it is the copy that `after_evaluation` has kept."""
        evaluated, self._evaluated = self._evaluated, None
        return self.take() if evaluated is None else evaluated

    @torch.no_grad()
    def take(self) -> tuple[torch.Tensor, ...]:
        """Return a copy: all values, and of each module the shapes of its histories and its place among
        modules that are reduced together (-1: none)."""
        self._evaluated = None
        tensors = [_tensors(module) for module in self._modules]
        if not any(tensors):
            return ()
        rows = [
            [*state[1].shape, *state[3].shape, module.fp8_meta.get(_PLACES[0], [-1])[0]]
            if state
            else [0] * 4 + [-1]
            for module, state in zip(self._modules, tensors, strict=True)
        ]
        return torch.cat([tensor.reshape(-1) for state in tensors for tensor in state]), torch.tensor(rows)

    def after_evaluation(self) -> None:
        """Keep a copy with the largest elements of all ranks: collective in the recipe's group."""
        copied = self.take()
        if copied:
            group = next(module.fp8_meta["fp8_group"] for module in self._modules if _tensors(module))
            if dist.get_world_size(group) > 1:
                dist.all_reduce(copied[0], dist.ReduceOp.MAX, group=group)
            self._evaluated = copied

    @torch.no_grad()
    def put_back(self, taken: Sequence[torch.Tensor]) -> None:
        """Restore a copy; an empty copy is the state before the first step."""
        self._evaluated = None
        for module, values in zip(self._modules, self._by_module(taken), strict=True):
            _initialize(module, values)
            live = _tensors(module)
            if live and not values:
                module.reset_fp8_meta_tensors()
            for tensor, value in zip(live, values, strict=False):
                tensor.copy_(value)
        # The end of any context reduces all modules that were in one before, with the row of an evaluation.
        places = taken[1][:, -1].tolist() if taken else []
        for place, number in sorted((place, number) for number, place in enumerate(places)):
            if place >= 0:
                _manager().add_fp8_tensors_to_global_buffer(self._modules[number].fp8_meta)

    @contextlib.contextmanager
    def saved_as(
        self, taken: Sequence[torch.Tensor], to_host: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        """Let modules return a copy as their `_extra_state`.

        Their own function waits for the whole device, which may be in a collective that never ends.
        """
        changed = []
        for module, values in zip(self._modules, self._by_module(taken), strict=True):
            if values:
                _initialize(module, values)
                state = _encoded(_content(module.fp8_meta, [to_host(value).clone() for value in values]))
                methods: dict[str, Any] = {"get_extra_state": lambda state=state: state}
                if hasattr(module, "_encode_extra_state"):  # Megatron-core's, which waits, too
                    methods["_encode_extra_state"] = _encoded
                vars(module).update(methods)
                changed.append((vars(module), methods))
        try:
            yield
        finally:
            for attributes, methods in changed:
                for name in methods:
                    del attributes[name]

    def _by_module(self, taken: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the values of each module, as `_tensors`."""
        if not taken:
            return [[] for _ in self._modules]
        values, rows_of_modules = taken
        by_module, end = [], 0
        for rows, forward, further_rows, backward, _ in rows_of_modules.tolist():
            parts = []
            for shape in ((forward,), (rows, forward), (backward,), (further_rows, backward)):
                begin, end = end, end + shape[0] * shape[-1] ** (len(shape) - 1)
                parts.append(values[begin:end].view(shape))
            by_module.append(parts if forward else [])
        return by_module


def _manager() -> Any:
    return sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager


def _initialize(module: Any, values: Sequence[torch.Tensor]) -> None:
    """Make the state for `values` before a module's first forward pass, as that pass would."""
    if not values or _tensors(module):
        return
    from megatron.core.fp8_utils import get_fp8_context

    products = values[0].numel() // _FORWARD
    with torch.no_grad(), get_fp8_context(module.config):  # with gradients its end would reduce
        module.init_fp8_metadata(num_gemms=products)


def _content(fp8_meta: Mapping[str, Any], values: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the saved state of a module, as `get_extra_state` puts it together."""
    content = {"recipe": fp8_meta["recipe"]}
    for name, scale, history in zip(_DIRECTIONS, values[::2], values[1::2], strict=True):
        content |= {f"scale_{name}": scale, f"amax_history_{name}": history}
    content["extra_fp8_variables"] = {
        key: value
        for key, value in dict(fp8_meta).items()
        if key != _PLACES[0] and isinstance(value, (bool, int, float, str, tuple, list))
    }
    return content


def _encoded(content: Mapping[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def forget_order(model: Sequence[torch.nn.Module]) -> None:
    """Forget which histories are reduced together, and what the abandoned step has kept for recomputation.

    Survivors and new processes list histories again, in the order of the copy that is put back.
    """
    modules = _modules(model)
    if not any(map(_tensors, modules)):
        return
    _manager().reset()
    recompute = sys.modules["transformer_engine.pytorch.distributed"]
    getattr(getattr(recompute, "activation_recompute_forward", None), "_is_first_fp8_module", []).clear()
    for module in modules:
        for name in _PLACES:
            module.fp8_meta.pop(name, None)

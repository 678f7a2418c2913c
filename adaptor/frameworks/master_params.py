"""The main params that Transformer Engine's Adam keeps in its own state: --use-precision-aware-optimizer
without fp8.

The params of the optimizer are the weights of this rank's shard, in bfloat16. The state of a weight has the
main param (`master_param`): as a float32 number or, since Transformer Engine 2.1, as the lower half of the
number's bits. The weight is the upper half, rounded up where the lower half, a signed number, is negative
(`adam.cu`, AdamFunctorMasterParamRemainder).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adaptor.errors import UnsupportedError
from adaptor.replica import twin
from adaptor.replica.optimizer_state import Storage

_MAIN = "master_param"
# What a twin, whose params are main params, lacks.
_WITHOUT = dict.fromkeys(("master_weights", "use_decoupled_grad", "store_param_remainders"), False)
# Half of the distance of two weights, in the bits of a main param.
_HALF = 0x8000


def attach(optimizer: Any) -> None:
    """Locate the state of an optimizer of Megatron's chain, if it keeps main params in itself.

    Raises:
        UnsupportedError: main params or weights are of another type.
    """
    inner: Any = getattr(optimizer, "optimizer", None)
    if not (getattr(inner, "master_weights", False) and hasattr(inner, "name_to_dtype_map")):
        return
    kinds = {param.dtype for param in twin.params(inner)}
    if inner.name_to_dtype_map[_MAIN] != torch.float32 or kinds - {torch.bfloat16}:
        raise UnsupportedError(
            "--use-precision-aware-optimizer is True: main params that Transformer Engine's optimizer keeps"
            " are protected in float32 alone, and beside weights in bfloat16 alone; leave it out, or set"
            " ENABLE_TTP=False"
        )
    setattr(inner, twin.STORAGE, MasterParams(inner))


class MasterParams(Storage):
    """The main params and moments of Transformer Engine's Adam (`optimizer_state.Storage`)."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._has_halves = bool(getattr(inner, "store_param_remainders", False))  # since 2.1

    def param(self, param: torch.Tensor) -> torch.Tensor:
        main: torch.Tensor | None = self._inner.state.get(param, {}).get(_MAIN)
        if main is not None and not self._has_halves:
            return main.detach()
        weight = param.detach().cpu()  # on the host: a device may be full, or have no time for a kernel
        return weight.float() if main is None else _joined(weight, main.detach().cpu())

    def state(self, param: torch.Tensor) -> Mapping[str, Any]:
        return {key: value for key, value in self._inner.state.get(param, {}).items() if key != _MAIN}

    @torch.no_grad()
    def store(self, values: torch.optim.Optimizer) -> None:
        for param, value in zip(twin.params(self._inner), twin.params(values), strict=True):
            param.copy_(self.cast(value, param.dtype))
            entries = values.state.get(value)
            if not entries:
                self._inner.state.pop(param, None)
                continue
            if not self._inner.state.get(param):
                has_option = hasattr(self._inner, "store_param_remainders")
                self._inner.initialize_state(param, *((self._has_halves,) if has_option else ()))
            state = self._inner.state[param]
            state[_MAIN].copy_(_lower(value) if self._has_halves else value)
            for key, entry in entries.items():
                state[key].copy_(entry)

    @torch.no_grad()
    def make_weights(self) -> None:
        for param in twin.params(self._inner):
            param.copy_(self.cast(self.param(param), param.dtype))

    def cast(self, main: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._has_halves:
            return main.to(dtype)
        return ((main.contiguous().view(torch.int32) + _HALF) >> 16).to(torch.int16).view(dtype)

    def as_saved(self, world: dict[Any, Any]) -> dict[Any, Any]:
        """Return the gathered state with lower halves, as float32 numbers, in place of main params."""
        if not self._has_halves:
            return world
        saved = dict(world)
        for number, buffers in world.items():
            if isinstance(buffers, dict):
                ((kind, tensors),) = buffers.items()
                saved[number] = {kind: {**tensors, "param": _lower(tensors["param"]).float()}}
        return saved

    def saved_dtype(self, key: str) -> torch.dtype:
        return torch.int16 if self._has_halves and key == "param" else torch.float32

    def loadable(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a param in a checkpoint as Transformer Engine takes it.

        Up to 0.17 the framework passes on a mark of padding, too; in formats with gathered state it passes on
        lower halves as float32 numbers.
        """
        return {
            key: value.to(self.saved_dtype(key)) if key == "param" else value
            for key, value in tensors.items()
            if isinstance(value, torch.Tensor)
        }

    def make_twin(
        self, params: Sequence[list[torch.Tensor]], groups: Sequence[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        made = twin.make(self._inner, params, groups)
        vars(made).update(_WITHOUT)
        return made


def _joined(weight: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return main params from weights and the lower halves of their bits."""
    upper = weight.view(torch.int16).to(torch.int32) - (lower < 0).to(torch.int32)
    return ((upper << 16) | (lower.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _lower(main: torch.Tensor) -> torch.Tensor:
    """Return the lower halves of the bits of main params, contiguous."""
    return main.contiguous().view(torch.int16).view(*main.shape, 2)[..., 0].contiguous()

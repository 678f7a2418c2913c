"""The state of an optimizer with updates on the host (Megatron-core's --optimizer-cpu-offload).

`HybridDeviceOptimizer` has float32 main params and moments in memory of the host, and an optimizer of torch
for each main param. The params of `HybridDeviceOptimizer` itself are the weights of this rank's shard; an
update copies the main params to the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from adaptor.errors import UnsupportedError
from adaptor.replica import twin
from adaptor.replica.optimizer_state import Storage

KIND = "HybridDeviceOptimizer"
# The key of the main param in the state of a weight.
_MAIN = "master_param"


def attach(optimizer: Any) -> Any:
    """Locate the state of an optimizer of Megatron's chain, if the host updates the optimizer; else None.

    Raises:
        UnsupportedError: a second optimizer updates a part of the params on the device.
    """
    inner = getattr(optimizer, "optimizer", None)
    if type(inner).__name__ != KIND:
        return None
    memory = OffloadedMemory(optimizer)
    setattr(inner, twin.STORAGE, memory)
    return memory


class OffloadedMemory(Storage):
    """The main params and moments of a distributed optimizer whose updates the host makes.

    Raises:
        UnsupportedError: a second optimizer updates a part of the params on the device.
    """

    is_on_host = True

    def __init__(self, optimizer: Any) -> None:
        self._hybrid = optimizer.optimizer
        if self._hybrid.gpu_optimizer is not None or not hasattr(optimizer, "buffers"):
            raise UnsupportedError(
                "--optimizer-cpu-offload is True: only a distributed optimizer that is on the host as a whole"
                " can be protected; use --use-distributed-optimizer and --optimizer-offload-fraction 1.0, or"
                " set ENABLE_TTP=False"
            )
        # Param groups of checkpoints name these classes, and torch since 2.6 loads only registered classes.
        classes = [self._hybrid.cpu_optimizer_cls, self._hybrid.gpu_optimizer_cls]
        torch.serialization.add_safe_globals(classes)

    def after_update(self) -> None:
        """Let later work on the device wait for the copies of main params into weights."""
        torch.cuda.current_stream().wait_stream(self._hybrid._h2d_stream)

    def param(self, param: torch.Tensor) -> torch.Tensor:
        main: torch.Tensor = self._hybrid.param_to_inner_param[param]
        return main

    def state(self, param: torch.Tensor) -> Mapping[str, Any]:
        return {key: value for key, value in self._hybrid.state.get(param, {}).items() if key != _MAIN}

    @torch.no_grad()
    def store(self, values: torch.optim.Optimizer) -> None:
        owners = {main: part for part in self._hybrid.sub_optimizers for main in twin.params(part)}
        for param, value in zip(twin.params(self._hybrid), twin.params(values), strict=True):
            main = self.param(param)
            main.copy_(value)
            owners[main].state.pop(main, None)
            if entries := values.state.get(value):
                owners[main].state[main] = {
                    key: entry.clone() if isinstance(entry, torch.Tensor) else entry
                    for key, entry in entries.items()
                }
        self._hybrid._sync_sub_optimizers_state_to_hdo()

    @torch.no_grad()
    def make_weights(self) -> None:
        for param in twin.params(self._hybrid):
            param.data.copy_(self.param(param))

    def make_twin(
        self, params: Sequence[list[torch.Tensor]], groups: Sequence[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        twin_optimizer: torch.optim.Optimizer = self._hybrid.cpu_optimizer_cls(
            [{**scalars, "params": tensors} for tensors, scalars in zip(params, groups, strict=True)]
        )
        added = {key: value for key, value in twin_optimizer.defaults.items() if key not in groups[0]}
        vars(twin_optimizer)["step"] = partial(_update, twin_optimizer, added)
        _take_away(twin_optimizer, added)
        return twin_optimizer


def _update(twin_optimizer: torch.optim.Optimizer, added: Mapping[str, Any]) -> None:
    """Make an update of a twin; between updates the twin's param groups have only the owner's entries."""
    for group in twin_optimizer.param_groups:
        group.update(added)
    type(twin_optimizer).step(twin_optimizer)
    _take_away(twin_optimizer, added)


def _take_away(twin_optimizer: torch.optim.Optimizer, added: Mapping[str, Any]) -> None:
    for group in twin_optimizer.param_groups:
        for key in added:
            del group[key]

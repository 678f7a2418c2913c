"""The buffers of a model's modules, which are saved besides its weights.

The framework changes them outside of the optimizer: a router's expert bias when the gradients are final, a
running mean in the forward pass. So they belong to the next step long before its update, and a dump takes
them from the record of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Buffers:
    """The buffers that the chunks of a model save of themselves.

    A buffer is known by its module and its name there: the framework may give it other memory.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._places = [
            (module, name)
            for chunk in model
            for module in chunk.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]

    def take(self) -> tuple[torch.Tensor | None, ...]:
        """Return copies of the buffers as they are now, None for one that does not exist."""
        return tuple(None if live is None else live.detach().clone() for live in self._live())

    def copies(self, taken: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Return the copies in `taken`, by the address at which the live buffer lies now."""
        return {
            live.data_ptr(): copy
            for live, copy in zip(self._live(), taken, strict=True)
            if live is not None and copy is not None and live.numel()
        }

    @torch.no_grad()
    def put_back(self, taken: Sequence[torch.Tensor | None]) -> None:
        """Give the live buffers the values that `take` has copied."""
        for live, copy in zip(self._live(), taken, strict=True):
            if live is not None and copy is not None:
                live.copy_(copy)

    def _live(self) -> list[torch.Tensor | None]:
        return [module._buffers[name] for module, name in self._places]

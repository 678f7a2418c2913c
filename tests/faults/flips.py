"""Flips a bit in the memory of a rank that trains."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

# Of the own shard: the fp32 main params, the moments, the gradients with which it is updated. Of a mirror:
# its gradients. Of the model: the weights, and the gradients of this rank alone.
KINDS = (
    "flip-main",
    "flip-moment",
    "flip-variance",
    "flip-gradient",
    "flip-transfer",
    "flip-weight",
    "flip-local-gradient",
    "flip-activation",
)
# The output of the layers that the rank has just computed.
activations: list[Any] = []


def flip(kind: str, seed: int) -> None:
    """Flip a bit below the sign of a number, both drawn by `seed`."""
    import torch

    from adaptor.worker import runtime

    trainee: Any = runtime.get().session.trainee
    tensors = [tensor for tensor in _TENSORS[kind](trainee) if tensor is not None and tensor.numel()]
    drawn = random.Random(seed)
    tensor = drawn.choice(tensors).detach()
    dtype = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    words = tensor.view(-1).view(dtype)
    words[drawn.randrange(words.numel())] ^= 1 << drawn.randrange(8 * tensor.element_size() - 1)


def _optimizers(trainee: Any, *, copies: bool) -> Iterator[Any]:
    from adaptor.checkpoint import shards

    for shard in shards.held_shards(trainee.state.optimizer, trainee.mirrors):
        if shard.is_copy == copies:
            yield shard.optimizer


def _params(trainee: Any, *, copies: bool = False) -> Iterator[Any]:
    for optimizer in _optimizers(trainee, copies=copies):
        for group in optimizer.param_groups:
            yield from group["params"]


def _state(trainee: Any, key: str) -> Iterator[Any]:
    for optimizer in _optimizers(trainee, copies=False):
        for entries in optimizer.state.values():
            yield entries[key]


def _weights(trainee: Any) -> Iterator[Any]:
    for chunk in trainee.state.model:
        yield from chunk.parameters()


_TENSORS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "flip-main": _params,
    "flip-moment": lambda trainee: _state(trainee, "exp_avg"),
    "flip-variance": lambda trainee: _state(trainee, "exp_avg_sq"),
    "flip-gradient": lambda trainee: (param.grad for param in _params(trainee)),
    "flip-transfer": lambda trainee: (param.grad for param in _params(trainee, copies=True)),
    "flip-weight": lambda trainee: (param.data for param in _weights(trainee)),
    "flip-activation": lambda trainee: [output.data for output in activations],
    "flip-local-gradient": lambda trainee: (param.main_grad for param in _weights(trainee)),
}

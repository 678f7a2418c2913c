"""`mirror` replicas: each rank keeps a second copy of its neighbour's optimizer shard, and updates the copy
itself.

The framework's shards and groups stay unchanged. Before an update each rank sends its reduced and clipped
gradients, and the scalars of its param groups, to the next rank of the ring, which applies the same update to
its copy with an optimizer of the same class. The copy has a tensor for each of the owner's, of the same
shape, so the arithmetic is the same, bit for bit.

Invariant: the gradients are taken before the door, the copy is updated inside the update window. A rank's own
shard and its copy are therefore of the same step whenever no update is in flight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from adaptor.errors import UnsupportedError
from adaptor.replica import optimizer_state, twin
from adaptor.replica.optimizer_state import (
    StateEntry,
    entries_of,
    gradient_of,
    make_state,
    storage_of,
    tensors_of,
    values_of,
)
from adaptor.replica.ring import Ring, chunks, make_inbox, pieces


class ParamPiece(msgspec.Struct, frozen=True):
    """The place of a param of an inner optimizer: elements `start` to `end` of a rank's shard of a bucket."""

    buffer: int
    bucket: int
    start: int
    end: int


class _ShardDescription(msgspec.Struct, frozen=True):
    """The description of a shard: param groups without params, sizes, and the state of each param."""

    groups: list[dict[str, Any]]
    sizes: list[list[int]]
    pieces: list[ParamPiece]
    states: list[list[StateEntry]]


class _Update(msgspec.Struct, frozen=True):
    """The inputs of an update besides gradients; `present` has a 1 for each param with a gradient."""

    groups: list[dict[str, Any]]
    present: bytes


class Mirror:
    """The copy of the shard of the previous rank.

    Args:
        owner: this rank's own inner optimizer, of torch.
        pieces_of_owner: the place of each of the owner's params, in the order of its param groups.
        ring: of the group whose ranks share the optimizer state.
        device: the device of the owner's params; a shard of padding alone has no params.

    Every rank of the group creates a mirror at the same time, after its state is loaded. Raises
    UnsupportedError for an optimizer that cannot be mirrored, and the errors of the process group.
    """

    def __init__(
        self,
        owner: torch.optim.Optimizer,
        pieces_of_owner: Sequence[ParamPiece],
        ring: Ring,
        device: torch.device,
    ) -> None:
        self._owner = owner
        self._ring = ring
        inbox, _ = make_inbox(0, torch.device("cpu"))
        described = ring.swap_bytes(_encoded(_described(owner, pieces_of_owner)), (), inbox)
        theirs: _ShardDescription = optimizer_state.decode(described, _ShardDescription)
        self.index = ring.previous
        self._pieces = theirs.pieces
        self._order = _in_memory(pieces_of_owner)
        mirror_params = [
            [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]
            for sizes in theirs.sizes
        ]
        storage = storage_of(owner)
        if storage is None:
            self.optimizer = twin.make(owner, mirror_params, theirs.groups)
        else:
            self.optimizer = storage.make_twin(mirror_params, theirs.groups)
        self._params = twin.params(self.optimizer)
        sizes = [param.numel() for param in self._params]
        self._inbox, grads = make_inbox(sum(sizes), device)
        order = _in_memory(theirs.pieces)
        in_memory = torch.split(grads, [sizes[number] for number in order])
        by_number = dict(zip(order, in_memory, strict=True))
        self._grads = [by_number[number] for number in range(len(sizes))]
        self._fill(theirs)

    @property
    def nbytes(self) -> int:
        """Bytes of the copy, gradients included, once the copy has all of Adam's state."""
        return 16 * sum(param.numel() for param in self._params)

    def exchange(self) -> None:
        """Send this rank's gradients to the next rank, receive the gradients of the previous rank; before the
        door.
        """
        own_params = twin.params(self._owner)
        gradients = [gradient_of(param) for param in own_params]
        present = bytes(gradient is not None for gradient in gradients)
        update = _encoded(_Update(twin.scalars(self._owner), present))
        own_grads = [
            (torch.zeros_like(param) if gradient is None else gradient).to(self._inbox.device, torch.float32)
            for param, gradient in zip(own_params, gradients, strict=True)
        ]
        in_memory = [own_grads[number] for number in self._order]
        taken = self._ring.swap_bytes(update, in_memory, self._inbox)
        theirs: _Update = optimizer_state.decode(taken, _Update)
        for group, scalars in zip(self.optimizer.param_groups, theirs.groups, strict=True):
            group.update(scalars)
        for param, grad, is_present in zip(self._params, self._grads, theirs.present, strict=True):
            param.grad = grad if is_present else None

    def update(self) -> None:
        """Inside the update window: the owner's update, on the copy."""
        self.optimizer.step()

    def on(self, optimizer: torch.optim.Optimizer) -> Mirror:
        """Return this mirror with its state in `optimizer`, a twin of its own optimizer."""
        mirror_copy = copy.copy(self)
        mirror_copy.optimizer = optimizer
        mirror_copy._params = twin.params(optimizer)
        return mirror_copy

    def shard(self, buffer: int, bucket: int) -> Iterator[tuple[int, int, Mapping[str, torch.Tensor]]]:
        """The copy's part of a bucket: start and end in the shard, and the tensors by their names."""
        for piece, param in zip(self._pieces, self._params, strict=True):
            if (piece.buffer, piece.bucket) == (buffer, bucket):
                yield piece.start, piece.end, {"param": param, **self.optimizer.state.get(param, {})}

    def _fill(self, theirs: _ShardDescription) -> None:
        """Take the params and their state, once."""
        sizes = [param.numel() for param in self._params]
        taken = torch.empty(sum(sizes), dtype=torch.float32)
        self._ring.swap(chunks(values_of(self._owner)), pieces(taken))
        for param, part in zip(self._params, torch.split(taken, sizes), strict=True):
            param.copy_(part)
        landed = [
            tensor.view(-1)
            for param, entries in zip(self._params, theirs.states, strict=True)
            for tensor in make_state(self.optimizer, param, entries)
        ]
        self._ring.swap(
            (part for tensor in tensors_of(self._owner) for part in pieces(tensor)),
            (part for tensor in landed for part in pieces(tensor)),
        )


def _in_memory(places: Sequence[ParamPiece]) -> list[int]:
    """Return the numbers of the params in the order of their places in the gradient buffers.

    In this order the gradients of a bucket lie end to end (`ring.end_to_end`).
    """
    return sorted(range(len(places)), key=lambda number: msgspec.structs.astuple(places[number]))


def _described(owner: torch.optim.Optimizer, pieces_of_owner: Sequence[ParamPiece]) -> _ShardDescription:
    params = twin.params(owner)
    is_main = storage_of(owner) is None
    for param in params:
        if (is_main and param.dtype != torch.float32) or param.dim() != 1:
            raise UnsupportedError(
                f"{type(owner).__name__} updates a tensor of {param.dtype} and shape {tuple(param.shape)}: "
                "mirror replicas need flat float32 main params; set TTP_REPLICA=split or none"
            )
    sizes = [[param.numel() for param in group["params"]] for group in owner.param_groups]
    return _ShardDescription(twin.scalars(owner), sizes, list(pieces_of_owner), entries_of(owner))


def _encoded(message: _ShardDescription | _Update) -> bytes:
    try:
        return optimizer_state.encode(message)
    except TypeError as error:
        raise UnsupportedError(
            f"mirror replicas cannot pass on what the optimizer's param groups or its state hold: {error}; "
            "set TTP_REPLICA=split or none"
        ) from error

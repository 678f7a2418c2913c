"""Transfers the state of a rank to the replacement process.

The newcomer asks, a survivor answers, over a separate gloo group of the two, made like the group of a dump. A
shard counts as received only if its checksum equals the sender's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec
import torch
import xxhash

from adaptor.devices.device import Device
from adaptor.online import packing
from adaptor.replica import optimizer_state, twin
from adaptor.replica.optimizer_state import StateEntry
from adaptor.replica.ring import pieces

# The ranks in a group of two.
SOURCE, NEWCOMER = 0, 1
RECORD, SHARD, FROZEN = "record", "shard", "frozen"


class TransferError(Exception):
    """The data of a survivor does not fit, or was damaged on the way."""


class Request(msgspec.Struct, frozen=True):
    """A request of the newcomer: the record of the step, shard `index` of the group, or untrained weights.

    An empty request says that the newcomer has everything.
    """

    what: str = ""
    index: int = -1


class Shard(msgspec.Struct, frozen=True):
    """The description of an optimizer: param groups without params, sizes, and the state of each param."""

    groups: list[dict[str, Any]]
    sizes: list[list[int]]
    states: list[list[StateEntry]]


class StateSource(Protocol):
    """The state that a survivor can give."""

    device: Device

    def record(self) -> Any:
        """Return the step's record besides tensors, and the answers to a newcomer's start-up questions."""

    def shard(self, index: int) -> torch.optim.Optimizer:
        """Return the optimizer with shard `index` of this rank's group."""

    def frozen(self) -> Sequence[torch.Tensor]:
        """Return the weights of the model that are not trained."""


class TransferChannel:
    """A connection between the newcomer and a survivor: this process's end of a group of two.

    Args:
        group: of CPU tensors.
        other_rank: the rank of the other process in the group.
    """

    def __init__(self, group: Any, other_rank: int) -> None:
        self._group = group
        self._other = other_rank
        self._digest = xxhash.xxh3_64()

    def send(self, data: bytes) -> None:
        """Send bytes of any number."""
        self._send(torch.tensor([len(data)], dtype=torch.int64))
        if data:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Return the bytes that were sent."""
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length)
        data = torch.empty(int(length), dtype=torch.uint8)
        if data.numel():
            self._receive(data)
        return data.numpy().tobytes()

    def send_tensors(
        self, tensors: Iterable[torch.Tensor], to_host: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Send tensors, and then their checksum."""
        self._digest.reset()
        for tensor in tensors:
            for piece in pieces(tensor.detach().reshape(-1)):
                data = to_host(piece).contiguous().view(torch.uint8)
                self._digest.update(_bytes(data))
                self._send(data)
        self.send(self._digest.digest())

    def receive_tensors(self, tensors: Iterable[torch.Tensor]) -> int:
        """Fill tensors with what was sent; return the number of bytes.

        Raises:
            TransferError: the checksum is not the sender's.
        """
        self._digest.reset()
        count = 0
        for tensor in tensors:
            received = torch.empty(tensor.numel(), dtype=tensor.dtype)
            for piece in pieces(received):
                data = piece.view(torch.uint8)
                self._receive(data)
                self._digest.update(_bytes(data))
                count += data.numel()
            with torch.no_grad():
                tensor.data.copy_(received.reshape(tensor.shape))
        if self.receive() != self._digest.digest():
            raise TransferError("the checksum of a shard is not the sender's")
        return count

    def _send(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor], self._other, 0).wait()

    def _receive(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._other, 0).wait()


def answer(channel: TransferChannel, source: StateSource, cancelled: Callable[[], bool]) -> None:
    """Answer the newcomer's requests, until the newcomer has everything, or `cancelled` is true.

    Raises:
        TypeError: the state contains an element that cannot be passed on.
        Exception: the group's error when the newcomer is gone.
    """
    while not cancelled():
        request = msgspec.msgpack.decode(channel.receive(), type=Request)
        if request.what == RECORD:
            channel.send(packing.pack(source.record()))
        elif request.what == SHARD:
            optimizer = source.shard(request.index)
            channel.send(optimizer_state.encode(describe(optimizer)))
            with source.device.beside():
                tensors = chain(optimizer_state.values_of(optimizer), optimizer_state.tensors_of(optimizer))
                channel.send_tensors(tensors, source.device.to_host)
        elif request.what == FROZEN:
            with source.device.beside():
                channel.send_tensors(source.frozen(), source.device.to_host)
        else:
            channel.send(b"")  # that the newcomer waits for: the group is given up when all has arrived
            return


def describe(optimizer: torch.optim.Optimizer) -> Shard:
    """Return a torch optimizer in words."""
    sizes = [[param.numel() for param in group["params"]] for group in optimizer.param_groups]
    return Shard(twin.scalars(optimizer), sizes, optimizer_state.entries_of(optimizer))


def ask_record(channel: TransferChannel) -> Any:
    """Return what the source's `record` returned."""
    channel.send(msgspec.msgpack.encode(Request(RECORD)))
    return packing.unpack(channel.receive())


def ask_shard(channel: TransferChannel, index: int, optimizer: torch.optim.Optimizer) -> int:
    """Let `optimizer` have the params and the state of shard `index`; return the number of bytes.

    Raises:
        TransferError: the optimizer is not laid out as the sender's, or something was damaged on its way.
    """
    channel.send(msgspec.msgpack.encode(Request(SHARD, index)))
    theirs: Shard = optimizer_state.decode(channel.receive(), Shard)
    filled = optimizer_state.to_be_filled(optimizer)
    count = channel.receive_tensors(lay_out(filled, theirs, index))
    optimizer_state.keep(optimizer, filled)
    return count


def lay_out(optimizer: torch.optim.Optimizer, theirs: Shard, index: int) -> list[torch.Tensor]:
    """Give `optimizer` the param groups and the state of another optimizer; return the tensors to be filled.

    Args:
        optimizer: the optimizer with shard `index` here.
        theirs: the description of the other optimizer.
        index: for the text of an error.

    Returns:
        The params, then the tensors of the state, in the order of sending.

    Raises:
        TransferError: the optimizer's layout differs from the other's.
    """
    sizes = describe(optimizer).sizes
    if sizes != theirs.sizes:
        raise TransferError(
            f"shard {index}: the param groups of the new process have {_counts(sizes)} params, those of its"
            f" twin {_counts(theirs.sizes)}, or of other sizes"
        )
    for group, scalars in zip(optimizer.param_groups, theirs.groups, strict=True):
        group.update(scalars)
    optimizer.state.clear()
    params = twin.params(optimizer)
    landed = [
        tensor
        for param, entries in zip(params, theirs.states, strict=True)
        for tensor in optimizer_state.make_state(optimizer, param, entries)
    ]
    return [*params, *landed]


def ask_frozen(channel: TransferChannel, weights: Sequence[torch.Tensor]) -> None:
    """Fill the weights that are not trained."""
    channel.send(msgspec.msgpack.encode(Request(FROZEN)))
    channel.receive_tensors(weights)


def end(channel: TransferChannel) -> None:
    """Tell the source that all has arrived."""
    channel.send(msgspec.msgpack.encode(Request()))
    channel.receive()


def _bytes(data: torch.Tensor) -> Any:
    """Return the memory of a tensor of bytes."""
    return data.numpy()


def _counts(sizes: Sequence[Sequence[int]]) -> str:
    return " + ".join(str(len(group)) for group in sizes) or "no"

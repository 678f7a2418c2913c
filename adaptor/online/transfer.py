"""The connection of a newcomer and a survivor: requests, shards and their checksums.

The newcomer asks, a survivor answers, over a separate gloo group of the two, made like the group of a dump. A
shard counts as received only if its checksum equals the sender's.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy
import torch
import xxhash

from adaptor.protocol.messages import Endpoint, Regroup
from adaptor.replica import optimizer_state, twin
from adaptor.replica.optimizer_state import StateEntry
from adaptor.replica.ring import pieces

_TENSOR, _ARRAY, _TUPLE, _BIG, _GENERATOR, _ENUM = 1, 2, 3, 4, 5, 6
# What fits into a number of msgpack.
_SMALL = range(-(1 << 63), 1 << 64)


def pack(value: Any) -> bytes:
    """Return `value` as bytes; nothing is ever unpickled.

    A record contains the parts of checkpoints besides shards: numbers, text, tensors, numpy's arrays, members
    of enums, and tuples and dicts of these types.

    Raises:
        TypeError: names the type of an element that cannot be passed on.
    """
    return msgspec.msgpack.encode(_plain(value))


def unpack(data: bytes | memoryview) -> Any:
    """Return what `pack` was given."""
    return msgspec.msgpack.decode(data, ext_hook=_read)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        kind = str(value.dtype).removeprefix("torch.")
        return _ext(_TENSOR, (kind, list(value.shape), flat.numpy().tobytes()))
    if isinstance(value, torch.Generator):
        return _ext(_GENERATOR, (str(value.device), _plain(value.get_state())))
    if isinstance(value, numpy.ndarray):
        return _ext(_ARRAY, (value.dtype.str, list(value.shape), value.tobytes()))
    if isinstance(value, numpy.generic):
        return _plain(value.item())
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        value_class = type(value)
        return _ext(_ENUM, (value_class.__module__, value_class.__qualname__, value.name))
    if isinstance(value, tuple):
        return _ext(_TUPLE, [_plain(item) for item in value])
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and value not in _SMALL:
        return _ext(_BIG, str(value))
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be passed on to a new process")


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _read(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _BIG:
        return int(unpack(data))
    if code == _GENERATOR:
        device, state = unpack(data)
        return torch.Generator(device).set_state(state)
    if code == _ENUM:
        return _member(*unpack(data))
    kind, shape, content = unpack(data)
    if code == _ARRAY:
        return numpy.frombuffer(bytearray(content), dtype=numpy.dtype(kind)).reshape(shape)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte()
    return flat.view(getattr(torch, kind)).reshape(shape)


def _member(module: str, kind: str, name: str) -> enum.Enum:
    """Return member `name` of an enum from a module that this process has imported, too. Raises TypeError."""
    resolved: Any = sys.modules.get(module)
    for part in kind.split("."):
        resolved = getattr(resolved, part, None)
    if not (isinstance(resolved, enum.EnumMeta) and name in resolved.__members__):
        raise TypeError(f"{kind}.{name} of {module} is no member of an enum here")
    member: enum.Enum = resolved[name]
    return member


# Bytes of small tensors that make one message: each message is a round trip of two processes.
_MESSAGE = 1 << 20
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
        for message in _messages(tensor.detach().reshape(-1) for tensor in tensors):
            parts = [to_host(piece).contiguous().view(torch.uint8) for piece in message]
            data = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._digest.update(_bytes(data))
            self._send(data)
        self.send(self._digest.digest())

    def receive_tensors(self, tensors: Iterable[torch.Tensor]) -> int:
        """Fill tensors with what was sent; return the number of bytes. Raises TransferError."""
        self._digest.reset()
        filled = [(tensor.data, _flat(tensor.data)) for tensor in tensors]
        count = 0
        for message in _messages(flat for _, flat in filled):
            data = torch.empty(sum(piece.nbytes for piece in message), dtype=torch.uint8)
            self._receive(data)
            self._digest.update(_bytes(data))
            for piece, part in zip(message, _parts(data, message), strict=True):
                piece.copy_(part)
            count += data.numel()
        for tensor, flat in filled:
            if not tensor.is_contiguous():
                tensor.copy_(flat.reshape(tensor.shape))
        if self.receive() != self._digest.digest():
            raise TransferError("the checksum of a shard is not the sender's")
        return count

    def _send(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor], self._other, 0).wait()

    def _receive(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._other, 0).wait()


def answer(channel: TransferChannel, source: Any, cancelled: Callable[[], bool]) -> None:
    """Answer the newcomer's requests, until the newcomer has everything, or `cancelled` is true.

    Args:
        source: gives the state (`state.Given`).

    Raises:
        TypeError: the state contains an element that cannot be passed on.
        Exception: the group's error when the newcomer is gone.
    """
    while not cancelled():
        request = msgspec.msgpack.decode(channel.receive(), type=Request)
        if request.what == RECORD:
            channel.send(pack(source.record()))
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
    return unpack(channel.receive())


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


def _messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the pieces of each message, in order: those of small tensors together.

    Args:
        tensors: flat; of equal sizes and types on both sides.
    """
    message: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        for piece in pieces(tensor):
            if message and size + piece.nbytes > _MESSAGE:
                yield message
                message, size = [], 0
            message.append(piece)
            size += piece.nbytes
    if message:
        yield message


def _parts(data: torch.Tensor, message: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes `data` of a message as tensors on the host with the types of its pieces."""
    at = 0
    for piece in message:
        part = data[at : at + piece.nbytes]
        yield (part.clone() if at else part).view(piece.dtype)  # a view must begin at a multiple of its type
        at += piece.nbytes


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor, else a flat tensor of its size."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())


def _bytes(data: torch.Tensor) -> Any:
    """Return the memory of a tensor of bytes."""
    return data.numpy()


def _counts(sizes: Sequence[Sequence[int]]) -> str:
    return " + ".join(str(len(group)) for group in sizes) or "no"


class Meeting:
    """The connections of a rank to the store of the controller's agent, attempt after attempt.

    The keys begin with the incident and the attempt, so a late process meets no other process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stores: list[Any] = []
        self._lines: dict[tuple[int, int], TransferChannel] = {}  # by attempt and source

    def store(self, order: Regroup, name: str) -> Any:
        """Return a store of this attempt, for one thread; the store is kept until `close`."""
        from torch.distributed import PrefixStore

        from adaptor.worker.dump_store import DumpStore

        place = Endpoint(order.store_host, order.store_port)
        store = DumpStore(place, order.store_secret, order.timeout_s)
        self._stores.append(store)
        return PrefixStore(f"ttp/{order.incident}/{order.attempt}/{name}", store)

    def to_newcomer(self, order: Regroup, newcomer: int) -> TransferChannel:
        """Return this survivor's end of a group with a newcomer."""
        return self._meet(order, newcomer, self._rank, SOURCE)

    def to_source(self, order: Regroup, source: int) -> TransferChannel:
        """Return this newcomer's end of its group with a survivor."""
        line_key = (order.attempt, source)
        if line_key not in self._lines:
            self._lines[line_key] = self._meet(order, self._rank, source, NEWCOMER)
        return self._lines[line_key]

    def _meet(self, order: Regroup, newcomer: int, source: int, place: int) -> TransferChannel:
        from adaptor.worker.dump_store import meet

        store = self.store(order, f"line/{newcomer}/{source}")
        return TransferChannel(meet(store, "two", place, 2, order.timeout_s), 1 - place)

    def abandon(self) -> None:
        """Let whoever waits at a store raise; from any thread."""
        for store in self._stores:
            store.abandon()

    def close(self) -> None:
        """The job goes on."""
        self._lines.clear()
        for store in self._stores:
            store.close()
        self._stores.clear()

    def rest(self, timeout_s: float) -> None:
        """The job goes on, and process groups may come back to a store, as NCCL's do: keep this meeting, and
        `abandon` the meeting when the next begins.

        Args:
            timeout_s: seconds for each wait at the store.
        """
        self._lines.clear()
        for store in self._stores:
            store.rest(timeout_s)

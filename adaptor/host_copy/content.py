"""The content of a host copy: the part of one rank in the last words of a step.

The content is the shards that the rank updates, untrained weights, the record of the step, the framework's
arguments with plain values, and the further entries of a script with a custom loop. An index in front of the
tensors describes the layout of the shards; nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch

from adaptor import context
from adaptor.checkpoint import step_record
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.errors import CheckpointError
from adaptor.online import transfer
from adaptor.online.state import frozen, own_shards, record_of
from adaptor.online.transfer import Shard
from adaptor.protocol.copy_file import CopyFile, digest_of
from adaptor.protocol.environment import Generation, HeldCopies, WorkerPlace
from adaptor.replica import optimizer_state, twin
from adaptor.worker.processor import CannotRejoinError

_LENGTH = struct.Struct("<Q")
# Where a tensor may begin: any dtype can be read there.
_ALIGNMENT = 64
# Elements that are copied at once: between two pieces the copy can be given up.
_PIECE = 1 << 23
# What an index takes besides the record: description of a param and its state, rounded up.
_OF_A_PARAM = 1024
_SLACK = 1 << 20
# Two moments in fp32: the state that Adam has from its first update on.
_MOMENTS = 8


class CopyAbandonedError(Exception):
    """A copy was given up before the copy was whole."""


class _Part(msgspec.Struct, frozen=True):
    """A shard in the index: the shard's number in the group, and a description of the shard's optimizer."""

    index: int
    described: bytes


class _Index(msgspec.Struct, frozen=True):
    """The index in front of the tensors.

    Attributes:
        record: of the step, packed
        arguments: of the framework, packed
        extra: further entries of the checkpoint, packed
        kept: what the rank had kept on its board for a successor (`Board.keep`)
        shards: the shards that the rank updates
        tensors: dtype and number of elements of each following tensor
    """

    record: bytes
    arguments: bytes
    extra: bytes
    shards: list[_Part]
    tensors: list[tuple[str, int]]
    kept: bytes = b""


class CopyRecord(NamedTuple):
    """The contents of a copy besides tensors: the record of the step, arguments of the framework, further
    entries, and what the board kept."""

    record: StepRecord
    arguments: Mapping[str, Any]
    extra: Mapping[str, Any]
    kept: bytes


def most_bytes(trainee: MegatronTrainee) -> int:
    """Return the largest size of a copy of this rank, in bytes, before the optimizer has state.

    Raises:
        TypeError: something in the state cannot be copied.
    """
    state = trainee.state
    schedule = None if state.scheduler is None else dict(state.scheduler.state_dict())
    taken = (trainee.random.take(), trainee.loaders.take(), state.buffers.take())
    record = (*taken, step_record.take_groups(state.optimizer), schedule)
    size = _SLACK + 2 * len(transfer.pack(record)) + 2 * len(take_extra(trainee))
    size += state.buffers.histories.most_bytes
    for _, optimizer in own_shards(trainee.state.optimizer):
        params = twin.params(optimizer)
        # Main params in float32 may be elsewhere (`optimizer_state.Storage`).
        size += sum(param.numel() * (max(4, param.element_size()) + _MOMENTS) for param in params)
        size += len(params) * (_OF_A_PARAM + 3 * _ALIGNMENT)
    weights = frozen(trainee.state.model)
    return size + sum(weight.numel() * weight.element_size() + _ALIGNMENT for weight in weights)


def take_extra(trainee: MegatronTrainee) -> bytes:
    """Return the present further entries of a checkpoint; the script changes the entries in each step.

    Raises:
        TypeError: an entry cannot be copied.
    """
    return transfer.pack(dict(trainee.state.extra))


def write(
    trainee: MegatronTrainee,
    record: StepRecord,
    extra: bytes,
    room: Callable[[int], memoryview],
    cancelled: Callable[[], bool],
    kept: bytes = b"",
) -> int:
    """Write the copy of the state of `record`; return the copy's size in bytes.

    Args:
        trainee: of this rank; the optimizer state must not change during the call.
        extra: the result of `take_extra` after the step.
        room: returns memory for so many bytes.
        cancelled: is asked again and again.
        kept: what the board keeps after the step.

    Raises:
        CopyAbandonedError: the copy was cancelled.
        TypeError: a part of the state cannot be copied, such as an object of an optimizer's own.
        OSError: the memory is too small.
    """
    shards = own_shards(trainee.state.optimizer)
    weights = frozen(trainee.state.model)
    kinds: list[tuple[torch.dtype, int]] = []
    for _, optimizer in shards:
        has_storage = optimizer_state.storage_of(optimizer) is not None  # whose values are in float32
        params = twin.params(optimizer)
        kinds += [(torch.float32 if has_storage else param.dtype, param.numel()) for param in params]
        kinds += [(tensor.dtype, tensor.numel()) for tensor in optimizer_state.tensors_of(optimizer)]
    kinds += [(weight.dtype, weight.numel()) for weight in weights]
    index = msgspec.msgpack.encode(
        _Index(
            record=transfer.pack(dict(vars(record))),
            arguments=transfer.pack(_plain_arguments(trainee.state.args)),
            extra=extra,
            shards=[
                _Part(number, optimizer_state.encode(transfer.describe(optimizer)))
                for number, optimizer in shards
            ],
            tensors=[(_name(dtype), count) for dtype, count in kinds],
            kept=kept,
        )
    )
    places, size = _places(len(index), kinds)
    memory = room(size)
    memory[: _LENGTH.size] = _LENGTH.pack(len(index))
    memory[_LENGTH.size : _LENGTH.size + len(index)] = index
    device = trainee.device
    with torch.no_grad(), device.beside():
        tensors = chain(
            *(
                chain(optimizer_state.values_of(optimizer), optimizer_state.tensors_of(optimizer))
                for _, optimizer in shards
            ),
            weights,
        )
        for tensor, place in zip(tensors, places, strict=True):
            if not tensor.numel():
                continue
            into = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            flat = tensor.detach().reshape(-1)
            for start in range(0, tensor.numel(), _PIECE):
                if cancelled():
                    raise CopyAbandonedError
                device.copy(into[start : start + _PIECE], flat[start : start + _PIECE])
    return size


def _plain_arguments(args: Any) -> dict[str, Any]:
    """Return the framework's arguments with numbers, texts and lists as values."""
    argument_values = dict(vars(args)) if args is not None else {}  # at once: the main thread may add to it
    return {name: value for name, value in argument_values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _places(index: int, tensors: list[tuple[torch.dtype, int]]) -> tuple[list[int], int]:
    """Return the offset of each tensor behind an index of `index` bytes, and the end of the last tensor."""
    places, at = [], _LENGTH.size + index
    for dtype, count in tensors:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        places.append(at)
        at += dtype.itemsize * count
    return places, at


def own_copy(step: int) -> memoryview:
    """Return the whole copy of `step` that this rank, or the process before, has made in this generation.

    Raises:
        CheckpointError: there is no such copy, or the copy is damaged.
    """
    rank, key = context.part(WorkerPlace).rank, (context.part(Generation).name, step)
    for path in context.part(HeldCopies).paths.get(rank, ()):
        file = CopyFile(path)
        try:
            header = file.header
            if header is None or (header.key, header.rank) != (key, rank):
                continue
            memory = file.content[: header.size]
        finally:
            file.close()
        if digest_of(memory) != header.digest:
            raise CheckpointError(f"the copy of step {step} in host memory is damaged")
        return memory
    raise CheckpointError(f"no copy of step {step} is in host memory")


def read_record(memory: memoryview) -> CopyRecord:
    """Return the contents of a whole copy besides tensors."""
    return _record_in(_index_of(memory)[0])


def _record_in(index: _Index) -> CopyRecord:
    record = record_of({"record": transfer.unpack(index.record)})
    return CopyRecord(record, transfer.unpack(index.arguments), transfer.unpack(index.extra), index.kept)


def _index_of(memory: memoryview) -> tuple[_Index, int]:
    (length,) = _LENGTH.unpack_from(memory)
    return msgspec.msgpack.decode(memory[_LENGTH.size : _LENGTH.size + length], type=_Index), length


def read(memory: memoryview, optimizer: Any, model: Sequence[Any]) -> CopyRecord:
    """Give a whole copy's content to the live optimizers and the untrained weights.

    Args:
        optimizer, model: of a rank with the same model and optimizer as the copied rank.

    Raises:
        CheckpointError: the copy's model or optimizer has another layout.
    """
    index, length = _index_of(memory)
    shards_by_index = dict(own_shards(optimizer))
    if shards_by_index.keys() != {part.index for part in index.shards}:
        raise CheckpointError(
            f"the copy has shard {_numbers(part.index for part in index.shards)} of this rank's group, and"
            f" this rank updates shard {_numbers(shards_by_index)}"
        )
    landed: list[torch.Tensor] = []
    filled = {number: optimizer_state.to_be_filled(shard) for number, shard in shards_by_index.items()}
    for part in index.shards:
        described: Shard = optimizer_state.decode(part.described, Shard)
        try:
            landed += transfer.lay_out(filled[part.index], described, part.index)
        except transfer.TransferError as error:
            raise CheckpointError(str(error)) from error
    landed += frozen(model)
    if [(_name(tensor.dtype), tensor.numel()) for tensor in landed] != index.tensors:
        raise CheckpointError("the tensors of the copy have other types or sizes than those of this rank")
    places, _ = _places(length, [(tensor.dtype, tensor.numel()) for tensor in landed])
    with torch.no_grad():
        for tensor, place in zip(landed, places, strict=True):
            if tensor.numel():
                stored_values = torch.frombuffer(
                    memory, dtype=tensor.dtype, count=tensor.numel(), offset=place
                )
                tensor.data.copy_(stored_values.reshape(tensor.shape))
        for number, shard in shards_by_index.items():
            optimizer_state.keep(shard, filled[number])
    return _record_in(index)


def put_back(step: int, optimizer: Any, model: Sequence[Any]) -> StepRecord:
    """Give optimizers and untrained weights the state of `step` from this rank's own copy; return the record.

    Raises:
        CannotRejoinError: there is no such copy, or the copy is damaged or of another layout.
    """
    try:
        return read(own_copy(step), optimizer, model).record
    except CheckpointError as error:
        raise CannotRejoinError(str(error)) from error


def _numbers(numbers: Any) -> str:
    return " and ".join(map(str, sorted(numbers))) or "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The ring of a data-parallel group: every rank sends to one neighbour and receives from another.

Messages are agreed on beforehand, so both directions are always posted together and no cycle of waits arises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

import torch
import torch.distributed as dist

# Elements per message. Two are on their way at a time, so this bounds the memory for them.
CHUNK = 1 << 22
# Where tensors must lie for a backend; any other takes those of the host.
_DEVICES = {"nccl": "cuda", "hccl": "npu"}
# Bytes of the message ahead of the tensors; the first eight have the number of bytes that are sent. An update
# needs fewer besides gradients, up to some thousands of params.
HEAD = 1 << 14
_ELEMENT = 4  # bytes of a float32
_LENGTH = 8


def stride(nodes: Sequence[int]) -> int:
    """Return the distance between neighbours that puts as many neighbours as possible on different nodes.

    Args:
        nodes: the node of each rank of the group, at least two ranks.
    """
    size = len(nodes)

    def together(step: int) -> int:
        return sum(nodes[rank] == nodes[(rank + step) % size] for rank in range(size))

    return min(range(1, size), key=lambda step: (together(step), step))


class Ring:
    """The neighbours of this rank in the ring of `group`, each `step` ranks away (see `stride`).

    Attributes:
        previous: the index in the group of the sending rank
    """

    def __init__(self, group: dist.ProcessGroup, step: int) -> None:
        size = group.size()
        self.previous = (group.rank() - step) % size
        self._next = (group.rank() + step) % size
        self._group = group
        self._device = torch.device(_DEVICES.get(dist.get_backend(group), "cpu"))

    def swap(self, outgoing: Iterable[torch.Tensor], taken: Iterable[torch.Tensor]) -> None:
        """Send tensors, in their order, and fill `taken` with the received tensors.

        Each is contiguous and at most as long as a message may be (`chunks`). A tensor on a device is filled
        when its stream comes to the receive. Raises the error of the process group when a neighbour is gone.
        """
        on_their_way: list[tuple[list[dist.Work], torch.Tensor | None, torch.Tensor | None]] = []
        for out, into in zip_longest(outgoing, taken):
            landing = into
            if into is not None and into.device.type != self._device.type:
                landing = torch.empty_like(into, device=self._device)
            sent = None if out is None else out.to(self._device)
            on_their_way.append((self._post(sent, landing), landing, into))
            if len(on_their_way) > 1:
                _land(*on_their_way.pop(0))
        for message in on_their_way:
            _land(*message)

    def _post(self, out: torch.Tensor | None, landing: torch.Tensor | None) -> list[dist.Work]:
        """Begin to send and to receive a message; neither tensor may change before both have ended."""
        if self._device.type == "cpu":
            # gloo has no batches. Not by `dist.isend`, which copies on a CPU that stands in for a device:
            # what is sent here stays as it is.
            taken = [] if landing is None else [self._group.recv([landing], self.previous, 0)]
            return taken if out is None else [*taken, self._group.send([out], self._next, 0)]
        operations = []
        if landing is not None:
            source = dist.get_global_rank(self._group, self.previous)
            operations.append(dist.P2POp(dist.irecv, landing, source, self._group))
        if out is not None:
            to = dist.get_global_rank(self._group, self._next)
            operations.append(dist.P2POp(dist.isend, out, to, self._group))
        works: list[dist.Work] = dist.batch_isend_irecv(operations)
        return works

    def swap_bytes(self, outgoing: bytes, out: Iterable[torch.Tensor], inbox: torch.Tensor) -> bytes:
        """Send and receive any number of bytes, and float32 tensors.

        Args:
            out: flat float32 tensors, all on the device of `inbox`. Tensors that lie end to end are sent from
                their memory.
            inbox: made by `make_inbox` for as many numbers as the other rank gives.

        Returns:
            The received bytes.
        """
        head = torch.zeros(HEAD, dtype=torch.uint8)
        start = len(outgoing).to_bytes(_LENGTH, "little") + outgoing[: HEAD - _LENGTH]
        head[: len(start)] = _as_tensor(start)
        # Bytes as numbers are moved and never computed with, so they stay what they are.
        their_head, tensors = inbox[: HEAD // _ELEMENT], inbox[HEAD // _ELEMENT :]
        self.swap(
            chain([head.view(torch.float32)], chunks(end_to_end(out))), chain([their_head], pieces(tensors))
        )
        theirs = their_head.cpu().view(torch.uint8).numpy()  # no copy on a CPU
        length = int.from_bytes(theirs[:_LENGTH].tobytes(), "little")
        remaining_bytes = torch.empty(max(0, length - HEAD + _LENGTH), dtype=torch.uint8)
        self.swap(pieces(_as_tensor(outgoing[HEAD - _LENGTH :])), pieces(remaining_bytes))
        return theirs[_LENGTH : _LENGTH + length].tobytes() + remaining_bytes.numpy().tobytes()


def make_inbox(elements: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an inbox for `Ring.swap_bytes`, and its part for `elements` float32 numbers."""
    inbox = torch.zeros(HEAD // _ELEMENT + elements, dtype=torch.float32, device=device)
    return inbox, inbox[HEAD // _ELEMENT :]


def end_to_end(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Join tensors of one type that lie end to end in one storage, without a copy; the others stay."""
    first, count = None, 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if first is not None and _follows(flat, first, count):
            count += flat.numel()
            continue
        if first is not None:
            yield first.as_strided((count,), (1,))
        first, count = flat, flat.numel()
    if first is not None:
        yield first.as_strided((count,), (1,))


def _follows(flat: torch.Tensor, first: torch.Tensor, count: int) -> bool:
    """Return whether `flat` begins where `count` elements from the begin of `first` end."""
    end = first.storage_offset() + count
    return flat.storage_offset() == end and flat.untyped_storage()._cdata == first.untyped_storage()._cdata


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of a flat tensor, each a message."""
    for start in range(0, tensor.numel(), CHUNK):
        yield tensor[start : start + CHUNK]


def chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Cut tensors of one type, placed end to end, as `pieces` cuts a flat tensor with all their elements.

    A message inside of a single tensor shares its memory; any other is a copy.
    """
    parts: list[torch.Tensor] = []
    room = CHUNK
    for tensor in tensors:
        flat, remaining = tensor if tensor.dim() == 1 else tensor.reshape(-1), tensor.numel()
        while remaining >= room:
            parts.append(flat[:room])
            yield _joined(parts)
            flat, remaining = flat[room:], remaining - room
            parts, room = [], CHUNK
        if remaining:  # nearly all tensors come here whole: to cut some tens takes longer than to copy them
            parts.append(flat)
            room -= remaining
    if parts:
        yield _joined(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _land(works: list[dist.Work], landing: torch.Tensor | None, into: torch.Tensor | None) -> None:
    for work in works:
        work.wait()
    if into is not None and landing is not None and landing is not into:
        into.copy_(landing)

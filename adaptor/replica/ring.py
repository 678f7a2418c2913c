"""The ring of a data-parallel group: every rank gives to one neighbour and takes from another.

What is given and taken is agreed on beforehand, message by message, so both directions are always posted
together and no rank waits for one that waits for it.
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
# Bytes that go ahead of tensors in one message, their number in the first eight of it. What an update needs
# besides gradients is shorter, up to some thousands of params: then nobody waits twice.
HEAD = 1 << 14
_LENGTH = 8


def stride(nodes: Sequence[int]) -> int:
    """Return the distance between neighbours that puts as many as possible on different nodes.

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
        previous: the index in the group of the rank that is taken from
    """

    def __init__(self, group: dist.ProcessGroup, step: int) -> None:
        size = group.size()
        self.previous = (group.rank() - step) % size
        self._group = group
        self._to = dist.get_global_rank(group, (group.rank() + step) % size)
        self._from = dist.get_global_rank(group, self.previous)
        self._device = torch.device(_DEVICES.get(dist.get_backend(group), "cpu"))

    def swap(self, given: Iterable[torch.Tensor], taken: Iterable[torch.Tensor]) -> None:
        """Give tensors, in their order, and fill others with what is taken.

        Each is contiguous and at most as long as a message may be (`chunks`). What is filled on a device has
        arrived when its stream comes that far. Raises what the process group raises when a neighbour is gone.
        """
        on_their_way: list[tuple[list[dist.Work], torch.Tensor | None, torch.Tensor | None]] = []
        for out, into in zip_longest(given, taken):
            operations = []
            landing = into
            if into is not None:
                if into.device.type != self._device.type:
                    landing = torch.empty_like(into, device=self._device)
                operations.append(dist.P2POp(dist.irecv, landing, self._from, self._group))
            if out is not None:
                operations.append(dist.P2POp(dist.isend, out.to(self._device), self._to, self._group))
            on_their_way.append((dist.batch_isend_irecv(operations), landing, into))
            if len(on_their_way) > 1:
                _land(*on_their_way.pop(0))
        for message in on_their_way:
            _land(*message)

    def swap_bytes(
        self, given: bytes, out: Iterable[torch.Tensor] = (), into: Iterable[torch.Tensor] = ()
    ) -> bytes:
        """Send `given`, any number of bytes, and return what comes; then `out` and `into`, as in `swap`."""
        head = torch.zeros(HEAD, dtype=torch.uint8)
        start = len(given).to_bytes(_LENGTH, "little") + given[: HEAD - _LENGTH]
        head[: len(start)] = _as_tensor(start)
        taken = torch.empty_like(head)
        self.swap(chain([head], out), chain([taken], into))
        theirs = taken.numpy().tobytes()
        length = int.from_bytes(theirs[:_LENGTH], "little")
        rest = torch.empty(max(0, length - HEAD + _LENGTH), dtype=torch.uint8)
        self.swap(pieces(_as_tensor(given[HEAD - _LENGTH :])), pieces(rest))
        return theirs[_LENGTH : _LENGTH + length] + rest.numpy().tobytes()


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of a flat tensor, each a message."""
    for start in range(0, tensor.numel(), CHUNK):
        yield tensor[start : start + CHUNK]


def chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors of one type, one behind the other, cut as `pieces` cuts a flat tensor that holds them all."""
    parts: list[torch.Tensor] = []
    room = CHUNK
    for tensor in tensors:
        flat = tensor.reshape(-1)
        while flat.numel():
            part, flat = flat[:room], flat[room:]
            parts.append(part)
            room -= part.numel()
            if not room:
                yield torch.cat(parts)
                parts, room = [], CHUNK
    if parts:
        yield torch.cat(parts)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _land(works: list[dist.Work], landing: torch.Tensor | None, into: torch.Tensor | None) -> None:
    for work in works:
        work.wait()
    if into is not None and landing is not None and landing is not into:
        into.copy_(landing)

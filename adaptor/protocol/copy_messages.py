"""The messages between the agents of two nodes, one of which keeps the host copies of the other's ranks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from adaptor.protocol import wire
from adaptor.protocol.messages import Count, Message, Number

# More than any host has.
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]


class CopyHello(Message, frozen=True):
    """Sender to keeper: the first message of a connection."""

    node: Number


class CopyFollows(Message, frozen=True):
    """Sender to keeper: behind this message come `size` bytes, the content of a copy.

    Attributes:
        beside: the step of the other copy that the sender has of this rank, which stays; -1: it has none
        generation: the start of the workers in which it was made
        world_size: ranks of the job
        rank: whose copy it is
        step: that was copied
        size: bytes of the content
        digest: its xxh3_64
    """

    beside: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
    generation: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")]
    world_size: Count
    rank: Number
    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    size: _Bytes
    digest: Annotated[int, msgspec.Meta(ge=0)]


class CopyKept(Message, frozen=True):
    """Keeper to sender: the copy is there, and whole; or the `reason` why not."""

    rank: Number
    step: int
    reason: str = ""


to_keeper: wire.Decoder[CopyHello | CopyFollows] = wire.Decoder(
    msgspec.msgpack.Decoder(CopyHello | CopyFollows)
)
from_keeper: wire.Decoder[CopyKept] = wire.Decoder(msgspec.msgpack.Decoder(CopyKept))

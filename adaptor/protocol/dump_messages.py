"""The messages between a worker and the store for dumps."""

from __future__ import annotations

import msgspec

from adaptor.protocol import wire
from adaptor.protocol.messages import Message


class Keep(Message, frozen=True):
    """Worker to store: keep `value` under `key`."""

    key: str
    value: bytes


class Ask(Message, frozen=True):
    """Worker to store: answer `Kept` as soon as there is something under `key`."""

    key: str


class Kept(Message, frozen=True):
    """Store to worker: what is under the key that it has asked for, and what else it will ask for."""

    values: dict[str, bytes]


to_store: wire.Decoder[Keep | Ask] = wire.Decoder(msgspec.msgpack.Decoder(Keep | Ask))
from_store: wire.Decoder[Kept] = wire.Decoder(msgspec.msgpack.Decoder(Kept))

"""The messages between an agent and its spares, over a unix socket that is the spare's stdin."""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages import ChangedVariable, Message
from adaptor.protocol.wire import Decoder


class Import(Message, frozen=True):
    """agent -> spare: import what the workers have.

    Attributes:
        path: their `sys.path`
        origins: what they have imported, in that order: names, and the files
        names: what these have from each other (`imported_names.of_modules`)
        variables: environment variables that a worker has changed
        of_a_rank: environment variables that are another one's for each rank: none may be read meanwhile
        environment: variables of all workers that this process does not have yet
        is_alone: nobody trains on this machine, so there is nobody to leave the processors to
    """

    path: tuple[str, ...]
    origins: dict[str, str]
    names: dict[str, bytes]
    variables: dict[str, ChangedVariable]
    of_a_rank: tuple[str, ...]
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    is_alone: bool = False


class Ready(Message, frozen=True):
    """spare -> agent: all is imported; or `unfit` says why this process cannot become a worker."""

    unfit: str = ""


class Become(Message, frozen=True):
    """agent -> spare: be a worker, with this environment and the three streams that follow."""

    environment: dict[str, str]


to_spare: Decoder[Import | Become] = Decoder(msgspec.msgpack.Decoder(Import | Become))
from_spare: Decoder[Ready] = Decoder(msgspec.msgpack.Decoder(Ready))

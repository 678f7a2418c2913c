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
        names: the functions and classes of these at the end of their imports (`imported_names.codes_of`)
        variables: environment variables that a worker has changed
        of_a_rank: environment variables that are another one's for each rank: none may be read meanwhile
        environment: variables of all workers that this process does not have yet
        is_alone: nobody trains on this machine, so there is nobody to leave the processors to
        stop_before: the first module that is not to be imported; empty: import all
    """

    path: tuple[str, ...]
    origins: dict[str, str]
    names: dict[str, bytes]
    variables: dict[str, ChangedVariable]
    of_a_rank: tuple[str, ...]
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    is_alone: bool = False
    stop_before: str = ""


class Ready(Message, frozen=True):
    """spare -> agent: this process can become a worker, unless `unfit` says why it cannot.

    Attributes:
        unfit: why an imported module differs from a worker's; empty: none does
        stop_before: the module whose import has made this process unfit. The spare starts again, and reads
            another `Import`. Empty: nothing that this process leaves out would help.
    """

    unfit: str = ""
    stop_before: str = ""


class Become(Message, frozen=True):
    """agent -> spare: be a worker, with this environment and the three streams that follow."""

    environment: dict[str, str]


to_spare: Decoder[Import | Become] = Decoder(msgspec.msgpack.Decoder(Import | Become))
from_spare: Decoder[Ready] = Decoder(msgspec.msgpack.Decoder(Ready))

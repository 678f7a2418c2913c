"""Answers `ttp drill` on this machine: ends a rank of the job on purpose (TTP_ALLOW_DRILL).

The socket is abstract, and named after the process of `ttprun`. Only the user of the job is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import TYPE_CHECKING

import msgspec

from adaptor import output, text
from adaptor.protocol.records import DrillAnswer, DrillRequest, drill_address
from adaptor.protocol.wire import is_same_user

if TYPE_CHECKING:
    from adaptor.launchers.agent.agent_control import AgentControl


class DrillListener:
    """Answers requests until `close`; used on the control thread."""

    def __init__(self, control: AgentControl) -> None:
        self._control = control
        self._server: asyncio.AbstractServer | None = None

    async def listen(self) -> None:
        """Answer requests from now on; a line says so if the name is taken."""
        try:
            self._server = await asyncio.start_unix_server(self._answer, drill_address(os.getpid()))
        except OSError as error:
            output.tell(f"[ttp] TTP_ALLOW_DRILL: this node cannot answer `ttp drill`: {text.say(error)}")

    async def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            if is_same_user(writer.get_extra_info("socket")):
                request = msgspec.json.decode(await reader.readline(), type=DrillRequest)
                writer.write(msgspec.json.encode(self._drill(request)) + b"\n")

    def _drill(self, request: DrillRequest) -> DrillAnswer:
        control, rank = self._control, -1 if request.rank is None else request.rank
        host = control.controller_host
        if host is None or request.job != control.records.files.job:
            return DrillAnswer(rank, "this ttprun does not run the controller of the job any more")
        members = host.controller.membership
        if request.rank is None and members.alive:
            rank = random.choice(list(members.alive))
        refusal = control.why_not_drill(members) or host.drill(rank, control.workers.newest_step())
        if not refusal:
            output.tell(f"[ttp] drill: rank {rank} is ended on purpose (ttp drill)")
        return DrillAnswer(rank, refusal)

"""The links of an agent to the controller, in this process or on another node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.protocol import wire
from adaptor.protocol.messages import ControllerToAgent, FromAgent


class LocalLink:
    """The link to a controller in this process.

    Args:
        host: drives the controller.
        node: this agent's node.
        on_orders: is called with the orders for this node, possibly before `send` returns.
    """

    def __init__(
        self, host: ControllerHost, node: int, on_orders: Callable[[Sequence[ControllerToAgent]], None]
    ) -> None:
        self._host = host
        self._node = node
        self._on_orders = on_orders

    def send(self, message: FromAgent) -> None:
        """Give `message` to the controller."""
        self._host.receive(self._node, message, self._on_orders)


class RemoteLink:
    """The link to a controller on another node.

    Args:
        writer: of the connection to it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, message: FromAgent) -> None:
        """Send `message` to the controller."""
        self._writer.write(wire.frame(message))

"""Notices that a node between machines is lost, by its silence: the kernel tells, not its processes."""

from __future__ import annotations

import socket

# Between machines, the kernel asks the kernel of the other side after so long without data, and again after
# as long. Processes say nothing: 12,500 nodes that said every half second that they are there would take most
# of a core of the controller. TCP_KEEPIDLE and TCP_KEEPINTVL are whole seconds.
ASK_S = 1
# The time within which the kernel of the other side answers, however busy its processes are; so a slow node
# is not taken for a lost one. By then two questions, or data sent at about 0, 0.2, 0.6 and 1.4 s, have had no
# answer, so one lost packet is no silence. The kernel looks when it would ask again: a lost node is noticed 2
# to 3 s after its loss.
SILENT_S = 2.5


def notice(connection: socket.socket) -> None:
    """Let the kernel end a TCP connection whose other side has fallen silent: powered off, or cut off.

    It sees that by what is sent and not acknowledged; where nothing is sent, it asks.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))

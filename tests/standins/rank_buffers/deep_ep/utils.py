"""`deep_ep.utils`: events, of which a CPU needs none."""

from __future__ import annotations

from typing import Any


class EventHandle:
    """A point in a stream."""


class EventOverlap:
    """Work that may go on beside a stream."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """On a CPU all is done."""

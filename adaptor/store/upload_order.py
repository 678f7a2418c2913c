"""The orders that an agent gives to the uploader of its node."""

from __future__ import annotations

import msgspec


class UploadSettings(msgspec.Struct, frozen=True):
    """The work that an agent gives to its uploader.

    Attributes:
        every: steps that lie at least between two checkpoints that are sent
        keep: how many complete ones stay in the store; 0: all
        rate: bytes in a second of this node, while the job trains; 0: no limit
        node: the number of this node
        nodes: how many nodes the job has
    """

    url: str
    endpoint: str
    save: str
    every: int
    keep: int
    rate: int
    node: int = 0
    nodes: int = 1


class End(msgspec.Struct, frozen=True):
    """The job has ended: send the newest checkpoint within so many seconds; None: without limit."""

    within_s: float | None

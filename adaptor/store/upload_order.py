"""The orders that an agent gives to the uploader of its node."""

from __future__ import annotations

import shlex

import msgspec


class UploadSettings(msgspec.Struct, frozen=True):
    """The work of an uploader of checkpoints.

    Attributes:
        every: the smallest number of steps between two sent checkpoints
        keep: the number of complete checkpoints that stay in the store; 0: all
        rate: bytes per second of this node, while the job trains; 0: no limit
        node: the number of this node
        nodes: the number of nodes of the job
    """

    url: str
    endpoint: str
    save: str
    every: int
    keep: int
    rate: int
    node: int = 0
    nodes: int = 1

    def push_command(self, step: int | None = None) -> str:
        """Return the command line that sends a checkpoint of the save folder by hand.

        Args:
            step: of the checkpoint; None: the newest.
        """
        endpoint = [f"TTP_STORE_ENDPOINT={shlex.quote(self.endpoint)}"] if self.endpoint else []
        step_options = [] if step is None else ["--step", str(step)]
        command_words = ["ttp", "store", "push", self.url, self.save, *step_options]
        return " ".join([*endpoint, *map(shlex.quote, command_words)])


class OutputSettings(msgspec.Struct, frozen=True):
    """The work of an uploader of files that are no checkpoints.

    Attributes:
        folders: the folders of this node to send
        rate: bytes per second of this node, while the job trains; 0: no limit
        node: the number of this node
    """

    url: str
    endpoint: str
    folders: tuple[str, ...]
    rate: int
    node: int = 0


class End(msgspec.Struct, frozen=True):
    """The job has ended: send the remaining files within so many seconds; None: without limit."""

    within_s: float | None

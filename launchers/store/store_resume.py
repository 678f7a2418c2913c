"""Brings the checkpoint of a store to the nodes of a job before its workers start.

Node 0 chooses the step, downloads it to the save folder and tells the other nodes. A node that sees the step
in its folder shares the folder; another node downloads the same step to its own folder: only the part for
its ranks, if known and if nodes keep their ranks at restarts. The script loads from its save folder
(`store_load`), so restarts resume from the save folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import msgspec
from torch.distributed import DistStoreError, Store

from adaptor.checkpoint import tracker
from adaptor.errors import ResumeError
from adaptor.launchers.agent.processes import STORE
from adaptor.launchers.rendezvous.waiting import wait_for
from adaptor.launchers.store.store_load import Load
from adaptor.store import pull
from adaptor.store.pull import NodeRanks

_KEY = "ttp/resume"  # in the store of a generation: the step, or why there is none
_REFUSED = "!"


class StoreResume:
    """Brings the checkpoint before the workers of a generation start.

    Args:
        load: the checkpoint for the script.
        endpoint: the setting TTP_STORE_ENDPOINT.
        keeps_ranks: whether each node has the same ranks at each start.
    """

    def __init__(self, load: Load, endpoint: str, *, keeps_ranks: bool = False) -> None:
        self._load = load
        self._endpoint = endpoint
        self._keeps_ranks = keeps_ranks
        self._is_first = True  # whether the agent's first generation starts

    def prepare(
        self, node: int, nodes: int, store: Store, ranks: Sequence[int] = (), world_size: int = 0
    ) -> None:
        """Bring the checkpoint for the workers of the node to its save folder.

        Args:
            store: has keys of this generation alone.

        Raises:
            ResumeError: nothing can be loaded.
            OSError: no process can be started.
        """
        if node == 0:
            try:
                step = tracker.tracked_step(self._load.save)
                if self._is_first:
                    step = self._pull(self._load.step)
            except BaseException as error:
                if nodes > 1:  # otherwise the other nodes would wait forever
                    store.set(_KEY, f"{_REFUSED}{error or type(error).__name__}")
                raise
            if nodes > 1:
                store.set(_KEY, json.dumps(step))
        elif self._is_first:
            puller = f"node 0, which pulls {self._load.url}"
            start_message = wait_for(lambda: _wait_for_step(store), lambda: puller).decode()
            if start_message.startswith(_REFUSED):
                raise ResumeError(start_message.removeprefix(_REFUSED))
            step = json.loads(start_message)
            if step is not None:
                self._pull_here(step, ranks, world_size)
        self._is_first = False

    def _pull_here(self, step: int, ranks: Sequence[int], world_size: int) -> None:
        """Download to a folder of the node, unless the folder is shared with node 0 or complete."""
        load, needs = self._load, None
        if self._keeps_ranks and ranks and load.sizes is not None:
            needs = NodeRanks(tuple(ranks), world_size, *load.sizes)
        # A part may belong to other ranks.
        if pull.is_part(load.save, step) or not tracker.is_complete(load.save, step):
            self._pull(step, needs)

    def _pull(self, step: int | None, needs: NodeRanks | None = None) -> int | None:
        """Download in another process; return the step, None if the store is empty."""
        load = self._load
        description = f"the checkpoint of {load.url}, which comes to {load.save}"
        command = [
            sys.executable,
            str(STORE),
            "pull",
            load.url,
            self._endpoint,
            str(load.save),
            json.dumps(step),
            msgspec.json.encode(needs).decode(),
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            read = process.stdout.read
            try:
                answer = wait_for(read, lambda: description)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            reason = answer.decode(errors="replace").strip()
            raise ResumeError(
                f"--load: {reason or f'the process that pulls has ended with status {process.returncode}'}"
            )
        pulled: int | None = json.loads(answer)
        return pulled


def _wait_for_step(store: Store) -> bytes:
    """Wait for node 0, however long the download takes."""
    while True:
        try:
            return store.get(_KEY)
        except DistStoreError as error:
            if "timeout" not in str(error).lower():
                raise

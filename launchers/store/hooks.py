"""The hooks of the object store: checkpoint and data before workers start, and the processes that send."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.hooks import AgentHooks
from adaptor.launchers.cli import flags
from adaptor.launchers.store import job_uploads, store_load
from adaptor.launchers.store.job_uploads import JobUploads, OutputUploads
from adaptor.store.settings import StoreSettings

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptor.launchers.store.store_resume import StoreResume


class StoreHooks(AgentHooks):
    """TTP_STORE, TTP_PULL, and `--load` with the URL of a store."""

    def __init__(self, settings: Config) -> None:
        super().__init__(settings)
        self._own = settings.of(StoreSettings)
        self._resume: StoreResume | None = None
        self._checkpoints, self._outputs = JobUploads(self._own), OutputUploads(self._own)
        self._uploads = self._checkpoints, self._outputs  # in the order of their importance

    def require(self) -> None:
        store_load.require_pulls(self._own)

    def check(self, parsed: argparse.Namespace, engine: str) -> None:
        load = store_load.take(parsed)
        if load is None:
            return
        if engine:
            raise ConfigError(
                f"--load is {load.url}: with TTP_ENGINE={engine} nothing is pulled: use ttp store pull, and"
                " its folder"
            )
        from adaptor.launchers.store.store_resume import StoreResume

        keeps = flags.may_have_spares(parsed)  # then nodes have numbers
        self._resume = StoreResume(load, self._own.store_endpoint, keeps_ranks=keeps)

    def prepare(self) -> int:
        if self.settings.enabled:
            job_uploads.require(self._own)
        return store_load.pull_data(self._own)

    def before_workers(
        self, node: int, nodes: int, store: Store, ranks: Sequence[int], world_size: int
    ) -> None:
        if self._resume is not None:
            self._resume.prepare(node, nodes, store, ranks, world_size)

    def begins(self, node: int, nodes: int) -> None:
        for uploads in self._uploads:
            uploads.place(node, nodes)
        self._outputs.begin_outputs()

    def saves_to(self, folder: Path) -> None:
        self._checkpoints.begin(folder)

    def leave(self, grace_s: float) -> None:
        for uploads in self._uploads:
            uploads.leave(grace_s)

    def close(self) -> None:
        for uploads in self._uploads:
            uploads.close()

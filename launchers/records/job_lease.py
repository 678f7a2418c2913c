"""The lease of the save folder, as the agent of node 0 keeps it for the job.

Rank 0 takes it before it trains (`adaptor.checkpoint.lease_claim`), and notes the folder in a file; its agent
refreshes the lease from then on, also while no worker lives, and gives it back at the end.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from adaptor.checkpoint import lease_claim
from adaptor.checkpoint.lease import Lease
from adaptor.checkpoint.lease_owner import Owner


class JobLease:
    """The lease of one job.

    Args:
        scratch: a folder of this agent, in which rank 0 notes the save folder.
        timeout_s: how long a worker waits for a lease that another job is about to give back, in seconds.
    """

    def __init__(self, scratch: Path, timeout_s: float) -> None:
        self._note = scratch / "lease"
        self._timeout_s = timeout_s
        self._owner = Owner.of(os.getpid())
        self._lease: Lease | None = None

    def environment(self) -> dict[str, str]:
        """Return what a worker has to know to take the lease: environment variables."""
        return {
            lease_claim.NOTE: str(self._note),
            lease_claim.PATIENCE: f"{self._timeout_s:g}",
            lease_claim.OWNER: msgspec.json.encode(self._owner).decode(),
        }

    def keep(self, save: Path) -> None:
        """Refresh the lease of `save`, which rank 0 has taken, until `release`."""
        if self._lease is None:
            self._lease = Lease(save, self._owner)
            self._lease.keep()

    def mark_leaving(self) -> None:
        """Let a job that is started again wait: this one ends, and may save until then."""
        if self._lease is not None:
            self._lease.leave()

    def release(self) -> None:
        """Give it back; also one that rank 0 had taken before training began."""
        if self._lease is None:
            with contextlib.suppress(OSError):
                self._lease = Lease(Path(self._note.read_text()), self._owner)
        if self._lease is not None:
            self._lease.release()
            self._lease = None

"""The agent's work in the save folder: orders of the controller in threads, and the lease.

The disk may be slow or hang, so no order runs on the control thread.

Rank 0 takes the lease before it trains (`checkpoint.save_folder_claim`), and notes the folder in a file; the
agent of node 0 refreshes the lease from then on, also without living workers, and releases it at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from adaptor import text
from adaptor.checkpoint import disk, left_overs, publish, save_folder_claim, tracker
from adaptor.checkpoint.lease import Lease, LeaseOfOthers, go_on_without
from adaptor.checkpoint.lease_content import Owner
from adaptor.errors import CheckpointError
from adaptor.launchers.agent.control_thread import call_in_thread
from adaptor.launchers.rendezvous.waiting import OtherSideError
from adaptor.protocol import naming
from adaptor.protocol.messages import Find, FromAgent, Prepare, Prepared, Publish, Published, PublishFailed
from adaptor.protocol.wire import deadline
from adaptor.threads import Reserve

P = ParamSpec("P")
T = TypeVar("T")

# The time to remove unpublished files; the next start removes the rest.
CLEAN_S = 30.0
# Threads started before an incident: one for the work, one in case the first hangs.
RESERVE = 2


class SaveFolderTasks:
    """Carries out orders of the controller; an error becomes an answer, because the controller waits for
    an answer.

    Attributes:
        moved: a count of progress, like the counts on the workers' boards
        saves: the save folders of the node's workers; an order for another folder is refused
    """

    def __init__(self) -> None:
        self._threads = Reserve("ttp-save-folder")
        self._threads.prepare(RESERVE)
        self._running: set[Callable[[], object]] = set()
        self.moved = 0
        self.saves: set[str] = set()
        self._expects_parts = False

    def close(self) -> None:
        self._threads.close()

    @property
    def busy(self) -> bool:
        """Return True while a thread is at work, even if nobody waits for the result."""
        return bool(self._running)

    def expect_parts(self) -> None:
        """Prepare, in a thread and once, to join last words of parts: a fault leaves no time."""
        if not self._expects_parts:
            self._expects_parts = True
            with contextlib.suppress(RuntimeError):  # without a thread `publish` prepares
                self._threads.run("ttp-get-ready", publish.get_ready)

    async def do(self, order: Prepare | Publish | Find, node: int, generation: str) -> FromAgent:
        """Carry out `order` and return the answer.

        Args:
            generation: of the workers of the incident, a part of folder names.
        """
        root = Path(order.save_folder)
        match order:
            case Prepare():
                make = functools.partial(
                    publish.prepare, root, order.step, order.term, order.number, generation, first=order.first
                )
                try:
                    folder = await self.in_thread(self._below, root, make)
                except Exception as error:
                    return Prepared(node, order.incident, "", _line(error), order.number)
                return Prepared(node, order.incident, str(folder), "", order.number)
            case Publish():
                act = functools.partial(self._publish, root, order, generation)
            case Find():
                act = functools.partial(publish.find, root, order.step, generation)
        try:
            step = await self.in_thread(self._below, root, act)
            path = str(root / naming.final_name(step))
            return Published(node, order.incident, step, path, order.number)
        except Exception as error:
            return PublishFailed(node, order.incident, _line(error), order.number)

    def _below(self, root: Path, act: Callable[[], T]) -> T:
        """Call `act`, after checking that the node's workers save to `root`."""
        if not any(disk.is_same(root, Path(save)) for save in self.saves):
            known_folders = " or ".join(sorted(self.saves)) or "none yet"
            raise CheckpointError(f"{root}: is not the save folder of this node's workers ({known_folders})")
        return act()

    def _publish(self, root: Path, order: Publish, generation: str) -> int:
        publish_arguments = (order.step, order.files, order.writers, order.world_size, generation)
        publish.publish(root, *publish_arguments, order.term, order.number, order.written, self._move)
        # The other side of a cut network may have saved a later step.
        return max(order.step, tracker.tracked_step(root) or 0)

    def _move(self) -> None:
        self.moved += 1

    async def clean(
        self, root: Path, term: int | None = None, generation: str = "", *, saves: bool = True
    ) -> None:
        """Call `left_overs.clean`, and wait at most CLEAN_S: the disk may hang. `saves` is passed on."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with deadline(CLEAN_S):
                await self.in_thread(left_overs.clean, root, term, generation, saves=saves)

    async def in_thread(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in a thread that is never joined; the thread counts as running until its end."""
        job = functools.partial(act, *args, **kwargs)

        def run() -> T:
            try:
                return job()
            finally:
                self._running.discard(job)

        self._running.add(job)
        try:
            return await call_in_thread(self._threads, "ttp-save-folder", run)
        except RuntimeError:
            self._running.discard(job)
            raise


def _line(error: BaseException) -> str:
    return text.encodable(str(error)) if isinstance(error, CheckpointError) else text.describe(error)


class JobLease:
    """The lease of one job.

    Args:
        scratch: a folder of this agent, in which rank 0 notes the save folder.
        timeout_s: how long a worker waits for a lease of a job that is about to end, in seconds.

    Attributes:
        store: HOST:PORT of a rendezvous store in the place of the store of node 0; "": the lease has it.
    """

    def __init__(self, scratch: Path, timeout_s: float) -> None:
        self._note = scratch / "lease"
        self._timeout_s = timeout_s
        self._owner = Owner.of(os.getpid())
        self.store = ""
        self._lease: Lease | None = None
        self._of_others: LeaseOfOthers | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a worker takes the lease."""
        return {
            save_folder_claim.NOTE: str(self._note),
            save_folder_claim.PATIENCE: f"{self._timeout_s:g}",
            save_folder_claim.STORE: self.store,
            save_folder_claim.OWNER: msgspec.json.encode(self._owner).decode(),
        }

    def keep(self, save: Path) -> None:
        """Refresh the lease of `save`, taken by rank 0, until `release`."""
        if self._lease is None:
            self._lease = Lease(save, self._owner)
            self._lease.keep()

    def go_on_without(
        self,
        save: str,
        generation: str,
        members: Collection[str],
        lost: Collection[str],
        *,
        is_first: bool,
        store: str = "",
        leaving: bool = False,
    ) -> str:
        """Note that the job goes on without lost agents (`lease.go_on_without`); return why not, or "".

        Blocks while the disk does.

        Args:
            save: the save folder; "": the job has none.
            is_first: whether this agent was node 0 of the generation.
            store, leaving: as in `lease.go_on_without`.
        """
        if not save:
            return "" if is_first else "the job has no save folder, by which two sides could be kept apart"
        try:
            go_on_without(
                Path(save),
                self._owner,
                generation,
                members,
                lost,
                has_lease=is_first,
                store=store,
                leaving=leaving,
            )
        except (CheckpointError, OSError) as error:
            return _line(error)
        if not is_first:
            self.keep(Path(save))
        return ""

    def watch(self, save: str, agent: str) -> None:
        """Let `require_own` look at the lease of another agent, which may be behind a cut network.

        Args:
            save: the save folder; "": look at no lease of another agent.
            agent: as in `LeaseOfOthers`.
        """
        self._of_others = LeaseOfOthers(Path(save), agent) if save else None

    def require_own(self) -> None:
        """Check, while this node waits for others, that no other job has taken the lease of this one.

        Raises:
            OtherSideError: another process has the lease, as the other side of a cut network that goes on.
        """
        lease = self._lease or self._of_others
        if lease is not None and (owner_name := lease.other_job()):
            raise OtherSideError(f"{owner_name}, saves in --save now, and goes on without this node")

    def mark_leaving(self) -> None:
        """Let the next job wait: the job ends, and may save until then."""
        if self._lease is not None:
            self._lease.leave()

    def release(self, *, stays: bool = False) -> None:
        """Release the lease, also a lease that rank 0 took before training began.

        Args:
            stays: as in `Lease.release`.
        """
        if self._lease is None:
            with contextlib.suppress(OSError):
                self._lease = Lease(Path(self._note.read_text()), self._owner)
        if self._lease is not None:
            self._lease.release(stays=stays)
            self._lease = None

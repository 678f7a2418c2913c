"""The interface between a framework's training state and the session that has it saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from adaptor.devices.device import Device
from adaptor.protocol.file_entry import FileEntry
from adaptor.protocol.messages import GroupOrder, Share


class Trainee(Protocol):
    """A framework's training state, as session and processor need it.

    Methods marked "main thread" are called there, the others in the thread of a dump.
    """

    @property
    def save(self) -> str:
        """The folder of checkpoints, absolute; empty where handlers of the script write and name them."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return what this rank holds."""

    @property
    def device(self) -> Device:
        """Return where its tensors lie."""

    @property
    def in_parts(self) -> bool:
        """Return True if who publishes its last words joins them of parts."""

    @property
    def survives(self) -> str:
        """Return how many ranks and nodes the job can lose, in words, as `replica.tolerance` computes it."""

    def take_record(self, step: int) -> Any:
        """Return what belongs to finished `step` besides tensors (counters, schedule, RNG); main thread."""

    def snapshot_before_update(self) -> Any:
        """Return what the step has changed before its update (or its skip); main thread.

        With it a dump that lets the main thread make the update needs nothing else from that thread.
        """

    def derive(self, record: Any, door: Any, updated: bool) -> Any:
        """Compute the record of the step after `record`, which the main thread has not reached.

        Args:
            record: from `take_record`, of the step before.
            door: from `snapshot_before_update`, of the step itself.
            updated: the step had an update (it was not skipped).
        """

    @property
    def has_local_copy(self) -> bool:
        """Return True if this rank keeps a local copy of the state before an update; it needs no barrier."""

    def exchange(self) -> None:
        """Fetch the gradients that this rank's copies of other shards need for this step; main thread.

        When it returns, the device has finished everything that this thread has started.
        """

    def barrier(self) -> None:
        """Return when every rank of the job has called it; raise when that is no longer possible."""

    def copy_state(self) -> None:
        """Copy what the update will change into the local copy; main thread, past the door."""

    def update_replicas(self) -> None:
        """Update the copies of other ranks' shards, by itself; main thread, after the own update."""

    def has_state(self) -> bool:
        """Return False while the optimizer lacks state that is saved (before its first update)."""

    def dump(self, record: Any, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        """Do this rank's part of saving a group; in the thread of the dump.

        Args:
            record: of the step, from `take_record` or `derive`.
            order: the ranks that give the shards, and the writer.
            run: the folder, the partners, and the callbacks of this dump.

        Returns:
            The written files on the writer, nothing on the other ranks.

        Raises:
            NotFiniteError: on the writer, before it writes, unless `run.as_is`.
        """


class StateCopier(Protocol):
    """Copies the state of finished steps into host memory (TTP_HOST_COPY); called on the main thread."""

    def forget_after(self, step: int) -> None:
        """Give up copies of later steps, once none is being made: the job goes on from `step`."""

    def copy(self, trainee: Any, record: Any, mark: Any, *, is_intact: bool) -> None:
        """Begin the copy of the step of `record` where one is due; then collective.

        Args:
            trainee: whose live state it is, if it `is_intact`.
            record: of the step, from `Trainee.take_record`.
            mark: the device's, behind the update of the step and the record.
            is_intact: whether the live state is that of the step.
        """

    def wait(self) -> None:
        """Wait for the copy that is being made: the state is about to change."""

    def stop(self) -> None:
        """Give up the copy that is being made: the state is about to change, in an incident."""


class NotFiniteError(Exception):
    """The shards that `ranks` gave have a nan or an infinity in them; another copy may have none."""

    def __init__(self, subject: str, ranks: tuple[int, ...]) -> None:
        super().__init__(subject)
        self.ranks = ranks


@dataclass(frozen=True)
class DumpRun:
    """The needs of a dump besides the state: its folder, its partners, and when to stop.

    Attributes:
        past: save the local copy, not the live state
        as_is: write it whether it is finite or not
        remark: is told what is not finite in what is written
        in_place: the holders may write their shards into the files of the writer
        groups: all that this rank takes part in, in the order in which `dump` is called for them
        wake: lets raise what hangs in a collective of this process
    """

    rank: int
    folder: str
    attempt: int
    connect: Callable[[tuple[int, ...]], Any]
    progress: Callable[[int], None]
    cancelled: Callable[[], bool]
    past: bool
    as_is: bool = True
    in_place: bool = False
    remark: Callable[[str], None] = lambda subject: None
    groups: tuple[GroupOrder, ...] = ()
    wake: Callable[[], int] = lambda: 0

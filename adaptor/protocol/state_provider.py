"""The interface between a framework's training state and the session that has it saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from adaptor.devices.device import Device
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.naming import FileEntry


class Trainee(Protocol):
    """A framework's training state, for session and processor.

    Methods marked "main thread" are called there, the others in the thread of a dump.
    """

    @property
    def save_folder(self) -> str:
        """Return the save folder, absolute; "" if handlers of the script write and name checkpoints."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return the shards of this rank."""

    @property
    def device(self) -> Device:
        """Return the device of its tensors."""

    @property
    def in_parts(self) -> bool:
        """Return True if last words are written in parts, which the publishing agent joins."""

    @property
    def survives(self) -> str:
        """Return the number of ranks and nodes that the job can lose, in words (`replica.tolerance`)."""

    def take_record(self, step: int) -> Any:
        """Return the state of finished `step` besides tensors (counters, schedule, RNG); main thread."""

    def snapshot_before_update(self) -> Any:
        """Return the changes of the step before its update (or its skip); main thread.

        With the snapshot a dump that lets the main thread make the update needs nothing else from the main
        thread.
        """

    def derive(self, record: Any, door: Any, updated: bool) -> Any:
        """Compute the record of the step after `record`, which the main thread has not reached.

        `door`: from `snapshot_before_update`, of the step itself, which was `updated`, or skipped.
        """

    def require_as_derived(self, taken: Any, derived: Any) -> None:
        """Check that `derive` computes the record which the script then has; main thread.

        Raises:
            StepError: the script has moved its scheduler by another number of samples than it has said.
        """

    @property
    def has_local_copy(self) -> bool:
        """Return True if this rank keeps a local copy of the state before an update, and needs no barrier."""

    def exchange(self) -> None:
        """Fetch the gradients that this rank's copies of other shards need for the step; main thread.

        On return the device has finished all work of this thread.
        """

    def barrier(self) -> None:
        """Return when every rank of the job has called this; raise when no longer possible."""

    def copy_state(self) -> None:
        """Copy the state that the update will change into the local copy; main thread, past the door."""

    def update_replicas(self) -> None:
        """Update the copies of other ranks' shards, after the own update; main thread."""

    def after_evaluation(self) -> None:
        """Note what an evaluation has changed between two steps: collective, on the main thread."""

    def has_state(self) -> bool:
        """Return False while the optimizer lacks saved state (before its first update)."""

    def dump(self, record: Any, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        """Do this rank's part of saving a group; in the thread of the dump.

        `record` is from `take_record` or `derive`. Returns the written files on the writer, nothing on other
        ranks. Raises NotFiniteError on the writer, before the write, unless `run.as_is`.
        """


class StateCopier(Protocol):
    """Copies the state of finished steps into host memory (TTP_HOST_COPY); called on the main thread."""

    sure: int  # the newest step of which all ranks are known to have a copy; -1: none

    @property
    def steps_between(self) -> int:
        """Return the most steps between two copies."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps of this rank's whole copies; from any thread."""

    def forget_after(self, step: int) -> None:
        """Give up copies of later steps, while no copy is being made: the job goes on from `step`."""

    def copy(
        self, trainee: Any, record: Any, mark: Any, *, is_intact: bool, kept: Callable[[], bytes]
    ) -> None:
        """Begin the copy of the step of `record` if a copy is due; then collective.

        `trainee` has the live state of the step, if `is_intact`; `mark` is the device's, after the update of
        the step and the record; `kept` returns what the board keeps for a successor of this process.
        """

    def wait(self) -> None:
        """Wait for a copy in progress: the state is about to change."""

    def stop(self) -> None:
        """Give up a copy in progress: the state is about to change, in an incident."""


class StepVerifier(Protocol):
    """Compares the holders of the state in verified steps (TTP_VERIFY_EVERY); called on the main thread,
    unless a method says otherwise.
    """

    def begin(self, trainee: Any, restored: int | None = None) -> None:
        """Begin with the state of `trainee`; collective. Raises UnsupportedError without second holders.

        `restored`: the step of the state after an incident, which is compared before the next update; None:
        training begins.
        """

    def after_update(self, trainee: Any, step: int) -> None:
        """Compute the sums of the state after the update of `step` if it is a verified step."""

    def begin_step(self, trainee: Any) -> None:
        """Compute the sum of the weights that a step begins with."""

    def is_equal(self, trainee: Any, step: int, *, is_saved: bool = False) -> bool:
        """Return False if the holders differ, or a shard has changed since its update; the controller has
        been told then. Collective in verified steps, and before a save.

        Args:
            trainee: of the rank.
            step: whose update is about to be made; `is_saved`: the finished step to be saved.
            is_saved: the comparison is before a save.

        Raises:
            RuntimeError: a rank is gone.
        """

    def require_unchanged(self, trainee: Any, step: int, indices: Collection[int]) -> None:
        """Check that shards have not changed since a verified update; in the thread of a dump.

        Args:
            trainee: of the rank.
            step: of the state in memory.
            indices: of the shards.

        Raises:
            CheckpointError: a shard has changed.
        """


class NotFiniteError(Exception):
    """The shards that `ranks` gave have a nan or an infinity; another copy may be finite."""

    def __init__(self, subject: str, ranks: tuple[int, ...]) -> None:
        super().__init__(subject)
        self.ranks = ranks


@dataclass(frozen=True)
class DumpRun:
    """The parameters of a dump besides the state: its folder, its partners, and its callbacks.

    Attributes:
        remark: is called with a text about written parts that are not finite
        in_place: the holders may write their shards into the files of the writer
        groups: all groups with this rank, in the order of the calls of `dump`
        wake: makes hanging collectives of this process raise
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

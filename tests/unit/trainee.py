"""A training state small enough to check by hand, behind the `Trainee` interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptor.devices.device import HOST, Device
from adaptor.errors import StepError
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.state_provider import DumpRun
from adaptor.worker.session import Session

BATCH = 4


def nothing() -> None:
    """Do nothing: for example the barrier of a job of one rank."""


@dataclass(frozen=True)
class Record:
    """The state of a step besides tensors."""

    step: int
    samples: int
    scale: float


@dataclass
class CountingTrainee:
    """A trainee with one number as tensors, one as counter, and one as loss scale.

    Attributes:
        weights: the step of the last update.
        copied: the weights in the local copy.
        samples: counted after each step, updated or skipped.
        scale: lowered by a skipped step, before the optimizer returns.
        counts_samples: whether `require_as_derived` compares the sample counts.
    """

    save_folder: str = ""
    shares: tuple[Share, ...] = ()
    in_parts: bool = False
    survives: str = "split; any 1 rank"
    device: Device = HOST
    barrier: Callable[[], None] = nothing
    weights: int = 0
    samples: int = 0
    scale: float = 1024.0
    updated_once: bool = True
    has_local_copy: bool = False
    copied: int = -1
    on_copy: Callable[[], Any] = nothing
    on_record: Callable[[], Any] = nothing
    counts_samples: bool = False
    derived: list[int] = field(default_factory=list)

    def exchange(self) -> None:
        """Do nothing: no shard of another rank is mirrored."""

    def copy_state(self) -> None:
        self.copied = -1
        self.on_copy()
        self.copied = self.weights

    def update_replicas(self) -> None:
        """Do nothing: no shard of another rank is mirrored."""

    def after_evaluation(self) -> None:
        """Do nothing: an evaluation changes no state."""

    def take_record(self, step: int) -> Record:
        self.on_record()
        return Record(step, self.samples, self.scale)

    def snapshot_before_update(self) -> float:
        return self.scale

    def derive(self, record: Record, door: float, updated: bool) -> Record:
        self.derived.append(record.step + 1)
        assert updated == (door == record.scale)
        return Record(record.step + 1, record.samples + BATCH, door)

    def require_as_derived(self, taken: Record, derived: Record) -> None:
        if self.counts_samples and taken.samples != derived.samples:
            raise StepError(f"{taken.samples} samples, not {derived.samples}")

    def has_state(self) -> bool:
        return self.updated_once

    def dump(self, record: Record, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        """Write the weights and the record on the writer alone, without a collective."""
        if order.writer != run.rank:
            return ()
        path = Path(run.folder) / f"{order.group}.txt.{run.attempt}"
        weights = self.copied if run.past else self.weights
        text = f"{weights} {record.step} {record.samples} {record.scale}\n"
        path.write_text(text)
        run.progress(len(text))
        return (FileEntry(f"{order.group}.txt", len(text), None, run.attempt),)


class Loop:
    """A training loop as in Megatron: the scheduler and the counters change after the optimizer."""

    def __init__(self, session: Session, trainee: CountingTrainee, optimizers: int = 1) -> None:
        self.session, self.trainee = session, trainee
        self.inner = [object() for _ in range(optimizers)]

    def begin(self, origin: int) -> None:
        self.trainee.weights, self.trainee.samples = origin, origin * BATCH
        self.session.begin_training(self.trainee, self.inner, origin)

    def step(self, step: int) -> None:
        self.session.begin_step(step)
        self.update(step)
        self.trainee.samples += BATCH

    def update(self, step: int) -> None:
        for optimizer in self.inner:
            self.session.before_update(optimizer)
            self.trainee.weights = step
            self.trainee.updated_once = True
            self.session.after_update(optimizer)
        self.session.end_update(True, 1.5)

    def skip(self, step: int) -> None:
        """Train a step that overflows, without calling the optimizer."""
        self.session.begin_step(step)
        self.overflow()
        self.trainee.samples += BATCH

    def overflow(self) -> None:
        self.trainee.scale -= 1
        self.session.end_update(False, None)

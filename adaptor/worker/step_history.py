"""The records of the last steps: the part of each step's state besides tensors, for a dump.

The main thread adds records, the processor's threads read them: the content is a single value, always
replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adaptor.protocol.state_provider import Trainee

# The longest wait, in seconds, for the device's copy of a record: a collective that never ends may be queued
# before it.
RECORD_S = 2.0


class TakenRecord(NamedTuple):
    """A record, and the device's event after which the tensors are complete; None: complete already."""

    record: Any
    mark: Any


@dataclass(frozen=True)
class _Content:
    """The content of the history.

    Attributes:
        records: by finished step.
        snapshot_step: the newest step that was updated or skipped.
        snapshot: the changes of the step before its update.
        updated: whether the step was updated; False: the step was skipped.
    """

    records: dict[int, TakenRecord] = field(default_factory=dict)
    snapshot_step: int = -1
    snapshot: Any = None
    updated: bool = True


class StepHistory:
    """The history of one training; `reset` begins another."""

    def __init__(self) -> None:
        self._content = _Content()

    @property
    def snapshot_step(self) -> int:
        """Return the newest step that was updated or skipped; -1: none."""
        return self._content.snapshot_step

    def reset(self, records: Mapping[int, TakenRecord] | None = None) -> None:
        """Forget all but `records`, by finished step."""
        self._content = _Content(dict(records or {}))

    def add(self, records: Mapping[int, TakenRecord], oldest: int, newest: int) -> None:
        """Add `records`, by finished step, and drop the records of steps no longer needed.

        Args:
            records: the records to add.
            oldest, newest: the finished steps savable from this rank.
        """
        content = self._content
        # Keep the record of the step before the newest snapshot, too: the newest record derives from it.
        oldest = min(oldest, content.snapshot_step - 1)
        newest = max(newest, content.snapshot_step - 1)
        kept = {step: taken for step, taken in content.records.items() if oldest <= step <= newest}
        self._content = _Content(
            {**kept, **records}, content.snapshot_step, content.snapshot, content.updated
        )

    def add_snapshot(self, step: int, snapshot: Any, updated: bool) -> None:
        """Add the `snapshot` of the changes in `step` before its update, if the step has an update
        (`updated`).
        """
        self._content = _Content(self._content.records, step, snapshot, updated)

    def record_of(self, step: int, trainee: Trainee) -> Any:
        """Return the record of `step`: everything besides tensors.

        Raises:
            LookupError: the record has been dropped.
        """
        content = self._content
        taken, record_before = content.records.get(step), content.records.get(step - 1)
        if taken is not None and trainee.device.done(taken.mark):
            return taken.record
        # Not taken yet, or queued behind a collective that never ends; the snapshot was taken before that.
        if content.snapshot_step == step and record_before is not None:
            return trainee.derive(record_before.record, content.snapshot, content.updated)
        if taken is not None and trainee.device.wait(taken.mark, RECORD_S):
            return taken.record
        raise LookupError(f"step {step} is not among the steps that this rank still knows")

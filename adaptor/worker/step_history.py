"""The records of the last steps, from which a dump takes what belongs to its step besides tensors.

The main thread adds to it, the processor's threads read it: all of it is one value, which is replaced as a
whole.
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
    """A record, and the device's event after which its tensors are complete; None: they are complete."""

    record: Any
    mark: Any


@dataclass(frozen=True)
class _Content:
    """The content of the history.

    Attributes:
        records: by finished step.
        snapshot_step: the newest step that has come to its update, or was skipped.
        snapshot: what that step had changed before its update.
        updated: whether that step was updated; False: it was skipped.
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
        """Return the newest step that has come to its update, or was skipped; -1: none."""
        return self._content.snapshot_step

    def reset(self, records: Mapping[int, TakenRecord] | None = None) -> None:
        """Forget all but `records`, by finished step."""
        self._content = _Content(dict(records or {}))

    def add(self, records: Mapping[int, TakenRecord], oldest: int, newest: int) -> None:
        """Add `records`, by finished step, and drop those of steps that nobody asks for any more.

        Args:
            records: those that are added.
            oldest, newest: the finished steps that can be saved from this rank.
        """
        content = self._content
        # Keep the record of the step before the one at its update, too: that one's can be derived from it.
        oldest = min(oldest, content.snapshot_step - 1)
        newest = max(newest, content.snapshot_step - 1)
        kept = {step: taken for step, taken in content.records.items() if oldest <= step <= newest}
        self._content = _Content(
            {**kept, **records}, content.snapshot_step, content.snapshot, content.updated
        )

    def add_snapshot(self, step: int, snapshot: Any, updated: bool) -> None:
        """Add the `snapshot` of what `step` has changed before its update, if it has one (`updated`)."""
        self._content = _Content(self._content.records, step, snapshot, updated)

    def record_of(self, step: int, trainee: Trainee) -> Any:
        """Return what belongs to `step` besides tensors.

        Raises:
            LookupError: it is not known any more.
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

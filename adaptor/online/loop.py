"""The interface of a framework's training loop for online recovery: the loop can be called again from the end
of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee


class Loop(Protocol):
    """A framework's training loop, which can be called again. All on the main thread."""

    def group(self) -> str:
        """Return the name of the files writable by this rank: ranks of a group write the same files."""

    def optimizer(self) -> Any:
        """Return the framework's optimizer, or chain of optimizers."""

    def model(self) -> Any:
        """Return the chunks of the model."""

    def answers(self, step: int) -> Mapping[str, Any]:
        """Return what a newcomer, which joins at `step`, would have asked of other ranks at its start."""

    def settle(self, step: int) -> None:
        """Forget what an exception has left half done; the data since `step` will be given again."""

    def trainee(self, record: StepRecord) -> MegatronTrainee:
        """Describe this rank's state: collective, over the new groups."""

    def agree(self, step: int) -> None:
        """Learn whether a rank has left what comes after `step`: collective, over the new groups."""

    def put_back(self, record: StepRecord) -> None:
        """Set the framework's counters to the values of the step, as the loop reads them when called."""

    def finish_step(self) -> None:
        """Finish the work after the step (evaluation, a save) where a rank has not finished."""

    def gather_weights(self) -> None:
        """Make the model's weights from main params: collective, over the new groups."""

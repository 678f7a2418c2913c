"""The base class of the training loops of Megatron-LM and ModelLink, called again after a recovery.

Both have `get_args` in a package with `get_checkpoint_name` beside it, and count on the same arguments; a
subclass names the package (`online.loop.Loop` documents the methods).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptor.checkpoint.step_record import StepRecord
from adaptor.frameworks.step_log import StepLog
from adaptor.frameworks.step_tail import StepTail, TailState
from adaptor.online.replay import Replay
from adaptor.worker import runtime

# What a step, and the evaluation behind it, count on.
_CONSUMED = ("consumed_train_samples", "consumed_valid_samples")


class TrainingLoop:
    """A training loop, as it was called.

    Args:
        train_call: the arguments of the call of `train`, by their names.
        scheduler: of the learning rate; an argument of the call.
        train: the replayable data of training.
        valid: the replayable data of evaluation.
        start_answers: in a newcomer, the answers of other ranks to the framework's start-up questions.

    Attributes:
        framework: the package with `get_args`, and with the module `checkpointing`
        module: the module of the loop, by whose names it evaluates, writes its log and saves
        args: returns the arguments of the framework
        everyone: the adaptor's group of all ranks
        log: the loop's log
    """

    framework: str
    module: str
    log: StepLog

    def __init__(
        self,
        train_call: Mapping[str, Any],
        scheduler: Any,
        train: Sequence[Replay],
        valid: Sequence[Replay],
        start_answers: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.args: Callable[[], Any] = importlib.import_module(self.framework).get_args  # asked in each step
        self._given = train_call
        self._model: Sequence[Any] = train_call["model"]
        self._optimizer = train_call["optimizer"]
        self._scheduler = scheduler
        self._train, self._valid = train, valid
        self._tail = StepTail(valid, TailState(**start_answers["tail"]) if "tail" in start_answers else None)
        self._record: StepRecord | None = None
        self._board = runtime.get().session.board
        # Where the board is lost with its node, the twin's part of the log is all that is left.
        self._kept: bytes = self._board.kept or start_answers.get("log", {}).get("kept", b"")
        self._device = next(
            (parameter.device for chunk in self._model for parameter in chunk.parameters()), "cpu"
        )
        self.everyone: dist.ProcessGroup | None = None

    def set_args(self, values: Mapping[str, Any]) -> None:
        """Set arguments of the framework."""
        set_args(self.args(), values)

    def _common_answers(self, step: int) -> dict[str, Any]:
        """Return the part of `answers` with the work of a step after its update."""
        return {"tail": self._tail.state(step)._asdict(), "log": {"kept": self.log.state(step)}}

    def group(self) -> str:
        checkpointing = importlib.import_module(f"{self.framework}.checkpointing")
        return Path(checkpointing.get_checkpoint_name("", 0)).parent.name

    def optimizer(self) -> Any:
        return self._optimizer

    def model(self) -> Any:
        return self._model

    def begin_step(self, step: int) -> None:
        """`step` begins, for the first time or once more."""
        args = self.args()
        self.log.begin_step(step)
        self._tail.begin_step(step, {name: getattr(args, name) for name in _CONSUMED})
        for replay in self._train:
            replay.begin_step(step)

    def end_step(self) -> None:
        """A step has ended; the loop counts the step, and writes the step's line."""

    def end(self) -> None:
        """The loop is over."""

    def agree(self, step: int) -> None:
        def all_have(is_done: bool) -> bool:
            vote = torch.tensor([int(is_done)], device="cpu")
            dist.all_reduce(vote, dist.ReduceOp.MIN, self.everyone)
            return bool(vote.item())

        self._tail.agree(step, all_have)

    def put_back_consumed(self, step: int) -> int:
        """Set how many samples were consumed when the loop is called again after `step`.

        Returns:
            The samples of training, which determine the size of the loop's batches.
        """
        if not self._tail.is_pending:
            return int(self.args().consumed_train_samples)
        # The line of the step, and its evaluation, have batches of its size.
        consumed_before = self._tail.consumed_before(step)
        self.set_args({"consumed_valid_samples": consumed_before["consumed_valid_samples"]})
        return int(consumed_before["consumed_train_samples"])


def set_args(args: Any, values: Mapping[str, Any]) -> None:
    """Set some arguments of a framework."""
    for name, value in values.items():
        setattr(args, name, value)

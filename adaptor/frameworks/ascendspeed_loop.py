"""ModelLink's training loop, which is called again from the end of a finished step (online recovery).

The loop reads nearly all of its state from the arguments when called. Lines are those of commit af1347
(`ascendspeed/training.py`).
"""

from __future__ import annotations

import copy
import importlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.frameworks import ascendspeed
from adaptor.frameworks.ascendspeed_log import AscendLog
from adaptor.frameworks.training_loop import TrainingLoop
from adaptor.online.replay import Replay

# What the framework finds out by asking other ranks before its loop, and keeps in its arguments.
_ASKED = ("do_train", "do_valid", "do_test")
NAMES = (
    *("forward_step_func", "model", "optimizer", "lr_scheduler"),
    *("train_data_iterator", "valid_data_iterator", "config"),
)


class AscendLoop(TrainingLoop):
    """ModelLink's training loop, as it was called (`rejoin.Loop`).

    Args:
        train_call: the arguments of the call of `train`, by their names; the loop's iterators are replaced.
        start_answers: in a newcomer, the answers of other ranks to the framework's start-up questions.
    """

    framework = "ascendspeed"
    module = "ascendspeed.training"

    def __init__(self, train_call: dict[str, Any], start_answers: Mapping[str, Mapping[str, Any]]) -> None:
        train = train_call["train_data_iterator"] = _replayed(train_call["train_data_iterator"])
        # In the caller's own list: behind the loop it evaluates once more.
        iterators = train_call["valid_data_iterator"]
        iterators[:] = map(_replayed, iterators)
        valid: list[Replay] = [iterator for iterator in iterators if iterator is not None]
        super().__init__(
            train_call, train_call["lr_scheduler"], [] if train is None else [train], valid, start_answers
        )
        self._start: int = (
            start_answers["start"]["iteration"] if "start" in start_answers else self.args().iteration
        )
        keep = self._board.keep
        self.log = AscendLog(keep, self._kept, self._start, self.module, device=self._device)

    def answers(self, step: int) -> Mapping[str, Any]:
        args = self.args()
        asked_values = {name: getattr(args, name) for name in _ASKED if hasattr(args, name)}
        start = {"iteration": self._start}
        return {"asked": asked_values, "start": start, **self._common_answers(step)}

    def settle(self, step: int) -> None:
        from ascendspeed import get_timers

        for replay in self._train:
            replay.rewind(step)
        for chunk in self._model:
            for param in chunk.parameters():
                param.grad = None
        for timer in copy.copy(get_timers()._timers).values():
            timer.reset()  # one that has begun must not begin again

    def trainee(self, record: StepRecord) -> MegatronTrainee:
        return ascendspeed.trainee(self._model, self._optimizer, self._scheduler, self.everyone)

    def put_back(self, record: StepRecord) -> None:
        from ascendspeed import get_timers, update_num_microbatches

        self._record = record
        self.set_args({**record.counters, "iteration": record.step})
        consumed = self.put_back_consumed(record.step)
        self.log.go_back(record.step)
        update_num_microbatches(consumed, consistency_check=False)
        config = self._given["config"]
        if config is not None:  # in a newcomer the loop has not set them yet (1145)
            config.grad_scale_func, config.timers = self._optimizer.scale_loss, get_timers()

    def finish_step(self) -> None:
        record, self._record = self._record, None
        if record is None:  # the loop is called for the first time
            return
        assert self.everyone is not None
        if record.step > self._start:  # else its line is in the log of the job before
            # A rank that was lost before it wrote the line may have let all others begin the next step.
            self.log.complete(record.step, self.everyone, self._optimizer, self._model)
        if self._tail.take_pending() is not None:
            self._make_tail(record.step)

    def _make_tail(self, step: int) -> None:
        """Evaluate, save and end the job behind `step` as the loop does (1224 to 1264)."""
        training, args, train_call = importlib.import_module(self.module), self.args(), self._given
        for replay in self._valid:
            replay.begin_step(step)
        if args.eval_interval and step % args.eval_interval == 0 and args.do_valid:
            for iterator in train_call["valid_data_iterator"]:
                training.evaluate_and_print_results(
                    f"iteration {step}", train_call["forward_step_func"], iterator, self._model, step, False
                )
        is_saved = bool(args.save and args.save_interval and step % args.save_interval == 0)
        state = (step, self._model, self._optimizer, self._scheduler)
        if is_saved:
            training.save_checkpoint_and_time(*state)
        ends = bool(args.exit_interval and step % args.exit_interval == 0)
        if args.exit_duration_in_mins and not ends:
            minutes = (time.time() - training._TRAIN_START_TIME) / 60.0
            exit_vote = torch.tensor([int(minutes > args.exit_duration_in_mins)], device="cpu")
            dist.all_reduce(exit_vote, dist.ReduceOp.MAX, self.everyone)
            ends = bool(exit_vote.item())
        if ends:
            if not is_saved:
                training.save_checkpoint_and_time(*state)
            training.print_datetime(f"exiting program at iteration {step}")
            sys.exit()

    def gather_weights(self) -> None:
        from ascendspeed import get_timers

        with torch.no_grad():
            self._optimizer._copy_main_params_to_model_params()
            self._optimizer.gather_model_params(self.args(), get_timers())


def _replayed(iterator: Any) -> Replay | None:
    return None if iterator is None else Replay(iterator)

"""The lines of a framework's log in an online recovery: each step has a line, and averages cover all steps.

The framework adds up losses in a dict of its loop, and writes the line of a step after the step. So a loop
that is called again begins with the earlier sums. After a fault between the update of a step and the step's
line, the line is written later: each rank has kept its part of the losses on its board before the update, the
process of a lost rank too, and the parts are combined as the framework does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from adaptor import output

# A rank keeps the losses of a step as numbers. Reading numbers on the host takes a tenth of the time of a
# sum: at this point torch's code for sums is in no CPU cache. So the losses of each micro-batch are kept, and
# summed only where a line has to be written again. At most so many losses of a step are kept, each of so many
# numbers (a sum, and a number of tokens); the board has room for twice as much.
MOST_LOSSES = 24
_MOST_NUMBERS = 2
# What is known of so many steps is kept before the older ones are looked for.
_MOST_STEPS = 8
_ENCODER = msgspec.msgpack.Encoder()
# A number that no rank knows.
_UNKNOWN = -1.0
# The framework counts the steps of an interval by these sums, and sets them to 0 right before the line.
_COUNTED = ("advanced iterations", "skipped iterations")
# Since 0.16 the first step of a job of Megatron-LM has a line whatever the interval, and stays in the average
# of its own.
_IS_FIRST = "is_first_iteration"

# Of each loss the type of its numbers, and those of each micro-batch; a tuple is a list when it is read.
Kept = Mapping[str, Sequence[Any]]
_NAMES: dict[torch.dtype, str] = {}


def are_few(losses: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the losses of each micro-batch can be kept separately: few, and on the host.

    Args:
        losses: of each micro-batch, by name.

    Raises:
        Exception: the losses have another form.
    """
    if not losses:
        return True
    if len(losses) * len(losses[0]) > MOST_LOSSES:
        return False
    for value in losses[0].values():
        # Reading from a device is waiting for it, so it is read once.
        if not isinstance(value, torch.Tensor) or not value.is_cpu or value.numel() > _MOST_NUMBERS:
            return False
    return True


def numbers_of_losses(losses: Sequence[Mapping[str, torch.Tensor]]) -> Kept:
    """Return the losses of micro-batches as numbers. Raises Exception: they are no tensors."""
    kept = {}
    for name in losses[0] if losses else ():
        values = [micro_batch_losses[name] for micro_batch_losses in losses]
        kept[name] = (_type_name(values[0]), [value.tolist() for value in values])
    return kept


def losses_of_numbers(kept: Kept, device: torch.device | str) -> list[dict[str, torch.Tensor]]:
    """Return the losses that `numbers_of_losses` was given, on `device`."""
    losses: list[dict[str, torch.Tensor]] = []
    for name, (kind, values) in kept.items():
        losses = losses or [{} for _ in values]
        for batch_losses, value in zip(losses, values, strict=True):
            batch_losses[name] = _tensor_of(kind, value, device)
    return losses


def numbers_of_sums(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the framework's sums as numbers: sums that are tensors are returned with their type.

    Raises:
        AttributeError: something is neither a number nor a tensor.
    """
    return {
        name: value if isinstance(value, (int, float)) else (_type_name(value), value.tolist())
        for name, value in sums.items()
    }


def sums_of_numbers(kept: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return what `numbers_of_sums` was given, with tensors on `device`."""
    return {
        name: value if isinstance(value, (int, float)) else _tensor_of(value[0], value[1], device)
        for name, value in kept.items()
    }


def _type_name(value: torch.Tensor) -> str:
    name = _NAMES.get(value.dtype)
    if name is None:
        name = _NAMES[value.dtype] = str(value.dtype).removeprefix("torch.")
    return name


def _tensor_of(kind: str, value: Any, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(value, dtype=getattr(torch, kind), device=device)


class StepLog(ABC):
    """The log of a rank. Subclasses contain the differences between frameworks.

    Args:
        keep: keeps bytes for a replacement of this process.
        kept: the bytes kept by the replaced process, or `state` of another rank with the same part of the
            model; empty: nothing was kept.
        start: the step after which the job began.
        module: the module of the loop, whose names write the log.
        uncounted: the framework's text for zeros in the gradients if the zeros are not counted.
        device: where the losses lie.
    """

    def __init__(
        self,
        keep: Callable[[bytes], None],
        kept: bytes,
        start: int,
        module: str,
        uncounted: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._keep = keep
        self._module = module
        self._uncounted = uncounted
        self._start = start
        self._step = 0  # the newest that has begun
        self._oldest = 0
        self._losses: dict[int, Kept] = {}  # of this rank, by step
        self._outcomes: dict[int, tuple[bool, float | None, float | None]] = {}  # updated, norm, zeros
        self._sums: dict[int, dict[str, Any]] = {0: {}}  # of the interval, by the step that was added last
        self._since = time.time()  # when the interval began
        self._device = device
        self._first: dict[str, Any] | None = None  # what a loop that is called again begins with
        self._kept_sums: tuple[int, Any] | None = None  # the newest, and its step, as they are kept
        if kept:
            newest, losses, written, self._since, sums = msgspec.msgpack.decode(kept)
            self._losses = {} if losses is None else {newest: losses}
            self._sums = {written: sums_of_numbers(sums, device)}

    # of a framework

    @abstractmethod
    def args(self) -> Any:
        """Return the arguments of the framework."""

    @abstractmethod
    def timers(self) -> Any:
        """Return the timers of the framework."""

    @abstractmethod
    def joined(self, losses: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return of each loss the result of this rank's micro-batches, for `over_all_ranks`."""

    @abstractmethod
    def over_all_ranks(self, losses: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the losses of a step from those of each rank: collective among the ranks of a model part."""

    @abstractmethod
    def of_optimizer(self, optimizer: Any) -> dict[str, Any]:
        """Return what the line of a step says of the optimizer, as arguments of `training_log`."""

    def as_told(self, norm: float | None) -> float | None:
        """Return the norm as the framework's line has it; collective."""
        return norm

    # in a step

    def begin_step(self, step: int, oldest: int) -> None:
        """`step` begins, for the first time or once more; the job never goes back before `oldest`."""
        self._step, self._oldest = step, oldest
        for by_step in (self._losses, self._outcomes):
            by_step.pop(step, None)

    def add_losses(self, losses: Sequence[Mapping[str, Any]]) -> None:
        """The losses of each micro-batch of this rank are known; the update may follow."""
        step = self._step
        if len(self._losses) > _MOST_STEPS:
            self._forget_before(min(self._oldest, max(self._sums)))
        try:
            kept = numbers_of_losses(losses if are_few(losses) else [self.joined(losses)])
        except Exception:  # a script's own losses may have any form; no line stops a step
            self._losses.pop(step, None)
        else:
            self._losses[step] = kept
        self._keep_all(step)

    def _forget_before(self, oldest: int) -> None:
        self._losses = {
            kept_step: kept_value for kept_step, kept_value in self._losses.items() if kept_step >= oldest
        }
        self._outcomes = {
            kept_step: kept_value for kept_step, kept_value in self._outcomes.items() if kept_step >= oldest
        }
        self._sums = {kept_step: sums for kept_step, sums in self._sums.items() if kept_step >= oldest}

    def add_norm(self, norm: float | None = None, zeros: float | None = None) -> None:
        """Note the norm of the gradients, or the number of zero gradients: an update will follow."""
        _, known_norm, known_zeros = self._outcomes.get(self._step, (True, None, None))
        known_outcome = (known_norm if norm is None else norm, known_zeros if zeros is None else zeros)
        self._outcomes[self._step] = (True, *known_outcome)

    def add_zeros(self, zeros: float) -> None:
        """Note the zeros counted by an optimizer of the chain."""
        _, _, known_zeros = self._outcomes.get(self._step, (True, None, None))
        self.add_norm(zeros=(known_zeros or 0.0) + zeros)

    def add_overflow(self, overflows: object) -> None:
        """Note that the step ends without an update, where `overflows` is true."""
        if overflows:
            self._outcomes[self._step] = (False, None, None)

    def write(self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the framework's `training_log`, which adds up losses and writes a line at intervals."""
        call = {**dict(zip(_names(wrapped), args, strict=False)), **kwargs}
        step, sums = call["iteration"], call["total_loss_dict"]
        if self._first is not None:
            sums.update(self._first)
            self._first = None
            _let_begin(self.timers()("interval-time", log_level=0), self._since)
            if _IS_FIRST in call:  # of a call of the loop, which is not the first one
                args, kwargs = (), {**call, _IS_FIRST: self._is_first(step)}
        has_line = step % self.args().log_interval == 0
        try:
            result = wrapped(*args, **kwargs)
        except BaseException:
            # After the line ranks tell each other their times: a rank that is lost then breaks that off.
            if has_line and not any(sums.get(count) for count in _COUNTED):
                self._note_written(step, sums, has_line)
            raise
        self._note_written(step, sums, has_line)
        return result

    def _note_written(self, step: int, sums: Mapping[str, Any], has_line: bool) -> None:
        """Note that the losses of `step` are added up, or that the step's line is written."""
        self._sums[step] = dict(sums)
        if has_line:
            self._since = time.time()
        self._kept_sums = None
        self._keep_all(step)

    def _is_first(self, step: int) -> bool:
        return step == self._start + 1

    def _keep_all(self, step: int) -> None:
        written = max(self._sums)
        try:
            if self._kept_sums is None or self._kept_sums[0] != written:
                self._kept_sums = written, numbers_of_sums(self._sums[written])
            # Of each step these are needed twice, after its line and before the next update.
            kept_log = (step, self._losses.get(step), written, self._since, self._kept_sums[1])
            data = _ENCODER.encode(kept_log)
        except (TypeError, AttributeError):  # of a version that adds up something else
            data = b""
        self._keep(data)

    # in a recovery

    def state(self, step: int) -> bytes:
        """Return the log state after `step` for a new process whose rank has the same part of the model.

        The state contains the sums of the interval, which are equal on both ranks, and no losses of the new
        process's rank.
        """
        written = max((kept_step for kept_step in self._sums if kept_step <= step), default=0)
        try:
            sums = numbers_of_sums(self._sums.get(written, {}))
            return _ENCODER.encode((step, None, written, self._since, sums))
        except (TypeError, AttributeError):  # as in `_keep_all`
            return b""

    def go_back(self, step: int) -> None:
        """The loop is called again, and begins after `step`."""
        self._first = self._sums.get(step, self._sums.get(step - 1, {}))
        self._sums = {kept_step: sums for kept_step, sums in self._sums.items() if kept_step <= step} or {
            0: {}
        }

    def complete(self, step: int, everyone: dist.ProcessGroup, optimizer: Any, model: Sequence[Any]) -> None:
        """Write the line of `step` if the last rank, which writes lines, has not.

        Collective over `everyone`. The framework's counters have the values after the step; the timer of the
        interval does not run.
        """
        is_last = dist.get_rank() == dist.get_world_size() - 1
        losses = self._losses_of(step)
        updated, norm, zeros = self._outcomes.get(step, (None, None, None))
        skipped = _UNKNOWN if updated is None else float(not updated)
        outcome_tensor = torch.tensor(
            [
                float(is_last and step in self._sums),
                float(losses is None),
                skipped,
                _UNKNOWN if norm is None else norm,
                _UNKNOWN if zeros is None else zeros,
            ],
            dtype=torch.float64,
        )
        # As whole numbers, which have the order of these: of a tensor in double precision MindSpeed reduces a
        # copy in single precision, and nobody is told the result.
        dist.all_reduce(outcome_tensor.view(torch.int64), dist.ReduceOp.MAX, everyone)
        is_written, lacks, skipped, norm, zeros = outcome_tensor.tolist()
        if is_written:
            return
        if lacks or losses is None or skipped == _UNKNOWN:
            if is_last:
                output.tell(
                    f"[ttp] the framework's line of iteration {step} cannot be written again:"
                    " its losses are lost"
                )
            return
        norm = self.as_told(None if norm == _UNKNOWN else norm)
        training = importlib.import_module(self._module)
        uncounted = None if skipped else self._uncounted
        values = {
            **self.of_optimizer(optimizer),
            "loss_dict": self.over_all_ranks(losses),
            "total_loss_dict": dict(self._sums.get(step - 1, {})),
            "iteration": step,
            "report_memory_flag": False,
            "skipped_iter": int(skipped),
            "grad_norm": norm,
            "params_norm": training.calc_params_l2_norm(model) if self.args().log_params_norm else None,
            "num_zeros_in_grad": uncounted if zeros == _UNKNOWN else zeros,
            "model": model,
            "optimizer": optimizer,
            _IS_FIRST: self._is_first(step),
        }
        self._first = None
        timer = self.timers()("interval-time", log_level=0)
        timer.start()
        _let_begin(timer, self._since)
        log_parameters = inspect.signature(inspect.unwrap(training.training_log)).parameters.values()
        needed_names = [
            parameter.name
            for parameter in log_parameters
            if parameter.name in values or parameter.default is parameter.empty
        ]
        training.training_log(**{name: values.get(name) for name in needed_names})
        timer.reset()
        self._first = self._sums[step]

    def _losses_of(self, step: int) -> dict[str, torch.Tensor] | None:
        """Return the losses of `step` from this rank's micro-batches; None if unknown."""
        if step not in self._losses:
            return None
        with contextlib.suppress(Exception):  # the losses of a script have any form
            return self.joined(losses_of_numbers(self._losses[step], self._device))
        return None


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a function."""
    return tuple(inspect.signature(function).parameters)


def _let_begin(timer: Any, moment: float) -> None:
    """Set the begin of a just-started timer to `moment`, if the version has such a timer."""
    if hasattr(timer, "_start_time"):
        timer._start_time = min(timer._start_time, moment)

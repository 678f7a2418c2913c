"""The twin check: the holders of each shard compare their sums before the next update (TTP_VERIFY_EVERY).

Invariant: no rank makes the update after a verified step, and no rank saves a step, before all ranks know
that all holders agree on the step. A sum belongs to the newest update. After an incident the state is
compared, too: a rank whose state has stayed keeps the sums of its update, so damage since then is found.

The check covers the update, the way of gradients to a copy, and state at rest. An error before the reduction
of gradients is not seen: all holders apply a wrong gradient alike.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
import torch

from adaptor import context, output, text
from adaptor.checkpoint import shards, step_record
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol.messages import Corruption, Verified
from adaptor.replica import group
from adaptor.verification import state_sums, verdict
from adaptor.verification.checksums import (
    BitSum,
    PendingSums,
    Sums,
    random_sum,
    scalar_sum,
    start_gradient_sums,
    start_shard_sums,
)
from adaptor.verification.replay_check import OFF, PROVEN, SELF_TEST, ReplayCheck, SelfTestMemo
from adaptor.verification.transcript import RANDOM, SUM_DIGITS, WEIGHTS
from adaptor.verification.verdict import Finding, Report, ShardRecord, without_groups

# With TTP_VERIFY_EVERY=auto: the part of a step's time that the sums take on average. A step gets longer by
# up to twice as much, because the sums displace the model from the cache.
SHARE_OF_TIME = 0.0025
_NEVER = 1 << 62
# Before last words: a device that has not computed the sums after an update in this time does not go on.
_DEVICE_S = 1.0


class TwinCheck:
    """The twin check of one rank (`state_provider.StepVerifier`).

    Args:
        every: the interval between verified steps; None: as often as `SHARE_OF_TIME` allows.
        on_corruption: the reaction to a difference (TTP_CORRUPTION).
        rank: of the process.
        tell: tells the controller.
        replay: compares replayed micro-batches; None without TTP_REPLAY_EVERY.
        has_transcript: whether the sums of verified steps go to the controller (TTP_TRANSCRIPT).
    """

    def __init__(
        self,
        every: int | None,
        on_corruption: str,
        rank: int,
        tell: Callable[[Corruption | Verified], None],
        replay: ReplayCheck | None = None,
        *,
        has_transcript: bool = False,
    ) -> None:
        self.replay = replay
        self._has_transcript = has_transcript
        self._every = every or 1  # 0: the check has turned itself off
        self._chooses = every is None
        self._on_corruption = on_corruption
        self._rank = rank
        self._tell = tell
        self._first = _NEVER  # the first verified step since the last start of all workers
        self._agreed = -1  # the newest step on which all holders have agreed
        # The step of an update on which holders differed, and the sums of this rank at that time.
        self._disputed: tuple[int, dict[str, Sums]] = (-1, {})
        self._reported: set[tuple[str, tuple[int, ...]]] = set()
        self._sums_s: list[float] = []  # of each verified step
        self._steps_s: list[float] = []
        self._memo = SelfTestMemo(f"twin-check{rank}")
        self._layout = self._memo.read()
        if self._layout == OFF:
            self._every = 0
        self._step = -1  # of the update after which `_updated` was computed
        # By the index of the shard; None: there is nothing to compare.
        self._updated: dict[int, PendingSums] | None = None
        self._mark: Any = None  # after these sums on the device
        self._gathered: BitSum | None = None
        self._spent_s = 0.0
        self._door_at = 0.0

    @property
    def _count(self) -> int:
        """Return how many steps the job has verified, the current one included."""
        return 1 + (self._step - self._first) // max(1, self._every)

    def begin(self, trainee: MegatronTrainee, restored: int | None = None) -> None:
        self._gathered, self._door_at = None, 0.0
        if self.replay is not None:
            self.replay.begin()
        # A new process knows nothing, and some ranks may have met a fault before they changed the interval.
        is_on, longest, chooses, is_proven, self._first, agreed = _smallest(
            self._every > 0,
            -self._every,
            self._chooses,
            self._layout == PROVEN,
            self._first,
            -self._agreed,
        )
        self._layout = PROVEN if is_proven else ""
        self._every, self._chooses, self._agreed = -longest if is_on else 0, bool(chooses), -agreed
        labels, self._holders = verdict.holders_of(trainee.shares_by_rank)
        self._labels = labels[self._rank]
        if all(len(ranks) < 2 for ranks in self._holders.values()):
            raise UnsupportedError(
                "TTP_VERIFY_EVERY is set, and no shard of this job has a second holder to compare: leave it"
                " out, or give the job second copies (TTP_REPLICA, a data-parallel size of 2 or more)"
            )
        groups = [
            next((share.group for share in shares if share.can_write), "")
            for shares in trainee.shares_by_rank
        ]
        self._folder = groups[self._rank]
        self._models = {
            name: [rank for rank, rank_group in enumerate(groups) if rank_group == name]
            for name in set(groups)
        }
        self._versions: dict[str, str] = {}  # of this layout; taken at the first verified step
        # A gather that goes on beside the next step has not brought all weights when the step begins.
        self._is_gathered_at_once = not any(
            getattr(getattr(optimizer, owner, None), "overlap_param_gather", False)
            for optimizer in step_record.chain(trainee.state.optimizer)
            for owner in ("config", "ddp_config")
        )
        if restored is None:
            self._updated = None
        elif self._updated is None or self._step != restored:  # the state is another one
            self._take(trainee, restored)

    def after_update(self, trainee: MegatronTrainee, step: int) -> None:
        self._gathered = self._updated = None
        if step % max(1, self._every) == 0:
            self._take(trainee, step)

    def _take(self, trainee: MegatronTrainee, step: int) -> None:
        """Begin to compute the sums of the state of `step`, unless the check has turned itself off."""
        if not self._every:
            self._updated = None
            return
        began = time.perf_counter()
        self._step, self._first = step, min(step, self._first)
        self._updated = _sums_of_shards(trainee)
        self._mark = trainee.device.mark()
        self._spent_s = time.perf_counter() - began

    def begin_step(self, trainee: MegatronTrainee) -> None:
        if self._updated is not None and self._is_gathered_at_once:
            began = time.perf_counter()
            self._gathered = _weights(trainee)
            self._spent_s += time.perf_counter() - began

    def is_equal(self, trainee: MegatronTrainee, step: int, *, is_saved: bool = False) -> bool:
        if is_saved and self._updated is None:
            self._take(trainee, step)
        # State that differs explains gradients that differ.
        return self._has_equal_state(trainee, step, is_saved) and (is_saved or self._has_equal_gradients())

    def _has_equal_gradients(self) -> bool:
        finding = None if self.replay is None else self.replay.finding
        return finding is None or self._act_on(finding, finding.agreed, is_self_test=False)

    def _has_equal_state(self, trainee: MegatronTrainee, step: int, is_saved: bool) -> bool:
        if self._updated is None:
            return True
        report = self._report(trainee, self._updated, is_at_door=not is_saved)
        if is_saved:
            return self._is_agreed(report, step + 1, lambda is_agreed: None)
        self._updated = None
        goes_on = self._is_agreed(report, step, partial(self._tell_sums, trainee, report))
        if goes_on:
            self._choose_interval()
        return goes_on

    def require_unchanged(self, trainee: MegatronTrainee, step: int, indices: Collection[int]) -> None:
        updated = self._updated
        if updated is None or self._step != step or not trainee.device.wait(self._mark, _DEVICE_S):
            return
        with trainee.device.beside():
            for index, now in _sums_of_shards(trainee, only=indices).items():
                changed = verdict.different([without_groups(s.read()) for s in (updated[index], now)])
                if changed:
                    where = f"{', '.join(changed)} of shard {self._labels[index]}"
                    raise CheckpointError(f"{where} changed at rest after the update of step {step}")

    def _tell_sums(self, trainee: MegatronTrainee, report: Report, is_agreed: bool) -> None:
        """Tell the controller the sums of a verified step, for the transcript; never raise."""
        if not self._has_transcript:
            return
        try:
            shards = {
                label: verdict.recorded_sums(record)
                if not is_agreed or self._holders[label][0] == self._rank
                else {}
                for label, record in report.shards.items()
            }
            (weights,) = (used for _, used in report.weights.values())
            own = {WEIGHTS: weights, RANDOM: random_sum(trainee.random.own())}
            if self._rank == 0:
                self._versions = self._versions or _versions(trainee, self._holders, self._models)
            samples = trainee.counters().get("consumed_train_samples")
            message = Verified(
                self._rank,
                self._step,
                len(trainee.shares_by_rank),
                is_agreed,
                shards,
                {key: value[:SUM_DIGITS] for key, value in own.items()},
                None if samples is None else int(samples),
                self._versions,
            )
        except Exception as error:  # the transcript is for people
            self._has_transcript = False
            output.tell(f"[ttp] rank {self._rank}: no step goes to the transcript: {text.describe(error)}")
            return
        self._tell(message)

    def _is_agreed(self, report: Report, next_step: int, tell_sums: Callable[[bool], None]) -> bool:
        """Compare the reports of all ranks; return whether training goes on. Collective.

        Args:
            report: of this rank.
            next_step: see `verdict.decide`.
            tell_sums: is called after the verdict, with True if all holders agree.
        """
        everyone = group.of_training_job()
        number = verdict.contribution(report, self._rank, self._holders, self._models)
        if group.total(everyone, number) == 0:
            self._agreed = self._step
            tell_sums(True)
            self._judge_disputed(report)
            if self._layout != PROVEN and self._count >= SELF_TEST:
                self._learn(PROVEN)
            return True
        is_self_test = self._layout != PROVEN and self._count <= SELF_TEST
        try:
            gathered = group.gather_bytes(everyone, msgspec.msgpack.encode(report))
        except RuntimeError:  # a rank is gone: the step must not be saved all the same
            if not is_self_test:
                self._act_on(
                    verdict.unexplained(everyone.size(), self._step, self._agreed),
                    self._step,
                    is_self_test=False,
                )
            raise
        reports = [msgspec.msgpack.decode(data, type=Report) for data in gathered]
        finding = verdict.decide(reports, self._step, next_step, self._holders, self._models)
        if finding.kind is verdict.Kind.UNKNOWN:
            self._agreed = self._step
        tell_sums(finding.kind is verdict.Kind.UNKNOWN)
        if finding.kind is verdict.Kind.UPDATE:
            self._disputed = self._step, {label: record.state for label, record in report.shards.items()}
        return self._act_on(finding, self._step, is_self_test=is_self_test)

    def _judge_disputed(self, report: Report) -> None:
        """Print if the disputed update of this rank was wrong: the update was repeated, and all holders agree
        now.
        """
        step, states = self._disputed
        if step == self._step:
            self._disputed = (-1, {})
            if any(report.shards[label].state != state for label, state in states.items()):
                output.tell(
                    f"[ttp] rank {self._rank} was wrong in the update of step {step}: made again, it has"
                    " other results, on which all holders agree"
                )

    def _learn(self, layout: str) -> None:
        """Note for the next start of the workers whether the layout computes the same bits on all holders."""
        self._layout = layout
        self._memo.write(layout)

    def _report(
        self, trainee: MegatronTrainee, updated: Mapping[int, PendingSums], *, is_at_door: bool
    ) -> Report:
        """Return the sums of this rank; before a save without the inputs of an update."""
        began = time.perf_counter()
        now = _sums_of_shards(trainee)
        gradients = _sums_of_shards(trainee, start_gradient_sums) if is_at_door else {}
        used = _weights(trainee)
        records = {
            self._labels[index]: ShardRecord(
                updated[index].read(),
                sums.read() if is_at_door else without_groups(sums.read()),
                gradients[index].read() if is_at_door else {},
            )
            for index, sums in now.items()
        }
        gathered = "" if self._gathered is None else self._gathered.value()
        report = Report(records, {self._folder: (gathered, used.value())}, self._agreed)
        if not is_at_door:
            return report
        finished_at = time.perf_counter()
        if self._door_at:
            self._steps_s.append(finished_at - self._door_at)
        self._door_at = finished_at
        self._sums_s.append(self._spent_s + finished_at - began)
        return report

    def _choose_interval(self) -> None:
        """With TTP_VERIFY_EVERY=auto: agree with all ranks on the interval, once, after the self-test."""
        if not (self._chooses and self._every) or self._count < SELF_TEST:
            return
        sums_s = statistics.median(self._sums_s)
        step_s = statistics.median(self._steps_s or [math.inf]) - sums_s
        (longest,) = _smallest(-max(1, math.ceil(sums_s / (SHARE_OF_TIME * max(step_s, sums_s)))))
        self._every, self._chooses = -longest, False
        if self._rank == 0:
            output.tell(
                f"[ttp] the holders of the state are compared every {self._every} steps"
                f" (TTP_VERIFY_EVERY=auto): that takes {1000 * sums_s:.3g} ms on rank 0,"
                f" a step {1000 * step_s:.3g} ms",
                to="stdout",
            )

    def _act_on(self, finding: Finding, step: int, *, is_self_test: bool) -> bool:
        """Return whether training goes on; otherwise tell the controller."""
        if finding.kind is verdict.Kind.UNKNOWN:  # a script may change its state in every step
            if (finding.label, ()) not in self._reported:
                self._reported.add((finding.label, ()))
                self._print(finding.text)
            return True
        if is_self_test:
            self._every, self._updated = 0, None
            self._learn(OFF)
            self._print(
                f"no step is verified (TTP_VERIFY_EVERY): {finding.text}, in the first {SELF_TEST} verified"
                " steps, so this layout may not compute the same bits on all holders"
            )
            return True
        ranks = finding.named or finding.suspects
        if self._on_corruption == "report":
            if (finding.label, ranks) not in self._reported:
                self._reported.add((finding.label, ranks))
                state = "corrupt" if finding.named else "one of them corrupt"
                self._print(f"CORRUPTION: {finding.text}; rank {' and '.join(map(str, ranks))}: {state}")
            return True
        self._tell(
            Corruption(
                self._rank,
                step,
                finding.label,
                finding.text,
                finding.named,
                finding.suspects,
                finding.agreed,
                stops=self._on_corruption == "stop",
            )
        )
        return False

    def _print(self, line: str) -> None:
        if self._rank == 0:
            output.tell(f"[ttp] {line}")


def _smallest(*numbers: int) -> list[int]:
    """Return the smallest value of all ranks, number by number; collective."""
    return group.smallest(group.of_training_job(), numbers)


def _sums_of_shards(
    trainee: MegatronTrainee,
    start: Callable[[torch.optim.Optimizer], PendingSums] = start_shard_sums,
    only: Collection[int] | None = None,
) -> dict[int, PendingSums]:
    """Return the sums of the shards that this rank holds, by index; `only` of some indices."""
    held_shards = shards.held_shards(trainee.state.optimizer, trainee.mirrors)
    return {
        shard.index: start(shard.optimizer) for shard in held_shards if only is None or shard.index in only
    }


def _weights(trainee: MegatronTrainee) -> BitSum:
    """Return the sum of the current weights of this rank's part of the model."""
    bits = BitSum()
    for chunk in trainee.state.model:
        for param in chunk.parameters():
            if type(param.data) is torch.Tensor:  # a quantized weight has no bits of its own
                bits.add(param.data)
    return bits


def _versions(trainee: MegatronTrainee, *holders: verdict.Holders) -> dict[str, str]:
    """Return what decides about the bits of a step, besides the script: versions, layout and device."""
    core = sys.modules.get("megatron.core.package_info")
    devices = {param.device.type for chunk in trainee.state.model for param in chunk.parameters()}
    shards = sum(len(ranks) > 1 for ranks in holders[0].values())
    layout = (
        f"{len(trainee.shares_by_rank)} ranks, {shards} shards with several holders,"
        f" {scalar_sum([*holders, state_sums.layout_of(trainee.state)])[:SUM_DIGITS]}"
    )
    return {
        "torch": str(torch.__version__),
        "megatron-core": str(getattr(core, "__version__", "")),
        "adaptor": metadata.version("ttp-adaptor"),
        "layout": layout,
        "device": " and ".join(sorted(devices)),
    }


def of_this_process(rank: int, tell: Callable[[Corruption | Verified], None]) -> TwinCheck:
    """Return the twin check of this rank, with the settings TTP_VERIFY_EVERY and TTP_CORRUPTION.

    Args:
        rank: of the process.
        tell: tells the controller.
    """
    settings = context.get().settings

    def print_line(line: str) -> None:
        if rank == 0:
            output.tell(f"[ttp] {line}")

    replay = ReplayCheck(settings.replay_every, rank, print_line) if settings.replay_every else None
    return TwinCheck(
        settings.verify_every,
        settings.corruption,
        rank,
        tell,
        replay,
        has_transcript=settings.transcript,
    )

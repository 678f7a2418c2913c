"""Flips bits in the memory of a training rank.

Either a single bit stays flipped, or many changes are made at the doors of a job, each undone after its
comparison by the holders. A change in a step without a comparison is made in a copy of the shards, which then
makes the updates up to the comparison. A change of a pass is made while the rank repeats its first
micro-batch.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

# Flips in this rank's shard: fp32 main params, moments, reduced gradients; in a mirror: its gradients; in the
# model: weights, and the gradients of this rank alone.
KINDS = (
    "flip-main",
    "flip-moment",
    "flip-variance",
    "flip-gradient",
    "flip-transfer",
    "flip-weight",
    "flip-local-gradient",
    "flip-activation",
)
# The output of the layers that this rank computed last.
activations: list[Any] = []


def flip(kind: str, seed: int) -> None:
    """Flip a bit below the sign bit of one number; the seed selects number and bit."""
    import torch

    from adaptor.worker import runtime

    trainee: Any = runtime.get().session.trainee
    tensors = [tensor for tensor in _TENSORS[kind](trainee) if tensor is not None and tensor.numel()]
    drawn = random.Random(seed)
    tensor = drawn.choice(tensors).detach()
    dtype = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    elements = tensor.view(-1).view(dtype)
    elements[drawn.randrange(elements.numel())] ^= 1 << drawn.randrange(8 * tensor.element_size() - 1)


def _held(trainee: Any) -> list[Any]:
    from adaptor.checkpoint import shards

    if isinstance(trainee, _Apart):
        return trainee.held
    return shards.held_shards(trainee.state.optimizer, trainee.mirrors)


def _optimizers(trainee: Any, *, copies: bool) -> Iterator[Any]:
    for shard in _held(trainee):
        if shard.is_copy == copies:
            yield shard.optimizer


def _params(trainee: Any, *, copies: bool = False) -> Iterator[Any]:
    for optimizer in _optimizers(trainee, copies=copies):
        for group in optimizer.param_groups:
            yield from group["params"]


def _state(trainee: Any, key: str) -> Iterator[Any]:
    for optimizer in _optimizers(trainee, copies=False):
        for entries in optimizer.state.values():
            yield entries[key]


def _weights(trainee: Any) -> Iterator[Any]:
    for chunk in trainee.state.model:
        yield from chunk.parameters()


_TENSORS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "flip-main": _params,
    "flip-moment": lambda trainee: _state(trainee, "exp_avg"),
    "flip-variance": lambda trainee: _state(trainee, "exp_avg_sq"),
    "flip-gradient": lambda trainee: (param.grad for param in _params(trainee)),
    "flip-transfer": lambda trainee: (param.grad for param in _params(trainee, copies=True)),
    "flip-weight": lambda trainee: (param.data for param in _weights(trainee)),
    "flip-activation": lambda trainee: [output.data for output in activations],
    "flip-local-gradient": lambda trainee: (param.main_grad for param in _weights(trainee)),
}


# The variable that makes bits change at the door of each verified step: `COUNT:SEED:FILE`, the number of
# changes of each rank, the seed, and the file of the results.
INJECTIONS = "TTP_TEST_INJECTIONS"
# The variable with which saves write something else than the state in memory (`hooks`).
LYING = "TTP_TEST_LYING_SAVES"
# Kinds of change by place. "at rest": between the checksums of the update and those at the door.
CHANGES = {
    "main at rest": "flip-main",
    "moment at rest": "flip-moment",
    "variance at rest": "flip-variance",
    "count of updates at rest": "updates",
    "main in the update": "flip-main",
    "moment in the update": "flip-moment",
    "variance in the update": "flip-variance",
    "reduced gradient": "flip-gradient",
    "gradient in the transfer to a mirror": "flip-transfer",
    "weight after the gather": "flip-weight",
    "weight in the gather": "flip-weight",
    "main in a load": "flip-main",
    "moment in a load": "flip-moment",
    "weight in a load": "flip-weight",
    "random state in a load": "random",
    "weight in a save": "flip-weight",
}
# A change in a step without a comparison, up to three steps before the comparison (TTP_VERIFY_EVERY=4).
UNVERIFIED = ", in a step without a comparison"
_MOST_LATER = 3
CHANGES |= {
    f"{kind}{UNVERIFIED}": change
    for kind, change in CHANGES.items()
    if kind.endswith((" at rest", " in the update", "gradient", " to a mirror"))
}
# Changes in passes of a micro-batch that another replica repeats (TTP_REPLAY_EVERY).
_PASSES = {
    "activation in a repeated forward pass": "flip-activation",
    "gradient in a repeated backward pass": "flip-local-gradient",
}
# The change that the next repetition of a micro-batch makes: after its layers, or after its backward pass.
in_forward: list[Callable[[], None]] = []
in_backward: list[Callable[[], None]] = []
# The verdict if later updates, or the pass, give the same bits with the change as without.
_NO_TRACE = "no trace"
PATTERNS = ("a bit", "2 to 8 bits of a word", "a bit of 4, 8 or 16 words in a row", "a bit of 2 to 16 words")


def _drawn_masks(drawn: random.Random, pattern: str, count: int, bits: int) -> dict[int, int]:
    """Return the bits to invert, by word; a tensor of few words gets fewer."""
    first, bit = drawn.randrange(count), 1 << drawn.randrange(bits)
    match PATTERNS.index(pattern):
        case 0:
            return {first: bit}
        case 1:
            return {first: sum(1 << place for place in drawn.sample(range(bits), drawn.randint(2, 8)))}
        case 2:
            return dict.fromkeys(range(first, min(count, first + drawn.choice((4, 8, 16)))), bit)
        case _:
            elements = drawn.sample(range(count), min(count, drawn.randint(2, 16)))
            return {word: 1 << drawn.randrange(bits) for word in elements}


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of bits of one tensor; a second call undoes the change."""

    elements: Any
    masks: dict[int, int]

    @classmethod
    def draw(cls, drawn: random.Random, tensors: Iterable[Any], pattern: str) -> Change | None:
        """Draw a change; None if there is no tensor to change."""
        import torch

        present = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
        if not present:
            return None
        tensor = drawn.choice(present).detach()
        bits = 8 * tensor.element_size()
        elements = tensor.view(-1).view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits])
        masks = _drawn_masks(drawn, pattern, elements.numel(), bits)
        return cls(elements, {word: mask - (mask >> bits - 1 << bits) for word, mask in masks.items()})

    def __call__(self) -> None:
        for word, mask in self.masks.items():
            if self.elements.element_size() == 1:
                mask &= 0xFF
            self.elements[word] ^= mask


@dataclasses.dataclass(frozen=True)
class CountChange:
    """A change of a bit of the update count, in a param group or in the state of a param."""

    counted: Any
    mask: int

    @classmethod
    def draw(cls, drawn: random.Random, trainee: Any) -> CountChange:
        counted = [
            entries
            for optimizer in _optimizers(trainee, copies=False)
            for entries in (*optimizer.param_groups, *optimizer.state.values())
            if "step" in entries
        ]
        return cls(drawn.choice(counted), 1 << drawn.randrange(10))

    def __call__(self) -> None:
        kind = type(self.counted["step"])
        count = int(self.counted["step"]) ^ self.mask
        if kind in (int, float):
            self.counted["step"] = kind(count)
        else:
            self.counted["step"].fill_(count)


class _Apart:
    """Copies of the shards of a rank, for updates apart from the job.

    Args:
        trainee: of the rank, at the door of an update, with its gradients in place.
    """

    def __init__(self, trainee: Any) -> None:
        from adaptor.checkpoint.local_copy import _Kept

        self._live = _held(trainee)
        self._copies = [_Kept(shard.optimizer) for shard in self._live]
        self.held = [
            dataclasses.replace(shard, optimizer=copied.optimizer)
            for shard, copied in zip(self._live, self._copies, strict=True)
        ]

    def take(self) -> None:
        """Copy state and gradients of the job."""
        for shard, copied in zip(self._live, self._copies, strict=True):
            copied.take()
            for group in shard.optimizer.param_groups:
                for param in group["params"]:
                    copied.of(param).grad = None if param.grad is None else param.grad.detach().clone()

    def update(self, count: int) -> None:
        """Make `count` updates, all with the same gradients."""
        for shard in self.held * count:
            shard.optimizer.step()


class _Door:
    """The changes of the rank at the door of one step, each with the verdict of the product."""

    def __init__(self, check: Any, trainee: Any, drawn: random.Random) -> None:
        from adaptor.verification import state_sums, twin_check

        self._check, self._trainee, self._drawn = check, trainee, drawn
        self._sums, self._weights = twin_check._sums_of_shards, twin_check._weights
        self._apart = _Apart(trainee)
        self._held = lambda: dataclasses.replace(
            state_sums.held_by(trainee.state, (), trainee.shares, whole_weights=True),
            random=state_sums.random_key(self._random, trainee.random.place),
        )
        self._random = dict(trainee.random.own())
        self.report = self._reported(check._updated)
        self.held = self._held()
        self.later = [self._reported_later("", steps_later) for steps_later in range(1, _MOST_LATER + 1)]

    def _reported(self, updated: Any) -> Any:
        return self._check._report(self._trainee, updated, is_at_door=True)

    def _reported_later(self, kind: str, steps_later: int, change: Callable[[], None] = lambda: None) -> Any:
        """The report of this rank at the comparison after `later` updates, with a change of the copies."""
        from adaptor.verification.checksums import shard_sums
        from adaptor.verification.verdict import ShardRecord

        if not kind:
            self._apart.take()
        steps_before = 1 if " in the update" in kind else 0
        self._apart.update(steps_before)
        change()
        self._apart.update(steps_later - steps_before)
        sums = {shard.index: shard_sums(shard.optimizer) for shard in self._apart.held}
        records = {
            self._check._labels[index]: ShardRecord(checksums, checksums, {})
            for index, checksums in sums.items()
        }
        return msgspec.structs.replace(self.report, shards=records)

    def _tensors(self, kind: str, holder: Any) -> Iterable[Any]:
        return [self._random["torch_rng_state"]] if kind == "random" else _TENSORS[kind](holder)

    def ask(self, kind: str, pattern: str) -> tuple[str, str, str, int, Any] | None:
        """Make a change, let the product judge the change, and undo it.

        Returns:
            The change, its pattern, the dtype, the steps until the comparison, and the answer; None
            without anything to change.
        """
        holder, steps_later = self._trainee, 0
        if kind.endswith(UNVERIFIED):
            holder, steps_later = self._apart, self._drawn.randint(1, _MOST_LATER)
            holder.take()
        change: Change | CountChange | None
        if CHANGES[kind] == "updates":
            change, pattern, bits = CountChange.draw(self._drawn, holder), PATTERNS[0], "a number"
        else:
            change = Change.draw(self._drawn, self._tensors(CHANGES[kind], holder), pattern)
            bits = "" if change is None else f"{8 * change.elements.element_size()} bits"
        if change is None:
            return None
        if steps_later:
            return kind, pattern, bits, steps_later, self._reported_later(kind, steps_later, change)
        change()
        try:
            answer = self._answer(kind)
        finally:
            change()
        return kind, pattern, bits, steps_later, answer

    def _answer(self, kind: str) -> Any:
        place = kind.partition(" in ")[2]
        if place == "a save":
            return self._refuses_to_save()
        if place == "a load":
            return self._held()
        if place == "the gather":
            gathered, self._check._gathered = self._check._gathered, self._weights(self._trainee)
            try:
                return self._reported(self._check._updated)
            finally:
                self._check._gathered = gathered
        return self._reported(self._sums(self._trainee) if place == "the update" else self._check._updated)

    def _refuses_to_save(self) -> bool:
        """Return whether the product refuses an archive with the changed weights and random states."""
        from adaptor.errors import CheckpointError
        from adaptor.verification.agreed_state import WEIGHT, AgreedGroup, AgreedShard, AgreedState
        from adaptor.verification.save_check import SaveCheck

        state, held_state = self._trainee.state, self.held
        shard = AgreedShard({WEIGHT: f"{held_state.weights:016x}"}, ())
        group = AgreedGroup(held_state.layout, [shard], held_state.updates, (held_state.random,))
        check = SaveCheck(0, state, AgreedState(0, {state.folder: group}))
        archive = {key: chunk.state_dict() for key, chunk in state.chunks.items()}
        try:
            check.require_archive({"iteration": 0, **archive})
        except CheckpointError:
            return True
        return False


def at_doors(count: int, seed: str, file: Path) -> Callable[[Any, Any, Any, Any], Any]:
    """Return a wrapper of `TwinCheck.is_equal` that makes `count` changes on each rank at each door."""

    def changes_before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if instance._updated is not None and not kwargs:
            _change(instance, args[0], count, seed, file)
        return wrapped(*args, **kwargs)

    return changes_before


def _change(check: Any, trainee: Any, count: int, seed: str, file: Path) -> None:
    import torch.distributed as dist

    from adaptor.replica import group

    everyone: Any = group.of_this_job()
    rank = dist.get_rank(everyone)
    drawn = random.Random(f"{seed}-{check._step}-{rank}")
    door = _Door(check, trainee, drawn)
    answers_of_rank = [door.ask(drawn.choice([*CHANGES]), drawn.choice(PATTERNS)) for _ in range(count)]
    gathered = group.gather_all(
        ([door.report, *door.later], door.held, list(filter(None, answers_of_rank))), everyone
    )
    if rank:
        return
    # The reports of all ranks without a change, by the steps between change and comparison.
    reports = [list(by_rank) for by_rank in zip(*(reports for reports, _, _ in gathered), strict=True)]
    assert all(_is_agreed(check, by_rank) for by_rank in reports)
    held_states = [state for _, state, _ in gathered]
    results: _Results = Counter()
    for changed_rank, (_, _, answers) in enumerate(gathered):
        for kind, pattern, dtype, steps_later, answer in answers:
            verdict = _verdict(check, kind, changed_rank, answer, reports[steps_later], held_states)
            results[kind, pattern, dtype, steps_later, verdict] += 1
    _write(file, check._step, results)


# How often a change, its pattern, its dtype, and the steps until the comparison had a verdict.
_Results: TypeAlias = Counter[tuple[str, str, str, int, str]]


def _write(file: Path, step: int, results: _Results) -> None:
    with file.open("a") as lines:
        for key, number in results.items():
            lines.write(json.dumps([step, *key, number]) + "\n")


def in_passes(count: int, seed: str, file: Path) -> Callable[[Any, Any, Any, Any], Any]:
    """Return a wrapper of `ReplayCheck.compare` that makes `count` changes in passes of the job."""

    def changes_before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        _change_passes(*args, instance._step, count, seed, file)
        return wrapped(*args, **kwargs)

    return changes_before


def _change_passes(
    record: Any, repeat: Callable[[], str], step: int, count: int, seed: str, file: Path
) -> None:
    """Let all ranks repeat their own micro-batch, with a change on one rank."""
    import torch.distributed as dist

    from adaptor.replica import group
    from adaptor.verification import replay_check
    from adaptor.worker import runtime

    everyone: Any = group.of_this_job()
    trainee: Any = runtime.get().session.trainee
    rank, drawn = dist.get_rank(everyone), random.Random(f"{seed}-{step}")
    changes_made: list[list[Any]] = []
    for _ in range(count):
        kind, pattern = drawn.choice([*_PASSES]), drawn.choice(PATTERNS)
        changed_rank, own_seed = drawn.randrange(dist.get_world_size(everyone)), drawn.random()
        changes_made.append([kind, pattern, "", changed_rank])

        def change(line: list[Any] = changes_made[-1], own_seed: float = own_seed) -> None:
            tensors = _TENSORS[_PASSES[line[0]]](trainee)
            drawn_change = Change.draw(random.Random(own_seed), tensors, line[1])
            assert drawn_change is not None
            line[2] = f"{8 * drawn_change.elements.element_size()} bits"
            drawn_change()

        if rank == changed_rank:
            (in_forward if "forward" in kind else in_backward).append(change)
        changes_made[-1].append(repeat())
    gathered = group.gather_all((record, changes_made), everyone)
    if rank:
        return
    records = [own_record for own_record, _ in gathered]
    assert not replay_check.differing(records)
    results: _Results = Counter()
    for number, (kind, pattern, _, changed_rank, _) in enumerate(changes_made):
        dtype = gathered[changed_rank][1][number][2]
        changed = [
            msgspec.structs.replace(own_record, own=answers[number][4]) for own_record, answers in gathered
        ]
        verdict = _NO_TRACE
        if replay_check.differing(changed):
            verdict = _says(replay_check.decide(changed, [own.own for own in records], step), changed_rank)
        results[kind, pattern, dtype, 0, verdict] += 1
    _write(file, step, results)


def _verdict(
    check: Any, kind: str, rank: int, answer: Any, reports: list[Any], held_states: list[Any]
) -> str:
    """Return the verdict if `rank` has the changed bits: named, suspected, named wrongly, or missed."""
    from adaptor.verification import agreed_state, verdict

    if kind.endswith("in a save"):
        return "named" if answer else "missed"
    if kind.endswith("in a load"):
        agreed = agreed_state.agree(check._step, held_states)
        loaded = [*held_states[:rank], answer, *held_states[rank + 1 :]]
        lines = agreed_state.differences(agreed, loaded, has_optimizer=True)
        differing_ranks = agreed_state.ranks_with_other_random_states(agreed, loaded)
        lines += [f"random states on rank {differing_rank}" for differing_rank in differing_ranks]
        named = all(line.endswith(f"on rank {rank}") for line in lines)
        return ("named" if named else "named wrongly") if lines else "missed"
    changed = [*reports[:rank], answer, *reports[rank + 1 :]]
    if _is_agreed(check, changed):
        return _NO_TRACE if answer == reports[rank] else "missed"
    return _says(verdict.decide(changed, check._step, check._step + 1, check._holders, check._models), rank)


def _is_agreed(check: Any, reports: list[Any]) -> bool:
    from adaptor.verification import verdict

    contributions = [
        verdict.contribution(report, number, check._holders, check._models)
        for number, report in enumerate(reports)
    ]
    return sum(contributions) % (1 << 64) == 0


def _says(finding: Any, rank: int) -> str:
    if finding.named:
        return "named" if finding.named == (rank,) else "named wrongly"
    return "suspected" if rank in finding.suspects else "missed"

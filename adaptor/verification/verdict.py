"""The verdict on a verified step: whether all holders agree, and otherwise the wrong ranks; pure.

Invariant: all ranks come to the same finding, from the reports of all ranks. A rank is named only if its own
sums, or the majority of at least three holders, show the error; otherwise all holders are suspects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec
import xxhash

from adaptor.protocol.messages import Share
from adaptor.verification.agreed_state import MASK
from adaptor.verification.checksums import Sums, scalar_sum
from adaptor.verification.transcript import GRADIENT, NUMBERS, SUM_DIGITS

# The keys of values in param groups; a scheduler changes the values between an update and the next door, but
# not the count of updates.
_GROUP = "group."
_COUNT = f"{_GROUP}step"


class ShardRecord(msgspec.Struct, frozen=True):
    """The sums of a shard on one holder.

    Attributes:
        updated: of the state, after the update
        at_door: of the state, at the next door
        gradient: of the reduced gradient, at the same door
    """

    updated: Sums
    at_door: Sums
    gradient: Sums

    @property
    def state(self) -> Sums:
        """Return the sums after the update, without the values that a scheduler changes."""
        return without_groups(self.updated)

    @property
    def changed_at_rest(self) -> list[str]:
        """Return the keys of changes between the update and the next door."""
        return different([self.state, without_groups(self.at_door)])

    @property
    def inputs(self) -> Sums:
        """Return the sums of the inputs of the next update: the gradient, and the values of param groups."""
        groups = self.at_door.keys() - without_groups(self.at_door).keys()
        return {**self.gradient, **{key: self.at_door[key] for key in groups}}


def without_groups(sums: Sums) -> Sums:
    """Return sums without the values of param groups, but with the count of updates."""
    return {key: value for key, value in sums.items() if key == _COUNT or not key.startswith(_GROUP)}


def different(all_sums: Sequence[Sums]) -> list[str]:
    """Return the keys under which sums differ."""
    keys = sorted({key for sums in all_sums for key in sums})
    return [key for key in keys if len({sums.get(key) for sums in all_sums}) > 1]


def recorded_sums(record: ShardRecord) -> dict[str, str]:
    """Return the sums of a shard at the door, for the transcript: all numbers have one sum."""
    numbers = {key: value for key, value in record.at_door.items() if "." in key}
    sums = {key: value for key, value in record.at_door.items() if "." not in key}
    sums |= {NUMBERS: scalar_sum(numbers), GRADIENT: record.gradient["grad"]}
    return {key: value[:SUM_DIGITS] for key, value in sums.items()}


class Report(msgspec.Struct, frozen=True):
    """The sums of a rank in a verified step.

    Attributes:
        shards: by label
        weights: the label of the rank's part of the model, with the sum of the weights after their gather
            ("": not computed), and as the step has used them
        agreed: the newest step on which all holders have agreed; -1: none
    """

    shards: dict[str, ShardRecord]
    weights: dict[str, tuple[str, str]]
    agreed: int = -1


# By label: the ranks that hold a shard, or the same part of the model; in order.
Holders = Mapping[str, Sequence[int]]


def holders_of(shares_by_rank: Sequence[Iterable[Share]]) -> tuple[list[dict[int, str]], Holders]:
    """Return the labels of the shards of each rank, by index, and the holders by label.

    With experts, a shard of the dense optimizer belongs to several groups, under the same index on a rank:
    all ranks that hold the shard for any of the groups are holders of the shard.

    Args:
        shares_by_rank: the shares of each rank.
    """
    parents: dict[str, str] = {}  # of labels of the same shard; the first label in the alphabet is the root

    def root(label: str) -> str:
        while parents[label] != label:
            label = parents[label]
        return label

    for shares in shares_by_rank:
        label_by_index: dict[int, str] = {}
        for share in shares:
            label = _label(share)
            parents.setdefault(label, label)
            same_shard = label_by_index.setdefault(share.index, label)
            first, second = sorted((root(same_shard), root(label)))
            parents[second] = first
    holders: dict[str, list[int]] = {}
    labels: list[dict[int, str]] = []
    for rank, shares in enumerate(shares_by_rank):
        rank_labels = {share.index: root(_label(share)) for share in shares}
        labels.append(rank_labels)
        for label in rank_labels.values():
            holders.setdefault(label, []).append(rank)
    return labels, holders


def _label(share: Share) -> str:
    return f"{share.group}/{share.index}"


def _hash(*parts: object) -> int:
    return int(xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(parts, order="deterministic")))


def contribution(report: Report, rank: int, shards: Holders, weights: Holders) -> int:
    """Return the number of a rank, modulo 2**64. The sum over all ranks is 0 if all holders agree and no
    shard has changed at rest; otherwise the sum is 0 with a probability of 2**-64.

    Of the h holders of a shard the first adds (h-1) times the hash of its sums, all others subtract their
    hashes.

    Args:
        report: of the rank.
        rank: the number of the rank.
        shards, weights: the holders by label.
    """
    total = 0
    for label, record in report.shards.items():
        if record.changed_at_rest:
            total += _hash("at rest", rank, label, record.at_door) | 1
        total += _share(shards[label], rank) * _hash("shard", label, record.state, record.inputs)
    for label, (gathered, used) in report.weights.items():
        if len(weights[label]) == 1 and _differ(gathered, used):  # no other rank would differ
            total += _hash("weights changed", rank, label, used) | 1
        total += _share(weights[label], rank) * _hash("weights", label, used)
    return total & MASK


def _differ(gathered: str, used: str) -> bool:
    """Return whether weights have changed after their gather; False if their sum was not computed."""
    return gathered not in ("", used)


def _share(holders: Sequence[int], rank: int) -> int:
    return len(holders) - 1 if holders[0] == rank else -1


class Kind(Enum):
    """The kinds of a finding, in the order of the search: each kind explains the kinds below."""

    AT_REST = "at rest"
    UPDATE = "update"
    INPUTS = "inputs"
    WEIGHTS = "weights"
    REPLAY = "replay"
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    """The result of a comparison in which not all holders agree.

    Attributes:
        kind: the difference
        label: of the first different shard, or part of the model
        keys: of the different sums
        named: the wrong ranks
        suspects: the holders, if no rank can be named
        agreed: the newest step whose state all holders agree on; the ranks in `named` are left out
        text: a sentence without the ranks
    """

    kind: Kind
    label: str
    keys: tuple[str, ...]
    named: tuple[int, ...]
    suspects: tuple[int, ...]
    agreed: int
    text: str


def decide(
    reports: Sequence[Report], step: int, next_step: int, shards: Holders, weights: Holders
) -> Finding:
    """Return the finding on a step, from the reports of all ranks.

    Args:
        reports: by rank.
        step: the step of the update after which the first sums were computed.
        next_step: the step with the next update, which has the gradients; fp16 skips the steps between.
        shards, weights: the holders by label.
    """
    agreed_before = min([step - 1, *(report.agreed for report in reports)])
    alike = {
        label
        for label, ranks in shards.items()
        if len(ranks) > 1
        and all(reports[rank].shards[label].changed_at_rest for rank in ranks)
        and not different([reports[rank].shards[label].at_door for rank in ranks])
    }
    at_rest = {
        rank: (label, record.changed_at_rest)
        for rank, report in enumerate(reports)
        for label, record in sorted(report.shards.items(), reverse=True)
        if label not in alike and record.changed_at_rest
    }
    states = _compare(shards, lambda rank, label: reports[rank].shards[label].state)
    agreed = agreed_before if states.suspects else step
    if at_rest:
        label, keys = at_rest[min(at_rest)]
        text = f"{_words(keys)} of shard {label} changed at rest after the update of step {step}"
        return Finding(Kind.AT_REST, label, tuple(keys), tuple(sorted(at_rest)), (), agreed, text)
    if states.label:
        difference = f"shard {states.label} differs between its holders after the update of step {step}"
        text = f"{_words(states.keys)} of {difference}"
        return Finding(Kind.UPDATE, *states, agreed, text)
    inputs = _compare(shards, lambda rank, label: reports[rank].shards[label].inputs)
    if inputs.label:
        text = (
            f"{_words(inputs.keys)} of shard {inputs.label} differs between its holders in step {next_step}"
        )
        return Finding(Kind.INPUTS, *inputs, step, text)
    used = _compare(weights, lambda rank, label: {"weights": reports[rank].weights[label][1]})
    alone = {label: ranks[0] for label, ranks in weights.items() if len(ranks) == 1}
    changed_alone = {label for label, rank in alone.items() if _differ(*reports[rank].weights[label])}
    if not used.label and changed_alone and changed_alone != alone.keys():
        label = min(changed_alone)
        used = _SumDifference(label, ("weights",), tuple(sorted(alone[name] for name in changed_alone)), ())
    if used.label:
        changed = tuple(rank for rank in weights[used.label] if _differ(*reports[rank].weights[used.label]))
        if changed:
            used = _SumDifference(used.label, used.keys, changed, ())
        difference = "changed after their gather" if changed else "differ between their holders"
        return Finding(
            Kind.WEIGHTS, *used, step, f"weights of {used.label} {difference}, in step {next_step}"
        )
    text, changed_label = f"the sums of step {step} were added up wrongly", ""
    if changed_alone:
        changed_label = min(changed_alone)
        text = f"all weights without a second holder have changed after their gather, in step {next_step}"
    if alike:
        changed_label = min(alike)
        text = f"all holders of {_words(sorted(alike))} have changed alike after step {step}: no corruption"
    return Finding(Kind.UNKNOWN, changed_label, (), (), (), step, text)


def unexplained(size: int, step: int, agreed: int) -> Finding:
    """Return the finding on a step on which not all holders agree, without the reports of all `size` ranks.

    Args:
        size: of the job.
        step: see `decide`.
        agreed: the newest step on which all holders have agreed.
    """
    text = (
        f"the holders differ after the update of step {step}, and a rank was lost before the place was known"
    )
    return Finding(Kind.UPDATE, "", (), (), tuple(range(size)), min(agreed, step - 1), text)


class _SumDifference(NamedTuple):
    label: str = ""
    keys: tuple[str, ...] = ()
    named: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()


def _compare(holders: Holders, sums_of: Callable[[int, str], Sums]) -> _SumDifference:
    """Return the difference of the first different label, with the ranks of all different labels."""
    first = _SumDifference()
    named: set[int] = set()
    suspects: set[int] = set()
    for label, ranks in sorted(holders.items()):
        sums = {rank: sums_of(rank, label) for rank in ranks}
        hashes = {rank: _hash(rank_sums) for rank, rank_sums in sums.items()}
        (common, count), *deviating = Counter(hashes.values()).most_common()
        if not deviating:
            continue
        if not first.label:
            first = _SumDifference(label, tuple(different(list(sums.values()))))
        if 2 * count > len(ranks):
            named |= {rank for rank, rank_hash in hashes.items() if rank_hash != common}
        else:
            suspects |= set(ranks)
    return first._replace(named=tuple(sorted(named - suspects)), suspects=tuple(sorted(suspects)))


def _words(keys: Sequence[str]) -> str:
    return ", ".join(key.removeprefix("state.").removeprefix(_GROUP) for key in keys)

"""The comparison of replayed micro-batches (TTP_REPLAY_EVERY): which rank computed wrong gradients.

Invariant: all ranks come to the same finding, from the records of all ranks, before the update of the step.
A rank is named only if the repetition by the rank itself shows its error, or if it differs both from the
replica that repeats its micro-batch and from the replica whose micro-batch it repeats; otherwise all ranks
that took part are suspects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from adaptor import context
from adaptor.protocol.environment import Scratch
from adaptor.replica import group
from adaptor.verification.verdict import Finding, Kind

# Until a job has verified so many steps, or repeated so many micro-batches, a difference is a property of its
# layout or its kernels, which do not compute the same bits twice: the check is of no use.
SELF_TEST = 20
PROVEN, OFF = "proven", "off"  # results of a self-test


class SelfTestMemo:
    """The result of a self-test: a start of the workers leaves it to the next start, in the agent's scratch
    folder.

    Args:
        name: of the file; each rank has its own.
    """

    def __init__(self, name: str) -> None:
        folder = context.part(Scratch).path
        self._path = None if folder is None else folder / name

    def read(self) -> str:
        """Return the result; "" without one."""
        try:
            return "" if self._path is None else self._path.read_text()
        except OSError:
            return ""

    def write(self, result: str) -> None:
        """Keep the result. If it cannot be kept, the next start repeats the self-test."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.write_text(result)


class ReplayRecord(msgspec.Struct, frozen=True):
    """The sums of a rank in a replay.

    Attributes:
        replica: the number of the rank's model replica
        replayer: the rank that has repeated the first micro-batch of this rank
        own: the sum of the gradients of the rank's first micro-batch, when the step computed it
        repeated: the sum of the gradients of the micro-batch that the rank has repeated
    """

    replica: int
    replayer: int
    own: str
    repeated: str


def differing(records: Sequence[ReplayRecord]) -> list[int]:
    """Return the ranks whose gradients differ from their repetition on the replayer."""
    return [rank for rank, record in enumerate(records) if record.own != records[record.replayer].repeated]


def decide(records: Sequence[ReplayRecord], second: Sequence[str], step: int) -> Finding:
    """Return the finding of a replay in which ranks differ.

    Args:
        records: by rank.
        second: by rank, the sum of the first micro-batch that the rank itself has repeated.
        step: the step of the micro-batch.
    """
    ranks = differing(records)
    first = ranks[0]
    text = (
        f"the gradients of the first micro-batch of rank {first} differ from their repetition on rank"
        f" {records[first].replayer}, in step {step}"
    )

    def finding(named: Sequence[int], suspects: Sequence[int]) -> Finding:
        return Finding(Kind.REPLAY, "", ("grad",), tuple(named), tuple(suspects), step - 1, text)

    replicas = {record.replica for record in records}
    differ_from_next = {records[rank].replica for rank in ranks}
    differ_from_previous = {records[records[rank].replayer].replica for rank in ranks}
    differ_from_both = differ_from_next & differ_from_previous
    wrong_once = {
        records[rank].replica
        for rank in ranks
        if second[rank] != records[rank].own and second[rank] == records[records[rank].replayer].repeated
    }
    wrong = wrong_once or (differ_from_both if len(replicas) > 2 and len(differ_from_both) == 1 else set())
    if wrong:
        # An error in one pipeline stage or tensor rank spreads to all ranks of the replica.
        members = [rank for rank in ranks if records[rank].replica in wrong]
        return finding(members, ()) if len(members) == len(wrong) else finding((), members)
    return finding((), sorted({*ranks, *(records[rank].replayer for rank in ranks)}))


class ReplayCheck:
    """The replays of one rank.

    Args:
        every: the interval between steps with a replay.
        rank: of the process.
        tell: prints a line on one rank.

    Attributes:
        finding: of the replay of the current step, in which ranks differ; None: they agree
    """

    def __init__(self, every: int, rank: int, tell: Callable[[str], None]) -> None:
        self._every = every
        self._tell = tell
        self._count = 0  # of replays that agreed
        self.finding: Finding | None = None
        self._step = 0
        self._memo = SelfTestMemo(f"replay{rank}")
        result = self._memo.read()
        if result == OFF:
            self._every = 0
        elif result == PROVEN:
            self._count = SELF_TEST

    def begin(self) -> None:
        """Agree with all ranks on the state of the self-test: a new process knows nothing. Collective."""
        self.finding = None
        is_on, self._count = group.smallest(group.of_training_job(), (self._every > 0, self._count))
        self._every = self._every if is_on else 0

    def begin_step(self, step: int) -> bool:
        """Forget the finding of the previous step; return whether a micro-batch of `step` is repeated."""
        self.finding, self._step = None, step
        return bool(self._every) and step % self._every == 0

    def compare(self, record: ReplayRecord, repeat: Callable[[], str]) -> None:
        """Compare the replays of all ranks; set `finding`. Collective.

        Args:
            record: of this rank.
            repeat: repeats the rank's own first micro-batch and returns the sum of the gradients; collective.

        Raises:
            RuntimeError: a rank is gone.
        """
        everyone = group.of_training_job()
        records = group.gather_all(record, everyone)
        if not differing(records):
            self._count += 1
            if self._count == SELF_TEST:
                self._memo.write(PROVEN)
            return
        finding = decide(records, group.gather_all(repeat(), everyone), self._step)
        if self._count >= SELF_TEST:
            self.finding = finding
            return
        self._every = 0
        self._memo.write(OFF)
        self._tell(
            f"no micro-batch is repeated (TTP_REPLAY_EVERY): {finding.text}, in the first {SELF_TEST}"
            " replays, so the kernels of this job may not compute the same bits twice"
        )

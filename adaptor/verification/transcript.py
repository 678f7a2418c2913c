"""The transcript of a job: the sums of each verified step, a line for each step, in a chain (TTP_TRANSCRIPT).

Each rank sends its sums after the verdict on the step. The `ttprun` with the controller appends a line when
the sums of all ranks have come, in the thread that writes for people: no decision waits for the file.

Invariant: a line ends with the SHA-256 of the chain of the previous line and of its own text. So a changed,
removed or inserted line is found; lines that are cut off at the end are not. A writer continues the chain of
the last complete line, also after a restart, and removes what a crash has left of a line.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from adaptor.errors import CheckpointError
from adaptor.protocol.messages import Verified

NAME = "transcript.jsonl"
SUM_DIGITS = 16  # of a sum in hexadecimal: 64 bits
NUMBERS = "numbers"  # counts of updates, learning rate, weight decay and betas
GRADIENT = "grad"
WEIGHTS = "weights"
RANDOM = "random states"
_CHAIN = b',"chain":"'
_TAIL = len(_CHAIN) + 64 + len(b'"}')
# Verified steps whose sums have not come from all ranks: ranks are at most one verified step apart.
_MOST_OPEN = 4
_BLOCK = 1 << 16  # bytes


class RankSums(msgspec.Struct, frozen=True):
    """The sums of a rank; see `Verified`."""

    shards: dict[str, dict[str, str]]
    own: dict[str, str]


class VerifiedStep(msgspec.Struct, frozen=True):
    """A line of the transcript.

    Attributes:
        time: in UTC
        step: of the update after which the sums were computed
        newest: the newest step of all earlier lines; -1: none
        is_agreed: whether all holders of the state agree
        samples: the consumed samples of the job; None: unknown
        versions: of torch, the framework and the adaptor; layout and device
        ranks: by rank
    """

    time: str
    step: int
    newest: int
    is_agreed: bool
    samples: int | None
    versions: dict[str, str]
    ranks: list[RankSums]

    @property
    def is_repeated(self) -> bool:
        """Whether the job had gone back, and made the step again."""
        return self.step <= self.newest

    def sums(self, label: str) -> Mapping[str, str]:
        """Return the sums of a shard, as the first holder has sent them."""
        return next((rank.shards[label] for rank in self.ranks if rank.shards.get(label)), {})


class OpenSteps:
    """Collects the sums of all ranks, step by step."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, Verified]] = {}

    def clear(self) -> None:
        """Forget sums: the job goes back, or starts again."""
        self._steps.clear()

    def add(self, message: Verified, time: str) -> VerifiedStep | None:
        """Add the sums of a rank; return the line of the step if the sums of all ranks have come."""
        ranks = self._steps.setdefault(message.step, {})
        ranks[message.rank] = message
        if len(ranks) < message.size:
            while len(self._steps) > _MOST_OPEN:
                del self._steps[min(self._steps)]
            return None
        del self._steps[message.step]
        ordered = [ranks[rank] for rank in sorted(ranks)]
        first = ordered[0]
        is_agreed = all(rank.is_agreed for rank in ordered)
        entries = [RankSums(rank.shards, rank.own) for rank in ordered]
        return VerifiedStep(time, message.step, -1, is_agreed, first.samples, first.versions, entries)


def append(path: Path, verified: VerifiedStep) -> None:
    """Append a step to the transcript. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        last, end = _last_line(file)
        file.truncate(end)
        try:
            previous = msgspec.json.decode(last, type=VerifiedStep)
            newest = max(previous.newest, previous.step)
        except msgspec.MsgspecError:  # no line, or a damaged one, which `TranscriptReader` names
            newest = -1
        body = msgspec.json.encode(msgspec.structs.replace(verified, newest=newest))
        file.write(body[:-1] + _CHAIN + _next(_chain_of(last), body) + b'"}\n')


def _last_line(file: BinaryIO) -> tuple[bytes, int]:
    """Return the last complete line, without its end, and the offset after the line."""
    size, length = file.seek(0, os.SEEK_END), _BLOCK
    while True:
        start = max(0, size - length)
        file.seek(start)
        block = file.read(size - start)
        end = block.rfind(b"\n") + 1
        begin = block.rfind(b"\n", 0, max(0, end - 1)) + 1
        if begin or not start:
            return block[begin : max(0, end - 1)], start + end
        length *= 4


def _chain_of(line: bytes) -> bytes:
    return line[-66:-2]


def _next(chain: bytes, body: bytes) -> bytes:
    return hashlib.sha256(chain + body).hexdigest().encode()


class TranscriptReader:
    """Reads a transcript, also while it is written.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._chain = b""
        self._number = 0

    def read(self) -> list[VerifiedStep]:
        """Return the steps that have come since the last call; a last line without an end is left out.

        Raises:
            CheckpointError: the file cannot be read, or a line is not as it was written.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read()
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read ({error.strerror})") from error
        end = data.rfind(b"\n") + 1
        self._place += end
        return [self._decode(line) for line in data[:end].splitlines()]

    def _decode(self, line: bytes) -> VerifiedStep:
        self._number += 1
        body, chain = line[:-_TAIL] + b"}", _chain_of(line)
        if chain != _next(self._chain, body):
            raise CheckpointError(
                f"{self._path}: line {self._number} does not follow from the line before: a line was changed,"
                " removed or inserted here"
            )
        self._chain = chain
        try:
            return msgspec.json.decode(body, type=VerifiedStep)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{self._path}: line {self._number}: {error}") from error


def trained(steps: Iterable[VerifiedStep]) -> dict[int, VerifiedStep]:
    """Return the agreed steps, by number; of a repeated step the last one."""
    return {verified.step: verified for verified in steps if verified.is_agreed}


def incomparable(recorded: VerifiedStep, replayed: VerifiedStep) -> str:
    """Return why the sums of two jobs cannot be compared rank by rank; "": they can."""
    for name in ("layout", "device"):
        old, new = (verified.versions.get(name, "") for verified in (recorded, replayed))
        if old != new:
            return f"another {name}: recorded with {old}, replayed with {new}"
    return ""


def other_versions(recorded: VerifiedStep, replayed: VerifiedStep) -> str:
    """Return the versions that differ, in words; "": none."""
    pairs = {name: (recorded.versions.get(name, ""), new) for name, new in replayed.versions.items()}
    return ", ".join(
        f"{name} {old or 'none'} when recorded, {new or 'none'} now"
        for name, (old, new) in pairs.items()
        if old != new
    )


def differences(recorded: VerifiedStep, replayed: VerifiedStep) -> list[str]:
    """Return the differences between two runs of a verified step, causes first: a text for each tensor.

    State is that of the step; random states, weights and gradients are those at the door of the next update.
    """
    step, ranks = recorded.step, dict[str, list[int]]()
    texts = []
    if recorded.samples != replayed.samples:
        texts.append(f"the position in the data: {recorded.samples} samples recorded, {replayed.samples} now")
    for rank, rank_sums in enumerate(replayed.ranks):
        for label, shard_sums in rank_sums.shards.items():
            sums, recorded_sums = shard_sums or replayed.sums(label), recorded.sums(label)
            for key in sums.keys() | recorded_sums.keys():
                if sums.get(key) != recorded_sums.get(key):
                    ranks.setdefault(f"{key} of shard {label}", []).append(rank)
        for key, value in rank_sums.own.items():
            if recorded.ranks[rank].own.get(key) != value:
                ranks.setdefault(key, []).append(rank)

    def order(text: str) -> tuple[int, str]:
        at_the_door = (RANDOM, WEIGHTS, GRADIENT)
        return next((number for number, key in enumerate(at_the_door, 1) if text.startswith(key)), 0), text

    for text in sorted(ranks, key=order):
        several = "s" if len(ranks[text]) > 1 else ""
        moment = f"in step {step + 1}" if order(text)[0] else f"after step {step}"
        texts.append(f"{text} on rank{several} {' and '.join(map(str, ranks[text]))}, {moment}")
    return texts

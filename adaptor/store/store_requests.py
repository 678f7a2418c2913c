"""Repeats requests to a store while the store is busy; has the errors of its answers, each a single line."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from adaptor.errors import StoreError
from adaptor.store.settings import Address

# A store that is restarted, or fails over, is usually back within a minute. A wrong address is reported at
# the first request, some seconds after the start.
RETRY_S = 60.0

T = TypeVar("T")
# The codes of an answer of a store without the bucket.
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_LINE = 300  # characters of the error of a client


class BusyError(StoreError):
    """The store does not answer, or is busy; a later attempt may succeed."""


@dataclass
class Backoff:
    """The waiting times before attempts: each is twice the last, up to `longest_s`."""

    first_s: float
    longest_s: float

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self.longest_s)
        return wait_s

    def reset(self) -> None:
        """Begin again with the first waiting time, after a success."""
        self._next_s = self.first_s


@dataclass
class Retrying:
    """Repeats requests while the store is busy.

    Attributes:
        tell: prints the line that a store is awaited; None: no line.
        seconds: for which a request is repeated.
        clock: in seconds.
        sleep: waits for a number of seconds.
        first_s: seconds before the first repetition.
        longest_s: the longest time between two repetitions. If it is longer than `first_s`, waiting times are
            random, so that refused clients do not come back together.
    """

    tell: Callable[[str], None] | None
    seconds: float = RETRY_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    first_s: float = field(default=1.0, kw_only=True)
    longest_s: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # guards `_line_at`: several threads make requests
        self._line_at: float | None = None

    def ask(self, request: Callable[[], T], *, from_start: bool = False) -> T:
        """Return the result of `request`.

        Args:
            request: the request.
            from_start: count from now, not from the first failure, and begin no request after the time.

        Raises:
            BusyError: the request has failed for that long.
            StoreError: the request is refused, or the object is missing.
        """
        until = self.clock() + self.seconds if from_start else None
        backoff = Backoff(self.first_s, self.longest_s)
        while True:
            try:
                return request()
            except BusyError as error:
                current_time, wait_s = self.clock(), backoff.next()
                until = current_time + self.seconds if until is None else until
                if current_time >= until or (from_start and current_time + wait_s > until):
                    if self.tell is None:
                        raise
                    raise BusyError(f"{error} (it was asked for {self.seconds:g} s)") from None
                if self.tell is not None and self._is_line_due(current_time):
                    self.tell(f"{error}; it is asked again for {self.seconds:g} s (Ctrl-C ends that)")
            self.sleep(wait_s * random.uniform(0.5, 1) if self.longest_s > self.first_s else wait_s)

    def _is_line_due(self, current_time: float) -> bool:
        """Return whether no line was printed for as long as one request is repeated."""
        with self._lock:
            due = self._line_at is None or current_time - self._line_at >= self.seconds
            if due:
                self._line_at = current_time
            return due


@dataclass(frozen=True)
class Answers:
    """The errors of a store's answers, each a single line, for every client.

    Attributes:
        endpoint: the URL of the store; empty for the provider's own
    """

    address: Address
    endpoint: str

    def no_bucket(self) -> StoreError:
        """Return the error of a store without the bucket."""
        kind = "container" if self.address.scheme == "az" else "bucket"
        return StoreError(f"{self.address}: there is no {kind} {self.address.bucket} in {self._where()}")

    def refused(self, doing: str, answer: str) -> StoreError:
        """Return the error of credentials that the store does not accept for a request.

        Args:
            doing: the request, such as `write iter_0000012/...`.
            answer: the status and the code of the answer; may be empty.
        """
        return StoreError(
            f"{self.address}: {self._where()} does not allow these credentials to {doing}"
            f" ({answer or 'refused'})"
        )

    def answered(self, doing: str, answer: str) -> StoreError:
        """Return the error of any other answer; the arguments are as in `refused`."""
        return StoreError(f"{self.address}: cannot {doing}: {self._where()} answers {answer}")

    def silent(self, doing: str) -> StoreError:
        """Return the error of a store that does not answer."""
        return StoreError(
            f"{self.address}: cannot {doing}: no answer from {self._where()}; is the address right, and does"
            " the server run?"
        )

    def failed(self, doing: str, reason: str) -> StoreError:
        """Return the error of a client that could not make a request.

        Args:
            doing: the request.
            reason: in the client's words.
        """
        return StoreError(f"{self.address}: cannot {doing}: {plain(reason)}")

    def _where(self) -> str:
        return self.endpoint or self.address.provider


def plain(text: str) -> str:
    """Return the first line of an error of a client, without the queries of URLs."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason is given"
    line = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", line)  # signatures are in queries
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."

"""Makes one line of what a store answers, whichever client has asked it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from adaptor.errors import StoreError
from adaptor.store.address import Address

NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_LINE = 300


@dataclass(frozen=True)
class Answers:
    """The store that has answered.

    Attributes:
        endpoint: the URL at which it answers; empty for that of its provider
    """

    address: Address
    endpoint: str

    def no_bucket(self) -> StoreError:
        """Return the error of a store that has no such bucket."""
        kind = "container" if self.address.scheme == "az" else "bucket"
        return StoreError(f"{self.address}: there is no {kind} {self.address.bucket} in {self._where()}")

    def refused(self, doing: str, answer: str) -> StoreError:
        """Return the error of credentials that a store does not accept for this.

        Args:
            doing: what was asked for, such as `write iter_0000012/...`.
            answer: the status and the code of the answer; may be empty.
        """
        return StoreError(
            f"{self.address}: {self._where()} does not allow these credentials to {doing}"
            f" ({answer or 'refused'})"
        )

    def answered(self, doing: str, answer: str) -> StoreError:
        """Return the error of any other answer; the arguments are those of `refused`."""
        return StoreError(f"{self.address}: cannot {doing}: {self._where()} answers {answer}")

    def silent(self, doing: str) -> StoreError:
        """Return the error of a store that does not answer."""
        return StoreError(
            f"{self.address}: cannot {doing}: no answer from {self._where()}; is the address right, and does"
            " the server run?"
        )

    def failed(self, doing: str, reason: str) -> StoreError:
        """Return the error of a client that could not ask.

        Args:
            doing: what was to be asked for.
            reason: in its words.
        """
        return StoreError(f"{self.address}: cannot {doing}: {plain(reason)}")

    def _where(self) -> str:
        return self.endpoint or self.address.provider


def plain(text: str) -> str:
    """Return the first line of an error of a client, without the queries of URLs."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason is given"
    line = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", line)  # signatures are in queries
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."

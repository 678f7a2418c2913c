"""The address of checkpoints in an object store (`s3://bucket/run7`), and the messages about its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from adaptor.errors import StoreError

SCHEMES = ("s3", "obs", "gs", "az", "file")
_PROVIDERS = {
    "s3": "S3",
    "obs": "Huawei OBS",
    "gs": "Google Cloud Storage",
    "az": "Azure Blob Storage",
    "file": "a folder",
}
# The strictest names of all providers have these characters; Azure allows fewer.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,62}")


@dataclass(frozen=True)
class Address:
    """A place in an object store.

    Attributes:
        scheme: one of SCHEMES
        bucket: the bucket; of Azure the container; of file:// empty
        prefix: with `/` between its parts; of file:// the absolute path of the folder
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix.lstrip('/')}" if self.prefix else "")

    @property
    def provider(self) -> str:
        """Return the kind of store, for a message."""
        return _PROVIDERS[self.scheme]


def parse(url: str) -> Address:
    """Return the address of a URL.

    Raises:
        StoreError: the URL names no store.
    """
    scheme, separator, remainder = url.partition("://")
    if not separator:
        raise StoreError(f"{_shown(url)}: is no URL of a store; it must be like s3://bucket/run7")
    if scheme not in SCHEMES:
        raise StoreError(f"{_shown(url)}: {scheme}:// is no store that is known; {_known()} are")
    host, _, path = remainder.partition("/")
    if "@" in host or ("?" in remainder and scheme != "file"):
        raise StoreError(
            f"{_shown(url)}: holds credentials or options; leave them out, they are read from the environment"
        )
    if scheme == "file":
        if host:
            raise StoreError(f"{_shown(url)}: a folder is named with three slashes, file:///folder")
        if not path.strip("/"):
            raise StoreError(f"{_shown(url)}: names no folder; it must be like file:///folder/run7")
        return Address(scheme, "", str(Path("/", path)))
    if not _BUCKET.fullmatch(host):
        raise StoreError(
            f"{_shown(url)}: {host!r} is no name of a bucket; it has 2 to 63 of the characters a-z 0-9 . _ -"
        )
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") or not part.isprintable() for part in parts):
        raise StoreError(f"{_shown(url)}: a part of the path is . or .., or cannot be printed")
    return Address(scheme, host, "/".join(parts))


def _known() -> str:
    *first_schemes, last = (f"{scheme}://" for scheme in SCHEMES)
    return f"{', '.join(first_schemes)} and {last}"


def _shown(url: str) -> str:
    """Return a URL without possible secrets, as a printable line."""
    plain = "".join(character if character.isprintable() else "?" for character in url)
    return re.sub(r"://[^/]*@", "://...@", plain.partition("?")[0])


NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_LINE = 300


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

"""One object store, opened by its URL: the few requests that checkpoints need, with errors of one line.

The client is obstore. It tries a request again where the store is busy (5xx) or the connection breaks, for a
minute. An object is there as a whole or not at all. No request relies on conditions, which not every store
that speaks the interface of S3 honours. Uploads of several parts to such a store: `multipart.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from adaptor.errors import StoreError
from adaptor.store.error_messages import NO_BUCKET, Answers
from adaptor.store.etags import bare
from adaptor.store.retrying import BusyError, Retrying
from adaptor.store.threads import call

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from adaptor.store.address import Address
    from adaptor.store.multipart import Multipart

# Bytes of a part of an upload, and of a request when reading: small enough for a slow line to take one within
# the time limit, large enough that requests cost nothing.
PIECE = 16 << 20
# The parts of one object that are on their way at the same time. With PIECE it bounds the memory.
AT_ONCE = 4
# S3 takes 10,000 parts of an object.
_MOST_PARTS = 9000

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """An object as a listing has it.

    Attributes:
        etag: of the store for this content, without quotes; a copy of the object may have another one. Empty
            where there is none
    """

    bytes: int
    etag: str
    modified: datetime


@dataclass(frozen=True)
class Part:
    """A part of an object, and of which version of the object it is.

    Attributes:
        etag: of the object, without quotes
        size: of the whole object, in bytes
    """

    content: memoryview
    etag: str
    size: int


class DamagedError(StoreError):
    """An object is missing, or is not what was written; others of the store may be as they must be."""


class MissingError(DamagedError):
    """There is no object of this name."""


class Store:
    """An object store that is open. Every method raises StoreError where the store refuses or is silent.

    Args:
        place: that it has.
        client: of it.
        endpoint: the URL at which it answers; empty for that of its provider.
        multipart: sends what is larger than `piece`; None: `put_pieces` does.
        piece: bytes of a part of an upload, at least.
        retrying: makes requests again that the client has given up, but those of `put_pieces`; None: nobody
            does.
    """

    def __init__(
        self,
        place: Address,
        client: ObjectStore,
        endpoint: str,
        multipart: Multipart | None = None,
        piece: int = PIECE,
        retrying: Retrying | None = None,
    ) -> None:
        self.address = place
        self.multipart = multipart
        self.piece = piece
        self._client = client
        self._endpoint = endpoint
        self._retrying = retrying
        self._answers = Answers(place, endpoint)

    def __str__(self) -> str:
        return str(self.address)

    @property
    def identity(self) -> str:
        """Return what tells this store from any other: two endpoints may have buckets of the same name."""
        endpoint = self._endpoint if self.multipart is None else self.multipart.endpoint
        return f"{self} at {endpoint.rstrip('/')}" if endpoint else str(self)

    def part_size(self, size: int) -> int:
        """Return the bytes of each part, but the last, of an object of `size` bytes."""
        return max(self.piece, -(-size // _MOST_PARTS))

    def put(self, name: str, content: bytes) -> str:
        """Write a small object; return its etag."""
        import obstore

        put = partial(obstore.put, self._client, name, content, use_multipart=False)
        response = self._ask(f"write {name}", put)
        return bare(response["e_tag"])

    def put_pieces(self, name: str, pieces: Iterator[bytes | bytearray], size: int) -> str:
        """Write an object of `size` bytes from its pieces; return its etag.

        What `pieces` raises ends the upload, and is raised here; then there is no object. Another process
        cannot go on with it.
        """
        import obstore

        with self._errors(f"write {name}"):
            response = call(
                lambda: obstore.put(
                    self._client,
                    name,
                    pieces,
                    use_multipart=True,
                    chunk_size=self.part_size(size),
                    max_concurrency=AT_ONCE,
                )
            )
        return bare(response["e_tag"])

    def get(self, name: str, limit: int) -> bytes:
        """Return the content of an object of at most `limit` bytes.

        Raises:
            DamagedError: there is none, or it is larger.
        """
        import obstore

        def read() -> bytes:
            response = obstore.get(self._client, name)
            size = int(response.meta["size"])
            if size > limit:
                raise DamagedError(f"{self}/{name}: has {size} bytes; {limit} are the most it may have")
            return bytes(response.bytes())

        return self._ask(f"read {name}", read)

    def get_range(self, name: str, start: int, length: int) -> memoryview:
        """Return `length` bytes of an object from `start`, which must be there."""
        return self.get_part(name, start, length).content

    def get_part(self, name: str, start: int, length: int) -> Part:
        """Return `length` bytes of an object from `start`, which must be there, and its version."""
        import obstore

        def read() -> Part:
            response = obstore.get(self._client, name, options={"range": (start, start + length)})
            content = memoryview(response.bytes())
            return Part(content, bare(response.meta["e_tag"]), int(response.meta["size"]))

        part = self._ask(f"read {name}", read)
        if len(part.content) != length:
            raise DamagedError(f"{self}/{name}: {len(part.content)} bytes came where {length} were asked for")
        return part

    def stat(self, name: str) -> Stored | None:
        """Return what is known of an object, None where there is none."""
        import obstore

        with contextlib.suppress(MissingError):
            entry = self._ask(f"look at {name}", lambda: obstore.head(self._client, name))
            return Stored(int(entry["size"]), bare(entry["e_tag"]), entry["last_modified"])
        return None

    def objects(self, prefix: str) -> dict[str, Stored]:
        """Return all objects below `prefix`, by their names, which begin with it."""
        import obstore

        def listed() -> dict[str, Stored]:
            return {
                str(entry["path"]): Stored(int(entry["size"]), bare(entry["e_tag"]), entry["last_modified"])
                for batch in obstore.list(self._client, prefix or None)
                for entry in batch
            }

        return self._ask(f"list {prefix or 'it'}", listed)

    def folders(self, prefix: str = "") -> list[str]:
        """Return what follows `prefix` in the names of objects, up to the next `/`, without repetitions."""
        import obstore

        list_them = partial(obstore.list_with_delimiter, self._client, prefix or None)
        listing = self._ask(f"list {prefix or 'it'}", list_them)
        return sorted(str(folder_path).rpartition("/")[2] for folder_path in listing["common_prefixes"])

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is none to remove."""
        import obstore

        if names:
            with contextlib.suppress(MissingError):
                self._ask(f"remove {names[0]}", lambda: obstore.delete(self._client, list(names)))

    def _ask(self, doing: str, request: Callable[[], T]) -> T:
        """Return what a request brings that may be made again."""

        def once() -> T:
            with self._errors(doing):
                return call(request)

        return once() if self._retrying is None else self._retrying.ask(once)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        from obstore import exceptions

        try:
            yield
        except (exceptions.BaseError, FileNotFoundError) as error:
            raise self._said(error, doing) from None

    def _said(self, error: Exception, doing: str) -> StoreError:
        """Return the error in one line; what the client quotes of a URL or a body is left out."""
        from obstore import exceptions

        text = str(error).partition("Debug source:")[0]
        code = re.search(r"<Code>(\w{1,80})</Code>", text)
        status = re.search(r"status code: (\d{3}[ \w]{0,40})", text)
        answer = ", ".join(part for part in (status and status[1].strip(), code and code[1]) if part)
        if code and code[1] in NO_BUCKET:
            return self._answers.no_bucket()
        if isinstance(error, FileNotFoundError):
            return MissingError(f"{self}: cannot {doing}: there is no such object")
        if status and status[1].startswith("416"):
            return DamagedError(f"{self}: cannot {doing}: it is shorter than it was")
        refused = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if refused or (status and status[1].startswith(("401", "403"))):
            return self._answers.refused(doing, answer)
        if answer:
            answered = self._answers.answered(doing, answer)
            return BusyError(str(answered)) if status and status[1].startswith(("5", "429")) else answered
        if "HTTP error" in text or "error sending request" in text:
            return BusyError(str(self._answers.silent(doing)))
        return self._answers.failed(doing, text)

"""An object store, opened by its URL: the few requests that checkpoints need, with errors of a single line.

The client is obstore. It repeats a request for a minute while the store is busy (5xx) or the connection
breaks. A store has an object as a whole or not at all. No request relies on conditions, which some stores
with the interface of S3 do not honour. Uploads of several parts to such a store: `multipart.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from adaptor import plug_ins, threads
from adaptor.errors import StoreError
from adaptor.store import s3, settings
from adaptor.store.multipart import Multipart, bare
from adaptor.store.settings import Address
from adaptor.store.store_requests import NO_BUCKET, Answers, BusyError, Retrying, plain

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig

    from adaptor.store.s3 import S3Bucket

# Bytes of a part of an upload, and of a read request: small enough for a slow line within the time limit,
# large enough that requests cost nothing.
PIECE = 16 << 20
# S3 accepts 10,000 parts of an object.
_MOST_PARTS = 9000

T = TypeVar("T")
_PROBE = "ttp_probe"  # the folder of objects that only try the store
_OF_S3 = ("s3", "obs")
# The variables from which obstore itself reads the credentials.
_CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY",
}
# Seconds for which the client repeats a request, before a line says that the store is awaited.
_FIRST_S = 10.0


@dataclass(frozen=True)
class Stored:
    """An object in a listing.

    Attributes:
        etag: of the store for this content, without quotes; a copy of the object may have another etag. Empty
            if there is none
    """

    bytes: int
    etag: str
    modified: datetime


@dataclass(frozen=True)
class Part:
    """A part of an object, and the object's version.

    Attributes:
        etag: of the object, without quotes
        size: of the whole object, in bytes
    """

    content: memoryview
    etag: str
    size: int


class DamagedError(StoreError):
    """An object is missing or differs from its upload; other objects of the store may be intact."""


class MissingError(DamagedError):
    """The store has no object of this name."""


class Store:
    """An open object store. Every method raises StoreError if the store refuses or is silent.

    Args:
        place: the address.
        client: obstore's client.
        endpoint: the URL of the store; empty for the provider's own.
        multipart: sends objects larger than `piece`; None: `put_pieces` does.
        piece: the smallest number of bytes of a part of an upload.
        retrying: repeats requests that `client` has given up, except `put_pieces`; None: only `client` does.
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
        """Return the URL and endpoint: two endpoints may have buckets of the same name."""
        endpoint = self._endpoint if self.multipart is None else self.multipart.endpoint
        return f"{self} at {endpoint.rstrip('/')}" if endpoint else str(self)

    def part_size(self, size: int) -> int:
        """Return the bytes of each part, except the last, of an object of `size` bytes."""
        return max(self.piece, -(-size // _MOST_PARTS))

    def put(self, name: str, content: bytes) -> str:
        """Write a small object; return its etag."""
        import obstore

        put = partial(obstore.put, self._client, name, content, use_multipart=False)
        response = self._ask(f"write {name}", put)
        return bare(response["e_tag"])

    def put_pieces(self, name: str, pieces: Iterator[bytes | bytearray], size: int) -> str:
        """Write an object of `size` bytes from its pieces; return its etag.

        An exception of `pieces` ends the upload without an object, and is raised here. Another process cannot
        go on with the upload.
        """
        import obstore

        with self._errors(f"write {name}"):
            response = threads.call(
                lambda: obstore.put(
                    self._client,
                    name,
                    pieces,
                    use_multipart=True,
                    chunk_size=self.part_size(size),
                    max_concurrency=threads.AT_ONCE,
                )
            )
        return bare(response["e_tag"])

    def get(self, name: str, limit: int) -> bytes:
        """Return the content of an object of at most `limit` bytes.

        Raises:
            DamagedError: the object is missing or larger.
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
        """Return `length` bytes of an existing object from `start`."""
        return self.get_part(name, start, length).content

    def get_part(self, name: str, start: int, length: int) -> Part:
        """Return `length` bytes of an existing object from `start`, and its version."""
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
        """Return size, etag and time of an object, None if there is no such object."""
        import obstore

        with contextlib.suppress(MissingError):
            entry = self._ask(f"look at {name}", lambda: obstore.head(self._client, name))
            return Stored(int(entry["size"]), bare(entry["e_tag"]), entry["last_modified"])
        return None

    def objects(self, prefix: str) -> dict[str, Stored]:
        """Return all objects below `prefix`, by their full names."""
        import obstore

        def listed() -> dict[str, Stored]:
            return {
                str(entry["path"]): Stored(int(entry["size"]), bare(entry["e_tag"]), entry["last_modified"])
                for batch in obstore.list(self._client, prefix or None)
                for entry in batch
            }

        return self._ask(f"list {prefix or 'it'}", listed)

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of folders below `prefix`, without repetitions."""
        import obstore

        list_them = partial(obstore.list_with_delimiter, self._client, prefix or None)
        listing = self._ask(f"list {prefix or 'it'}", list_them)
        return sorted(str(folder_path).rpartition("/")[2] for folder_path in listing["common_prefixes"])

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; a missing object is no error."""
        import obstore

        if names:
            with contextlib.suppress(MissingError):
                self._ask(f"remove {names[0]}", lambda: obstore.delete(self._client, list(names)))

    def _ask(self, doing: str, request: Callable[[], T]) -> T:
        """Return the result of a request that may be repeated."""

        def once() -> T:
            with self._errors(doing):
                return threads.call(request)

        return once() if self._retrying is None else self._retrying.ask(once)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        from obstore import exceptions

        try:
            yield
        except (exceptions.BaseError, FileNotFoundError) as error:
            raise self._translated(error, doing) from None

    def _translated(self, error: Exception, doing: str) -> StoreError:
        """Return the error in a single line, without the client's quotes of a URL or a body."""
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


def open_store(
    url: str,
    endpoint: str = "",
    *,
    make: bool = False,
    patience_s: float = 60,
    piece: int = PIECE,
    retrying: Retrying | None = None,
) -> Store:
    """Open the store that a URL names; no request is made.

    Args:
        url: like `s3://bucket/run7`.
        endpoint: the URL of the store; empty for the provider's own.
        make: for writing: a missing folder (file://) is made, if its parent exists.
        patience_s: for how many seconds the client repeats a failing request, ten times at most.
        piece: the smallest number of bytes of a part of an upload; S3 accepts none below 5 MiB.
        retrying: repeats requests afterwards.

    Raises:
        StoreError: the URL, the credentials or the installation are wrong.
    """
    place = settings.parse(url)
    try:
        from obstore import exceptions
        from obstore import store as kinds
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise StoreError(
            f"{place}: object stores need the package obstore: {plug_ins.install_command('store')}"
        ) from None
    if place.scheme == "file":
        _require_folder(Path(place.prefix), make)
        # Folders that are left empty would look like checkpoints.
        return Store(place, kinds.LocalStore(place.prefix, automatic_cleanup=True), "")
    s3_bucket = s3.bucket(place, endpoint) if place.scheme in _OF_S3 else None
    if s3_bucket is not None and make:
        s3.require_botocore(place)
    try:
        client = _remote(place, s3_bucket, endpoint, patience_s)
    except (exceptions.BaseError, OSError, ValueError) as error:
        read = _CREDENTIALS.get(place.scheme)
        hint = f"; the environment has its credentials: {read}" if read else ""
        raise StoreError(f"{place}: cannot be opened: {plain(str(error))}{hint}") from None
    parts = Multipart(s3_bucket, Answers(place, endpoint), patience_s) if s3_bucket is not None else None
    return Store(place, client, endpoint, parts, piece, retrying)


def _remote(place: Address, bucket: S3Bucket | None, endpoint: str, patience_s: float) -> ObjectStore:
    from obstore import store as kinds

    prefix = place.prefix or None
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=s3.CONNECT_S),
        "timeout": timedelta(seconds=s3.ANSWER_S),
    }
    retry: RetryConfig = {"max_retries": 10, "retry_timeout": timedelta(seconds=patience_s)}
    if bucket is not None:
        return kinds.S3Store(
            place.bucket,
            prefix=prefix,
            config=s3.options(bucket),
            client_options=client,
            retry_config=retry,
        )
    if place.scheme == "gs":
        google: GCSConfig = {"base_url": endpoint} if endpoint else {}
        return kinds.GCSStore(
            place.bucket, prefix=prefix, config=google, client_options=client, retry_config=retry
        )
    azure: AzureConfig = {"endpoint": endpoint} if endpoint else {}
    return kinds.AzureStore(
        place.bucket, prefix=prefix, config=azure, client_options=client, retry_config=retry
    )


def _require_folder(folder: Path, make: bool) -> None:
    try:
        if make:
            folder.mkdir(exist_ok=True)
    except OSError as error:
        advice = "" if folder.parent.is_dir() else f"; make {folder.parent} first, or correct the URL"
        raise StoreError(f"file://{folder}: cannot be made ({error.strerror}){advice}") from None
    if not folder.is_dir():
        raise StoreError(f"file://{folder}: there is no such folder; correct the URL")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise StoreError(f"file://{folder}: this user cannot read it")


def open_waiting(url: str, endpoint: str, tell: Callable[[str], None]) -> Store:
    """Open a store to read from it; a silent store is awaited for a minute.

    Args:
        url: like `s3://bucket/run7`.
        endpoint: the URL of the store; empty for the provider's own.
        tell: prints a line.

    Raises:
        StoreError: as `open_store`.
    """
    return open_store(url, endpoint, patience_s=_FIRST_S, retrying=Retrying(tell))


def probe(url: str, endpoint: str, tell: Callable[[str], None]) -> None:
    """Write an object to a store, and remove the object.

    Args:
        url: like `s3://bucket/run7`.
        endpoint: the URL of the store; empty for the provider's own.
        tell: prints a line.

    Raises:
        StoreError: the store cannot be written.
    """
    store = open_store(url, endpoint, make=True, patience_s=_FIRST_S, retrying=Retrying(tell))
    name = f"{_PROBE}/{os.getpid()}-{time.time_ns()}"
    store.put(name, b"")
    store.delete([name])

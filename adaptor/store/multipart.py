"""Requests of an upload in parts to a store with the interface of S3, which another process can continue.

The client is botocore, because obstore has no request for an upload that another process has begun. A request
is repeated for a minute: botocore itself counts attempts alone, and eight silent attempts would take a
quarter of an hour. Before an upload is completed, the store has no object of its name, or the previous
object.

An etag identifies the version of an object. Some answers have etags with quotes, others without: in a listing
and in a header of Azure, and in a listing of Ceph's gateway and after a completed upload. All etags are kept
without quotes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http.client import responses
from typing import Any, TypeVar

from adaptor.errors import StoreError
from adaptor.store import s3
from adaptor.store.s3 import S3Bucket
from adaptor.store.store_requests import NO_BUCKET, Answers, BusyError, Retrying

_LOST = ("NoSuchUpload", "InvalidPart")
# A busy store answers with a status from 500 on, or with one of these codes.
_BUSY = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests")
# Seconds before a request is repeated: the first and the longest time.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0

T = TypeVar("T")


class RefusedError(StoreError):
    """The store does not allow these credentials the request."""


class LostUploadError(StoreError):
    """The store does not have the upload, or lacks parts of it."""


@dataclass(frozen=True)
class Upload:
    """An upload that was begun and not completed.

    Attributes:
        name: of the object
        mark: the store's identifier of the upload
    """

    name: str
    mark: str


@dataclass(frozen=True)
class SentPart:
    """A part of an upload in a store; its etag is without quotes."""

    etag: str
    bytes: int


class Multipart:
    """The requests of uploads. Every method raises StoreError if the store refuses or is silent.

    Args:
        bucket: the bucket; nothing is requested before the first method call.
        answers: makes messages of the store's answers.
        patience_s: for how many seconds a failing request is repeated.
    """

    def __init__(self, bucket: S3Bucket, answers: Answers, patience_s: float) -> None:
        self._bucket = bucket
        self._answers = answers
        self._retrying = Retrying(None, patience_s, first_s=_FIRST_WAIT_S, longest_s=_LONGEST_WAIT_S)

    @property
    def endpoint(self) -> str:
        """Return the URL of the store; empty for the provider's own."""
        return self._bucket.endpoint or s3.surroundings().endpoint

    @cached_property
    def _client(self) -> Any:
        return s3.client(self._bucket)

    def begin(self, name: str) -> Upload:
        """Begin an upload of the object `name`."""
        request = {**self._key(name), **s3.surroundings().encryption}
        response = self._ask(f"write {name}", lambda: self._client.create_multipart_upload(**request))
        return Upload(name, str(response["UploadId"]))

    def send(self, upload: Upload, number: int, content: bytearray) -> str:
        """Write a part; return its etag in the store's spelling, which `complete` sends back.

        Args:
            upload: the upload.
            number: of the part, from 1.
            content: of the part. A bytearray: botocore would make a file of bytes, send the file in pieces of
                16 KiB, and wait for the store before the first.

        Raises:
            LostUploadError: the store does not have the upload.
        """
        response = self._ask(
            f"write {upload.name}",
            lambda: self._client.upload_part(**self._of(upload), PartNumber=number, Body=content),
        )
        return str(response["ETag"])

    def parts(self, upload: Upload) -> dict[int, SentPart]:
        """Return the parts that the store has, by their numbers.

        Raises:
            LostUploadError: the store does not have the upload.
            RefusedError: these credentials may not list parts.
        """
        listed_parts = self._ask(
            f"write {upload.name}", lambda: self._listed("list_parts", "Parts", self._of(upload))
        )
        return {
            int(part["PartNumber"]): SentPart(bare(part["ETag"]), int(part["Size"])) for part in listed_parts
        }

    def complete(self, upload: Upload, etags: Mapping[int, str]) -> str:
        """Make the object from its parts; return its etag, without quotes.

        Args:
            upload: the upload.
            etags: of all parts, by their numbers.

        Raises:
            LostUploadError: the store does not have the upload, or has another part.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(etags.items())]
        response = self._ask(
            f"write {upload.name}",
            lambda: self._client.complete_multipart_upload(
                **self._of(upload), MultipartUpload={"Parts": parts}
            ),
        )
        return bare(response["ETag"])

    def abort(self, upload: Upload) -> None:
        """Have the store forget an upload and its parts; an unknown upload is no error."""
        with contextlib.suppress(LostUploadError):
            self._ask(
                f"remove an upload of {upload.name}",
                lambda: self._client.abort_multipart_upload(**self._of(upload)),
            )

    def begun(self, prefix: str = "") -> list[Upload]:
        """Return the uploads of objects below `prefix` that were begun and not completed."""
        request = {"Bucket": self._bucket.name, "Prefix": self._full(prefix)}
        uploads = self._ask(
            "list uploads that were cut short",
            lambda: self._listed("list_multipart_uploads", "Uploads", request),
        )
        return [
            Upload(str(upload["Key"]).removeprefix(self._full("")), str(upload["UploadId"]))
            for upload in uploads
        ]

    def _listed(self, request: str, list_key: str, arguments: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """Return all entries of a list that may have several pages."""
        pages = self._client.get_paginator(request).paginate(**arguments)
        return [entry for page in pages for entry in page.get(list_key, ())]

    def _ask(self, doing: str, request: Callable[[], T]) -> T:
        """Make a request, and repeat the request while the store is busy or the connection breaks."""

        def once() -> T:
            with self._errors(doing):
                return request()

        # From the start: one silent request may take two minutes already.
        return self._retrying.ask(once, from_start=True)

    def _full(self, name: str) -> str:
        return f"{self._bucket.prefix}/{name}" if self._bucket.prefix else name

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket.name, "Key": self._full(name)}

    def _of(self, upload: Upload) -> dict[str, str]:
        return {**self._key(upload.name), "UploadId": upload.mark}

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        answers = self._answers
        s3.require_botocore(answers.address)
        from botocore import exceptions

        try:
            yield
        except exceptions.ClientError as error:
            raise self._translated(error.response, doing) from None
        except (exceptions.ConnectionError, exceptions.HTTPClientError):
            raise BusyError(str(answers.silent(doing))) from None
        except (exceptions.NoCredentialsError, exceptions.CredentialRetrievalError):
            raise answers.failed(
                doing, "no source of credentials that the environment names has given any"
            ) from None
        except exceptions.BotoCoreError as error:
            # Its text may quote the request.
            raise answers.failed(doing, f"botocore has failed ({type(error).__name__})") from None

    def _translated(self, response: Mapping[str, Any], doing: str) -> StoreError:
        """Return the error in a single line, without the store's quotes of the request."""
        status, code = _status(response)
        if code in NO_BUCKET:
            return self._answers.no_bucket()
        if code in _LOST:
            return LostUploadError(f"{self._answers.address}: cannot {doing}: the upload is not there")
        # An answer without a body has its status as code.
        answer = ", ".join(
            [f"{status} {responses.get(status, '')}".strip(), *([] if code.isdigit() else [code])]
        )
        if status in (401, 403):
            return RefusedError(str(self._answers.refused(doing, answer)))
        answered = self._answers.answered(doing, answer)
        is_busy = status >= 500 or status == 429 or code in _BUSY
        return BusyError(str(answered)) if is_busy else answered


def _status(response: Mapping[str, Any]) -> tuple[int, str]:
    """Return the status and the code of an answer."""
    code = str(response.get("Error", {}).get("Code", ""))
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)), code


def bare(etag: str | None) -> str:
    """Return an etag without quotes; '' without an etag."""
    return (etag or "").strip('"')


def joined(etags: Iterable[str]) -> str:
    """Return the bare etag of an object of several parts, from their etags in order; '' if not MD5."""
    try:
        digests = [bytes.fromhex(bare(etag)) for etag in etags]
    except ValueError:
        return ""
    return f"{md5(b''.join(digests))}-{len(digests)}"


def md5(content: bytes | bytearray) -> str:
    """Return the bare etag of a part or a small object in most stores with the interface of S3."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()

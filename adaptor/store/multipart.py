"""Uploads of several parts to a store with the interface of S3, with which another process can go on.

The client is botocore, because obstore has no request for an upload that another process has begun. A request
is made again for a minute: botocore itself counts attempts alone, and eight that are not answered would take
a quarter of an hour. Until an upload is completed there is no object of its name, or the one that was
there before.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http.client import responses
from typing import Any, TypeVar

from adaptor.errors import StoreError
from adaptor.store import credentials, s3
from adaptor.store.error_messages import NO_BUCKET, Answers
from adaptor.store.etags import bare
from adaptor.store.s3 import Bucket

_LOST = ("NoSuchUpload", "InvalidPart")
# A store that is busy says so with a status from 500 on, or with one of these.
_BUSY = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests")
# Before a request is made again: longer each time.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0

T = TypeVar("T")


class RefusedError(StoreError):
    """The store does not allow these credentials to do that."""


class LostUploadError(StoreError):
    """The store does not have this upload, or not the parts that it is said to have."""


@dataclass(frozen=True)
class Upload:
    """An upload that was begun and not completed.

    Attributes:
        name: of the object
        mark: by which the store knows the upload
    """

    name: str
    mark: str


@dataclass(frozen=True)
class SentPart:
    """A part of an upload that a store has; its etag is without quotes."""

    etag: str
    bytes: int


class Multipart:
    """The requests of such uploads. Every method raises StoreError where the store refuses or is silent.

    Args:
        bucket: how it is reached; nothing is asked before the first request.
        answers: makes lines of its answers.
        patience_s: for how many seconds a request that fails is made again.
    """

    def __init__(self, bucket: Bucket, answers: Answers, patience_s: float) -> None:
        self._bucket = bucket
        self._answers = answers
        self._patience_s = patience_s

    @property
    def endpoint(self) -> str:
        """Return the URL at which the store answers; empty for that of its provider."""
        return self._bucket.endpoint or credentials.surroundings().endpoint

    @cached_property
    def _client(self) -> Any:
        return s3.client(self._bucket)

    def begin(self, name: str) -> Upload:
        """Begin an upload of the object `name`."""
        request = {**self._key(name), **credentials.surroundings().encryption}
        with self._errors(f"write {name}"):
            response = self._asked(lambda: self._client.create_multipart_upload(**request))
        return Upload(name, str(response["UploadId"]))

    def send(self, upload: Upload, number: int, content: bytearray) -> str:
        """Write a part; return its etag as the store spells it, for it gets that back in `complete`.

        Args:
            upload: to which it belongs.
            number: of the part, from 1.
            content: of it. botocore would make a file of bytes, send that in pieces of 16 KiB, and wait for
                the store before the first.

        Raises:
            LostUploadError: there is no such upload.
        """
        with self._errors(f"write {upload.name}"):
            response = self._asked(
                lambda: self._client.upload_part(**self._of(upload), PartNumber=number, Body=content)
            )
        return str(response["ETag"])

    def parts(self, upload: Upload) -> dict[int, SentPart]:
        """Return the parts that the store has, by their numbers.

        Raises:
            LostUploadError: there is no such upload.
            RefusedError: these credentials may not ask for them.
        """
        with self._errors(f"write {upload.name}"):
            listed_parts = self._asked(lambda: self._listed("list_parts", "Parts", self._of(upload)))
        return {
            int(part["PartNumber"]): SentPart(bare(part["ETag"]), int(part["Size"])) for part in listed_parts
        }

    def complete(self, upload: Upload, etags: Mapping[int, str]) -> str:
        """Make the object of these parts; return its etag, without quotes.

        Args:
            upload: to which they belong.
            etags: of all parts, by their numbers.

        Raises:
            LostUploadError: there is no such upload, or a part of it is another one.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(etags.items())]
        with self._errors(f"write {upload.name}"):
            response = self._asked(
                lambda: self._client.complete_multipart_upload(
                    **self._of(upload), MultipartUpload={"Parts": parts}
                )
            )
        return bare(response["ETag"])

    def abort(self, upload: Upload) -> None:
        """Have the store forget an upload and its parts; one that it does not have is none to forget."""
        with contextlib.suppress(LostUploadError), self._errors(f"remove an upload of {upload.name}"):
            self._asked(lambda: self._client.abort_multipart_upload(**self._of(upload)))

    def begun(self, prefix: str = "") -> list[Upload]:
        """Return the uploads of objects below `prefix` that were begun and not completed."""
        request = {"Bucket": self._bucket.name, "Prefix": self._full(prefix)}
        with self._errors("list uploads that were cut short"):
            uploads = self._asked(lambda: self._listed("list_multipart_uploads", "Uploads", request))
        return [
            Upload(str(upload["Key"]).removeprefix(self._full("")), str(upload["UploadId"]))
            for upload in uploads
        ]

    def _listed(self, request: str, list_key: str, arguments: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """Return all entries of a list that may have several pages."""
        pages = self._client.get_paginator(request).paginate(**arguments)
        return [entry for page in pages for entry in page.get(list_key, ())]

    def _asked(self, request: Callable[[], T]) -> T:
        """Make a request, and make it again while the store is busy or the connection breaks."""
        from botocore import exceptions

        until, wait_s = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        while True:
            try:
                return request()
            except (exceptions.ClientError, exceptions.ConnectionError, exceptions.HTTPClientError) as error:
                is_retried = not isinstance(error, exceptions.ClientError) or _is_busy(error.response)
                if not is_retried or time.monotonic() + wait_s > until:
                    raise
            time.sleep(wait_s * random.uniform(0.5, 1))  # those who were refused do not come back together
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

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
            raise self._said(error.response, doing) from None
        except (exceptions.ConnectionError, exceptions.HTTPClientError):
            raise answers.silent(doing) from None
        except (exceptions.NoCredentialsError, exceptions.CredentialRetrievalError):
            raise answers.failed(
                doing, "no source of credentials that the environment names has given any"
            ) from None
        except exceptions.BotoCoreError as error:
            # Its text may quote what was sent.
            raise answers.failed(doing, f"botocore has failed ({type(error).__name__})") from None

    def _said(self, response: Mapping[str, Any], doing: str) -> StoreError:
        """Return the error in one line; what the store quotes of the request is left out."""
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
        return self._answers.answered(doing, answer)


def _status(response: Mapping[str, Any]) -> tuple[int, str]:
    """Return the status and the code of an answer."""
    code = str(response.get("Error", {}).get("Code", ""))
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)), code


def _is_busy(response: Mapping[str, Any]) -> bool:
    status, code = _status(response)
    return status >= 500 or status == 429 or code in _BUSY

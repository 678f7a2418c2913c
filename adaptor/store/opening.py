"""Opens the store that a URL names, and tests whether the store can be written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from adaptor import distributions
from adaptor.errors import StoreError
from adaptor.store import address, s3
from adaptor.store.address import Answers, plain
from adaptor.store.client import PIECE, Store
from adaptor.store.multipart import Multipart
from adaptor.store.store_requests import Retrying

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig

    from adaptor.store.address import Address
    from adaptor.store.s3 import S3Bucket

_PROBE = "ttp_probe"
_OF_S3 = ("s3", "obs")
# The variables from which obstore itself reads the credentials.
_CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY",
}
# Seconds for which the client repeats a request, before a line says that the store is awaited.
_FIRST_S = 10.0


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
    place = address.parse(url)
    try:
        from obstore import exceptions
        from obstore import store as kinds
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise StoreError(
            f"{place}: object stores need the package obstore: {distributions.install_command('store')}"
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

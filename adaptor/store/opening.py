"""Opens the store that a URL names, and tries whether it can be written."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from adaptor.errors import StoreError
from adaptor.store import address, credentials
from adaptor.store.client import Store, plain

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig, S3Config

    from adaptor.store.address import Address

_PROBE = "ttp_probe"


def open_store(url: str, endpoint: str = "", *, make: bool = False, patience_s: float = 60) -> Store:
    """Open the store that a URL names; nothing is asked of it.

    Args:
        url: like `s3://bucket/run7`.
        endpoint: the URL at which it answers; empty for that of its provider.
        make: a folder (file://) that is not there is made, in one that is.
        patience_s: for how many seconds a request that fails is made again.

    Raises:
        StoreError: the URL, the credentials or the installation are not as they must be.
    """
    place = address.parse(url)
    try:
        from obstore import exceptions
        from obstore import store as kinds
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise StoreError(
            f"{place}: object stores need the package obstore: pip install 'ttp-adaptor[store]'"
        ) from None
    if place.scheme == "file":
        _require_folder(Path(place.prefix), make)
        # Folders that are left empty would look like checkpoints.
        return Store(place, kinds.LocalStore(place.prefix, automatic_cleanup=True), "")
    try:
        client = _remote(place, endpoint, patience_s)
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise StoreError(f"{place}: cannot be opened: {plain(str(error))}") from None
    return Store(place, client, endpoint)


def _remote(place: Address, endpoint: str, patience_s: float) -> ObjectStore:
    from obstore import store as kinds

    prefix = place.prefix or None
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=10),
        "timeout": timedelta(seconds=120),
    }
    retry: RetryConfig = {"max_retries": 10, "retry_timeout": timedelta(seconds=patience_s)}
    if place.scheme == "gs":
        google: GCSConfig = {"base_url": endpoint} if endpoint else {}
        return kinds.GCSStore(
            place.bucket, prefix=prefix, config=google, client_options=client, retry_config=retry
        )
    if place.scheme == "az":
        azure: AzureConfig = {"endpoint": endpoint} if endpoint else {}
        return kinds.AzureStore(
            place.bucket, prefix=prefix, config=azure, client_options=client, retry_config=retry
        )
    return kinds.S3Store(
        place.bucket, prefix=prefix, config=_s3(place, endpoint), client_options=client, retry_config=retry
    )


def _s3(place: Address, endpoint: str) -> S3Config:
    """Return the client's options of a store with the interface of S3."""
    if place.scheme == "obs" and not endpoint:
        raise StoreError(
            f"{place}: TTP_STORE_ENDPOINT is not set; OBS has no common one, it must be that of the region"
        )
    found = credentials.s3(place.scheme)
    options: S3Config = {}
    if found is not None:
        options["access_key_id"], options["secret_access_key"] = found.key, found.secret
        if found.token:
            options["session_token"] = found.token
    if endpoint:
        options["endpoint"] = endpoint
    # OBS takes the name of the bucket in that of the host, but where the endpoint is an address.
    protocol, _, host = endpoint.partition("://")
    if place.scheme == "obs" and not re.match(r"[\d.]+(:\d+)?$|localhost|\[", host):
        options["endpoint"] = f"{protocol}://{place.bucket}.{host}"
        options["virtual_hosted_style_request"] = True
    return options


def _require_folder(folder: Path, make: bool) -> None:
    try:
        if make:
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"file://{folder}: cannot be made ({error.strerror})") from None
    if not folder.is_dir():
        raise StoreError(f"file://{folder}: there is no such folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise StoreError(f"file://{folder}: this user cannot read it")


def probe(url: str, endpoint: str) -> None:
    """Write an object to a store, and remove it.

    Raises:
        StoreError: it cannot be written there.
    """
    store = open_store(url, endpoint, make=True, patience_s=10)
    name = f"{_PROBE}/{os.getpid()}-{time.time_ns()}"
    store.put(name, b"")
    store.delete([name])

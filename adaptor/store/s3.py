"""Reaches a bucket with the interface of S3, in the same way by both clients.

obstore makes all requests but those of uploads in several parts, which botocore makes (`multipart.py`). What
obstore reads from the environment is given to botocore, and botocore's own files of settings are not read: so
no request is signed or sent in another way than the others.
"""

from __future__ import annotations

import importlib.util
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptor import distributions
from adaptor.errors import StoreError
from adaptor.store import credentials
from adaptor.store.credentials import Keys

if TYPE_CHECKING:
    from obstore.store import S3Config

    from adaptor.store.address import Address

CONNECT_S, ANSWER_S = 10, 120
# Whom obstore asks for credentials, in its order. Keys of the environment are given to it.
_ASKED = ("assume-role-with-web-identity", "container-role", "iam-role")
# Certificates of authorities, where systems have them.
_AUTHORITIES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True)
class Bucket:
    """A bucket, and how it is reached.

    Attributes:
        prefix: of all objects; may be empty
        keys: None where the client finds them by itself
        endpoint: the URL at which the store answers; empty for that of AWS
        in_host: whether the name of the bucket is a part of the name of the host
    """

    name: str
    prefix: str
    keys: Keys | None
    endpoint: str
    in_host: bool


def bucket(place: Address, endpoint: str) -> Bucket:
    """Return how a bucket is reached.

    Raises:
        StoreError: the credentials or the endpoint are not as they must be.
    """
    if place.scheme == "obs" and not endpoint:
        raise StoreError(
            f"{place}: TTP_STORE_ENDPOINT is not set; OBS has no common one, it must be that of the region"
        )
    # OBS takes the name of the bucket in that of the host, but where the endpoint is an address.
    host = endpoint.partition("://")[2]
    in_host = place.scheme == "obs" and not re.match(r"[\d.]+(:\d+)?$|localhost|\[", host)
    return Bucket(place.bucket, place.prefix, credentials.s3(place.scheme), endpoint, in_host)


def options(s3_bucket: Bucket) -> S3Config:
    """Return the options of obstore."""
    client_options: S3Config = {}
    if s3_bucket.keys is not None:
        client_options["access_key_id"], client_options["secret_access_key"] = (
            s3_bucket.keys.key,
            s3_bucket.keys.secret,
        )
        if s3_bucket.keys.token:
            client_options["session_token"] = s3_bucket.keys.token
    if s3_bucket.endpoint:
        client_options["endpoint"] = s3_bucket.endpoint
    if s3_bucket.in_host:
        protocol, _, host = s3_bucket.endpoint.partition("://")
        client_options["endpoint"] = f"{protocol}://{s3_bucket.name}.{host}"
        client_options["virtual_hosted_style_request"] = True
    return client_options


def require_botocore(place: Address) -> None:
    """Refuse an installation that cannot send large files to such a store. Raises StoreError."""
    if importlib.util.find_spec("botocore") is None:
        raise StoreError(
            f"{place}: uploads to {place.scheme}:// need the package botocore, too:"
            f" {distributions.install_command('store')}"
        )


def client(s3_bucket: Bucket) -> Any:
    """Return a client of botocore, which several threads may use; it makes no request again."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    variables = credentials.surroundings()
    unset = (None, None, None, None)
    no_file = (None, None, os.devnull, None)
    session = Session(
        session_vars={
            "profile": unset,
            "region": (None, None, variables.region, None),
            "config_file": no_file,
            "credentials_file": no_file,
            "ec2_metadata_service_endpoint": (None, None, variables.metadata_endpoint or None, None),
            "metadata_service_timeout": (None, None, CONNECT_S, None),
            "metadata_service_num_attempts": (None, None, 3, None),
        }
    )
    resolver = session.get_component("credential_provider")
    resolver.providers = [provider for provider in resolver.providers if provider.METHOD in _ASKED]
    config = Config(
        signature_version=UNSIGNED if variables.unsigned else "s3v4",
        connect_timeout=CONNECT_S,
        read_timeout=ANSWER_S,
        retries={"mode": "standard", "total_max_attempts": 1},
        # Not every store knows newer checksums. That of the signature is sent always.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "virtual" if s3_bucket.in_host else "path", "payload_signing_enabled": True},
    )
    keys = s3_bucket.keys
    return session.create_client(
        "s3",
        region_name=variables.region,
        endpoint_url=s3_bucket.endpoint or variables.endpoint or None,
        verify=_authorities(),
        aws_access_key_id=keys.key if keys else None,
        aws_secret_access_key=keys.secret if keys else None,
        aws_session_token=(keys.token or None) if keys else None,
        config=config,
    )


def _authorities() -> str | None:
    """Return the file of certificates that the system trusts, as obstore does; None: botocore's own."""
    named = ssl.get_default_verify_paths().cafile
    return next(
        (authority for authority in (named, *_AUTHORITIES) if authority and Path(authority).is_file()), None
    )

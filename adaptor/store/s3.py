"""Reaches a bucket with the interface of S3, in the same way by both clients; credentials.

obstore makes all requests except uploads of several parts, which botocore makes (`multipart.py`). botocore
gets the settings that obstore reads from the environment, and botocore's own files of settings are not read:
so both clients sign and send requests in the same way.

Credentials come from the environment, or from a file that it names, and go to the clients alone. obstore
itself reads the credentials of Google (`GOOGLE_APPLICATION_CREDENTIALS`) and Azure (`AZURE_STORAGE_*`),
AWS_REGION and the credentials that a cluster offers its containers.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptor import plug_ins
from adaptor.errors import StoreError

if TYPE_CHECKING:
    from obstore.store import S3Config

    from adaptor.store.settings import Address

_OWN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_OF_OBS = ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN")
# With one of these variables the client itself asks for credentials, or needs none.
_ELSEWHERE = (
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_METADATA_ENDPOINT",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


@dataclass(frozen=True, repr=False)
class Keys:
    """Credentials; they are never shown."""

    key: str
    secret: str
    token: str


# obstore's variables of the encryption by the store, and the names of the parameters of requests.
_ENCRYPTION = {
    "AWS_SERVER_SIDE_ENCRYPTION": "ServerSideEncryption",
    "AWS_SSE_KMS_KEY_ID": "SSEKMSKeyId",
}


@dataclass(frozen=True)
class Surroundings:
    """The environment's other settings of S3, as obstore reads them.

    Attributes:
        endpoint: empty for AWS
        unsigned: requests have no credentials
        metadata_endpoint: of the machine; empty for the common one
        encryption: of objects, by the names of parameters of requests
    """

    region: str
    endpoint: str
    unsigned: bool
    metadata_endpoint: str
    encryption: Mapping[str, str] = field(default_factory=dict)


def surroundings() -> Surroundings:
    """Return the environment's settings without the credentials."""
    variables = os.environ
    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return Surroundings(
        region=variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1",
        endpoint=next((value for name in endpoints if (value := variables.get(name))), ""),
        unsigned=variables.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "on", "yes", "y"),
        metadata_endpoint=variables.get("AWS_METADATA_ENDPOINT", ""),
        encryption={word: value for name, word in _ENCRYPTION.items() if (value := variables.get(name))},
    )


def keys_of(scheme: str) -> Keys | None:
    """Return the credentials for the clients.

    Args:
        scheme: `s3` or `obs`, whose own variables take precedence over the variables of AWS.

    Returns:
        The credentials; None if the client finds credentials by itself.

    Raises:
        StoreError: there are no credentials, or half of them.
    """
    groups = (_OF_OBS, _OWN) if scheme == "obs" else (_OWN,)
    for names in groups:
        values = [os.environ.get(name, "") for name in names]
        if values[0] and values[1]:
            return Keys(*values)
        for have, miss in ((0, 1), (1, 0)):
            if values[have]:
                raise StoreError(f"{names[have]} is set, but {names[miss]} is not: set both or none")
    from_file = _of_file(os.environ)
    if from_file is not None or any(os.environ.get(name) for name in _ELSEWHERE):
        return from_file
    named = " or ".join(f"{names[0]} and {names[1]}" for names in groups)
    raise StoreError(
        f"{scheme}:// needs credentials, and there are none: set {named}, or AWS_SHARED_CREDENTIALS_FILE, or"
        " what the client knows (docs/object_storage.md)"
    )


def _of_file(environment: Mapping[str, str]) -> Keys | None:
    named = environment.get("AWS_SHARED_CREDENTIALS_FILE", "")
    path = Path(named) if named else Path(environment.get("HOME", "/"), ".aws", "credentials")
    profile = environment.get("AWS_PROFILE", "default")
    # Lines of the file are credentials: no message quotes them, and "%" has no meaning.
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text())
    except FileNotFoundError:
        if named:
            raise StoreError(f"AWS_SHARED_CREDENTIALS_FILE is {named}: there is no such file") from None
        return None
    except OSError as error:
        raise StoreError(f"{path}: the credentials cannot be read ({error.strerror})") from None
    except (configparser.Error, UnicodeDecodeError):
        raise StoreError(f"{path}: is no file of credentials, which has [{profile}] and its keys") from None
    if not parser.has_section(profile):
        if named or "AWS_PROFILE" in environment:
            raise StoreError(f"{path}: has no profile [{profile}]; AWS_PROFILE names another one")
        return None
    fields = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    keys = Keys(*(parser.get(profile, field, fallback="") for field in fields))
    if not (keys.key and keys.secret):
        raise StoreError(f"{path}: [{profile}] has no aws_access_key_id and aws_secret_access_key")
    return keys


CONNECT_S, ANSWER_S = 10, 120
# The sources of credentials in obstore's order. botocore gets the keys of the environment directly.
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
class S3Bucket:
    """A bucket, and how to reach it.

    Attributes:
        prefix: of all objects; may be empty
        keys: None if the client finds credentials by itself
        endpoint: the URL of the store; empty for AWS
        in_host: the name of the bucket is a part of the host name
    """

    name: str
    prefix: str
    keys: Keys | None
    endpoint: str
    in_host: bool


def bucket(place: Address, endpoint: str) -> S3Bucket:
    """Return the bucket of an address.

    Raises:
        StoreError: the credentials or the endpoint are wrong.
    """
    if place.scheme == "obs" and not endpoint:
        raise StoreError(
            f"{place}: TTP_STORE_ENDPOINT is not set; OBS has no common one, it must be that of the region"
        )
    # OBS has the name of the bucket in the host name, unless the endpoint is an IP address.
    host = endpoint.partition("://")[2]
    in_host = place.scheme == "obs" and not re.match(r"[\d.]+(:\d+)?$|localhost|\[", host)
    return S3Bucket(place.bucket, place.prefix, keys_of(place.scheme), endpoint, in_host)


def options(s3_bucket: S3Bucket) -> S3Config:
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
            f" {plug_ins.install_command('store')}"
        )


def client(s3_bucket: S3Bucket) -> Any:
    """Return a client of botocore, which several threads may use; the client repeats no request."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    variables = surroundings()
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
        # Not every store knows newer checksums. The checksum of the signature is always sent.
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
    """Return the file of certificates that the system trusts, as in obstore; None: botocore's own."""
    named = ssl.get_default_verify_paths().cafile
    return next(
        (authority for authority in (named, *_AUTHORITIES) if authority and Path(authority).is_file()), None
    )

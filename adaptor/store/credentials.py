"""Credentials of stores that speak the interface of S3: from the environment, or from a file that it names.

They go to the clients and nowhere else. Those of Google (`GOOGLE_APPLICATION_CREDENTIALS`) and Azure
(`AZURE_STORAGE_*`) are read by obstore itself, and so are AWS_REGION and what a cluster offers its
containers; what botocore would read in another way is read here for it (`surroundings`).
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from adaptor.errors import StoreError

_OWN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_OF_OBS = ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN")
# With one of these the client itself asks somebody for credentials, or needs none.
_ELSEWHERE = (
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_METADATA_ENDPOINT",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


@dataclass(frozen=True, repr=False)
class Keys:
    """Credentials; they are shown nowhere."""

    key: str
    secret: str
    token: str


# Variables of the encryption by the store, as obstore has them, and what requests call that.
_ENCRYPTION = {
    "AWS_SERVER_SIDE_ENCRYPTION": "ServerSideEncryption",
    "AWS_SSE_KMS_KEY_ID": "SSEKMSKeyId",
}


@dataclass(frozen=True)
class Surroundings:
    """All else that the environment says of S3, as obstore reads it.

    Attributes:
        endpoint: empty for that of AWS
        unsigned: requests have no credentials
        metadata_endpoint: of the machine; empty for the common one
        encryption: of objects, by the names that requests have for it
    """

    region: str
    endpoint: str
    unsigned: bool
    metadata_endpoint: str
    encryption: Mapping[str, str] = field(default_factory=dict)


def surroundings() -> Surroundings:
    """Return what the environment says besides the credentials."""
    variables = os.environ
    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return Surroundings(
        region=variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1",
        endpoint=next((value for name in endpoints if (value := variables.get(name))), ""),
        unsigned=variables.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "on", "yes", "y"),
        metadata_endpoint=variables.get("AWS_METADATA_ENDPOINT", ""),
        encryption={word: value for name, word in _ENCRYPTION.items() if (value := variables.get(name))},
    )


def s3(scheme: str) -> Keys | None:
    """Return what the client is to be given.

    Args:
        scheme: `s3` or `obs`, whose own variables go before those of AWS.

    Returns:
        The credentials; None where the client finds them by itself.

    Raises:
        StoreError: there are none, or half of them.
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
    # Lines of the file are credentials: they are quoted in no message, and "%" in one means nothing.
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

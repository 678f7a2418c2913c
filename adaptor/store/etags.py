"""Etags, by which a store tells one version of an object from another: how they are spelled and made.

The same etag has quotes in one answer and none in another: in a listing and in a header of Azure, and in a
listing of Ceph's gateway and when it has completed an upload. So all are kept without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def bare(etag: str | None) -> str:
    """Return an etag without quotes; '' where there is none."""
    return (etag or "").strip('"')


def joined(etags: Iterable[str]) -> str:
    """Return the bare etag of an object of several parts, by theirs in order; '' where these are no MD5."""
    try:
        digests = [bytes.fromhex(bare(etag)) for etag in etags]
    except ValueError:
        return ""
    return f"{md5(b''.join(digests))}-{len(digests)}"


def md5(content: bytes | bytearray) -> str:
    """Return the bare etag that most stores with the interface of S3 give to a part, or to a small object."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()

"""S3 servers for tests are forks of one process (`s3_servers.py`), and share nothing."""

from __future__ import annotations

import socket

from tests import waiting
from tests.unit import object_store


def test_each_server_has_buckets_of_its_own_and_ends_with_its_user() -> None:
    with object_store.server() as first, object_store.server() as second:
        object_store.request(first, "PUT", "/mine")
        assert [b"<Name>mine</Name>" in object_store.request(url, "GET", "/") for url in (first, second)] == [
            True,
            False,
        ]
    for url in (first, second):
        port = int(url.rpartition(":")[2])
        waiting.until(lambda port=port: not _listens(port), f"nobody listens on port {port}")  # type: ignore[misc]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""Azurite, an Azure Blob Storage server for this machine (npm package azurite)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest

ACCOUNT = "devstoreaccount1"  # it and its key are the same in every Azurite
CREDENTIALS = {
    "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    ),
}
_VERSION = "2021-12-02"  # of the interface


@contextmanager
def server() -> Iterator[str]:
    """Run Azurite; yield the URL of its account. Skip the test if Azurite is not installed."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not installed (npm package azurite)")
    options = ("--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--silent")
    command = (program, *options, "--skipApiVersionCheck", "--disableTelemetry")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            listens = next((line for line in lines if "successfully listens on" in line), "")
            assert listens, "azurite-blob has ended"
            yield f"{listens.split()[-1]}/{ACCOUNT}"
        finally:
            process.terminate()


def make_container(url: str, name: str) -> None:
    """Make a container in the account at `url`."""
    date = formatdate(time.time(), usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
    signed = "PUT" + "\n" * 12 + headers + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    key = base64.b64decode(CREDENTIALS["AZURE_STORAGE_ACCOUNT_KEY"])
    signature = base64.b64encode(hmac.digest(key, signed.encode(), hashlib.sha256)).decode()
    host, _, account = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(
            "PUT",
            f"/{account}/{name}?restype=container",
            headers={
                "x-ms-date": date,
                "x-ms-version": _VERSION,
                "Authorization": f"SharedKey {ACCOUNT}:{signature}",
                "Content-Length": "0",
            },
        )
        answer = connection.getresponse()
        assert answer.status == 201, (answer.status, answer.read())
    finally:
        connection.close()

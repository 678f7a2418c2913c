"""Certificates for tests, made by the `openssl` program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


class Authority:
    """Signs certificates, in a folder of its own."""

    def __init__(self, folder: Path, days: int = 2) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl program to make certificates with")
        folder.mkdir()
        self._folder = folder
        self.path = folder / "ca.pem"
        _run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", folder / "ca.key", "-out", self.path, "-subj", "/CN=signer", "-days", str(days)),
        )

    def settings(self, name: str = "node", days: int = 2) -> dict[str, str]:
        """The variables for a node with a certificate; negative `days`: it has expired."""
        key, request, certificate = (self._folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        _run(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key, "-subj", f"/CN={name}", "-out", request),
        )
        _run(
            *("x509", "-req", "-in", request, "-CA", self.path, "-CAkey", self._folder / "ca.key"),
            *("-CAcreateserial", "-days", str(days), "-out", certificate),
        )
        return {"TTP_TLS_CERT": str(certificate), "TTP_TLS_KEY": str(key), "TTP_TLS_CA": str(self.path)}

    def locked(self, key: str) -> str:
        """The file of `key`, but with a passphrase."""
        path = f"{key}.locked"
        _run("ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", path)
        return path


def _run(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

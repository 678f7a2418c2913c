"""TLS 1.3 between the agents of a job, each with a certificate from the same signer.

Names in certificates are not compared with addresses: who has a certificate of the job's signer is trusted,
wherever it runs, and has to know the job's secret besides.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from adaptor.config import Config
from adaptor.errors import ConfigError


class Tls(NamedTuple):
    """For the side that accepts connections, and for the side that makes them."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load(settings: Config) -> Tls | None:
    """What the certificates in `settings` make; None where there are none.

    Raises:
        ConfigError: they cannot be used; the message names the variable, the file and the reason.
    """
    if not settings.tls_cert:
        return None
    for name, path in (
        ("TTP_TLS_CERT", settings.tls_cert),
        ("TTP_TLS_KEY", settings.tls_key),
        ("TTP_TLS_CA", settings.tls_ca),
    ):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} is {path!r}: the file cannot be read ({error.strerror})") from None
    made = Tls(_context(ssl.PROTOCOL_TLS_SERVER, settings), _context(ssl.PROTOCOL_TLS_CLIENT, settings))
    _try(made, settings)
    return made


def _context(protocol: int, settings: Config) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(settings.tls_ca)
    except ssl.SSLError:
        raise ConfigError(f"TTP_TLS_CA is {settings.tls_ca!r}: no certificate in PEM form is in it") from None
    try:
        # A passphrase of nothing, or OpenSSL would ask for it on the terminal.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = "it is not the key of the certificate"
        else:
            what = "one of them is not in PEM form, or the key has a passphrase"
        raise ConfigError(
            f"TTP_TLS_KEY is {settings.tls_key!r}, TTP_TLS_CERT {settings.tls_cert!r}: {what}"
        ) from None
    return context


def _try(made: Tls, settings: Config) -> None:
    """Let the two sides meet in memory: what other nodes would refuse is known before anything starts."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = made.client.wrap_bio(back, there)
    server = made.server.wrap_bio(there, back, server_side=True)
    try:
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    except ssl.SSLError as error:
        what = getattr(error, "verify_message", None) or error.reason
        raise ConfigError(
            f"TTP_TLS_CERT is {settings.tls_cert!r}:"
            f" it is not accepted with TTP_TLS_CA {settings.tls_ca!r}: {what}"
        ) from None

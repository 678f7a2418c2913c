"""TLS 1.3 between the agents of a job, each with a certificate from the same signer.

Short-lived certificates are renewed during training, so changed files are read again before each connection;
a new pair that cannot be used, for instance a half-written pair, leaves the previous pair in use.

Names in certificates are not compared with addresses: any process with a certificate of the job's signer is
trusted, wherever it runs. The process also has to know the generation of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.protocol.deadline import deadline

_log = logging.getLogger("adaptor")
# The time a connection waits for the files: their file system may hang.
READ_S = 1.0
_MISSING = "one of the files"


class Contexts(NamedTuple):
    """The contexts of both sides: `server` accepts connections, `client` makes them."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class Tls:
    """The certificates of this node, read again after changes.

    Raises:
        ConfigError: the certificates cannot be used; names the variable, the file and the reason.
    """

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._files = settings.tls_cert, settings.tls_key, settings.tls_ca
        self._read_as = _state(self._files)
        self.contexts = _load(settings)
        self._reading: Future[None] | None = None
        self._refused: object = None  # the state of unusable files

    async def newest(self) -> Contexts:
        """Return the contexts of the current files, or the previous contexts if the files are unusable."""
        reading = self._reading or self._begin_to_read()
        if reading is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                async with deadline(READ_S):
                    await asyncio.shield(asyncio.wrap_future(reading))
        return self.contexts

    def _begin_to_read(self) -> Future[None] | None:
        reading = self._reading = Future()
        # Not in a pool: the interpreter would wait at its end for a thread that hangs.
        try:
            threading.Thread(target=self._read, args=(reading,), name="ttp-tls", daemon=True).start()
        except RuntimeError:  # no more threads for this process
            self._reading = None
        return self._reading

    def _read(self, reading: Future[None]) -> None:
        state = None
        try:
            state = _state(self._files)
            if state != self._read_as:
                self.contexts = _load(self._settings)
                self._read_as = state
                self._refused = None
                _log.info("TTP_TLS_CERT %s has changed and was read again", self._settings.tls_cert)
        except Exception as error:
            if self._refused != (state or _MISSING):
                self._refused = state or _MISSING
                _log.warning("changed certificates cannot be used, those read before are: %s", error)
        finally:
            self._reading = None
            reading.set_result(None)


def load(settings: Config) -> Tls | None:
    """Return the certificates of `settings`; None without certificates.

    Raises:
        ConfigError: the certificates cannot be used; names the variable, the file and the reason.
    """
    return Tls(settings) if settings.tls_cert else None


def ends(settings: Config) -> float:
    """Return the Unix time at which the certificate of this node ends.

    Raises:
        ConfigError: the certificates cannot be used.
    """
    shown = _try(_load(settings), settings).getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _state(files: tuple[str, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Return a value that changes with the files; None if a file is missing."""
    try:
        file_states = [Path(path).stat() for path in files]
    except OSError:
        return None
    return tuple(
        (file_state.st_dev, file_state.st_ino, file_state.st_size, file_state.st_mtime_ns)
        for file_state in file_states
    )


def _load(settings: Config) -> Contexts:
    for name, path in (
        ("TTP_TLS_CERT", settings.tls_cert),
        ("TTP_TLS_KEY", settings.tls_key),
        ("TTP_TLS_CA", settings.tls_ca),
    ):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} is {path!r}: the file cannot be read ({error.strerror})") from None
    contexts = Contexts(
        _context(ssl.PROTOCOL_TLS_SERVER, settings), _context(ssl.PROTOCOL_TLS_CLIENT, settings)
    )
    _try(contexts, settings)
    return contexts


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
        # An empty passphrase: otherwise OpenSSL would ask on the terminal.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = "it is not the key of the certificate"
        else:
            problem = "one of them is not in PEM form, or the key has a passphrase"
        raise ConfigError(
            f"TTP_TLS_KEY is {settings.tls_key!r}, TTP_TLS_CERT {settings.tls_cert!r}: {problem}"
        ) from None
    return context


def _try(contexts: Contexts, settings: Config) -> ssl.SSLObject:
    """Make a handshake in memory, to find certificates that other nodes would refuse.

    Returns:
        The client side, which has the certificate of the server.
    """
    incoming, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.client.wrap_bio(back, incoming)
    server = contexts.server.wrap_bio(incoming, back, server_side=True)
    try:
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    except ssl.SSLError as error:
        problem = getattr(error, "verify_message", None) or error.reason
        raise ConfigError(
            f"TTP_TLS_CERT is {settings.tls_cert!r}:"
            f" it is not accepted with TTP_TLS_CA {settings.tls_ca!r}: {problem}"
        ) from None
    return client

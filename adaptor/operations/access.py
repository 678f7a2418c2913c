"""The access to the served files of a job: addresses, the token of clients, certificates.

An address that other machines reach needs both a token and a certificate.
"""

from __future__ import annotations

import socket
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from adaptor.errors import AdaptorError
from adaptor.operations.settings import HostPort

_BACKLOG = 64
_SHORTEST_WORD = 16


class ServeError(AdaptorError):
    """An address, a secret or a certificate cannot be used."""


class Clients(NamedTuple):
    """The token that a client must send, and the certificate of the server.

    Attributes:
        token: a word in each request (`Authorization: Bearer`); '' if none is needed
        tls: None: without TLS
    """

    token: str
    tls: Certificate | None


class Certificate:
    """A certificate of this address, which may be renewed meanwhile.

    Args:
        path, key: PEM files.

    Raises:
        ServeError: the files cannot be used.
    """

    def __init__(self, path: Path, key: Path) -> None:
        self._files = path, key
        self._read_as = self._state()
        try:
            self.context = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ServeError(
                f"the certificate {path} and its key {key}: they cannot be used ({error})"
            ) from None

    def renew(self) -> None:
        """Read changed files again; an unusable pair has no effect."""
        state = self._state()
        if state is None or state == self._read_as:
            return
        self._read_as = state
        try:
            self._load()  # into a new context first: half a pair would stay in the used context
            self.context.load_cert_chain(*self._files, password="")
        except (OSError, ssl.SSLError):
            return

    def _state(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            file_states = [file.stat() for file in self._files]
        except OSError:
            return None
        return tuple(
            (file_state.st_ino, file_state.st_size, file_state.st_mtime_ns) for file_state in file_states
        )

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._files, password="")
        return context


def clients(address: HostPort, token: Path | None, certificate: tuple[Path, Path] | None) -> Clients:
    """Return the access rules of an address.

    Args:
        address: to serve at.
        token: a file with the word that a client must send.
        certificate: PEM files of the certificate and its key.

    Raises:
        ServeError: other machines reach the address and a token or a certificate is missing, or a file cannot
            be used.
    """
    word = read_word(token, "the token file") if token is not None else ""
    if not address.is_loopback and not (word and certificate):
        raise ServeError(
            f"{address}: other machines reach this address; give a token file and a certificate with its key,"
            " or serve on 127.0.0.1"
        )
    return Clients(word, Certificate(*certificate) if certificate is not None else None)


def listen(address: HostPort) -> socket.socket:
    """Return a socket that listens at an address; port 0: any free port.

    Raises:
        ServeError: the address cannot be had.
    """
    try:
        (family, kind, protocol, _, socket_address), *_ = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
        listener = socket.socket(family, kind, protocol)
        try:
            # Connections of a server that has just ended do not block the address.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(socket_address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServeError(f"{address}: the address cannot be had ({reason}); choose another port") from None
    return listener


def read_word(path: Path, subject: str) -> str:
    """Return the secret word in a file.

    Args:
        path: the file.
        subject: the name of the file in messages.

    Raises:
        ServeError: the file cannot be read, other users can read the file, or its content is no word of the
            needed length.
    """
    try:
        path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServeError(
            f"{subject}: it must be the path of a file with the word, and that cannot be read ({reason}); "
            "what was"
            " given is not shown, for it may be the word itself"
        ) from None
    word = read_private(path, subject).strip()
    if not word.isascii() or len(word) < _SHORTEST_WORD or len(word.split()) > 1:
        raise ServeError(
            f"{subject} {path}: it must have one word of at least {_SHORTEST_WORD} ASCII characters"
        )
    return word


def read_private(path: Path, subject: str) -> str:
    """Return the text of a file that only its owner can read. Raises ServeError."""
    try:
        mode = path.stat().st_mode
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"{subject} {path}: it cannot be read ({error})") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ServeError(f"{subject} {path}: others can read it; say chmod 600 {path}")
    return content

"""The credentials of connections between agents: the invitation of node 0, and TLS certificates.

The invitation is an entry of node 0 in torch's rendezvous store, by which other agents find its controller.
Every client of the store can read and replace the entry. So the entry counts only as far as the connection
proves it: an agent connects in the way of its own settings, never in a weaker way, and both sides then prove
the same `secret`, which covers generation, restart and job.

unix   on one machine, an abstract socket; the kernel gives each side the user of the other
tls    between machines with certificates, which both sides have to show
plain  between machines in a trusted network: the secret itself is in the store

TLS has version 1.3, and all certificates of a job have the same signer. Short-lived certificates are renewed
during training, so changed files are read again before each connection; a new pair that cannot be used, for
instance a half-written pair, leaves the previous pair in use.

Names in certificates are not compared with addresses: any process with a certificate of the job's signer is
trusted, wherever it runs. The process also has to know the generation of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import ssl
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from adaptor import threads
from adaptor.config import Config
from adaptor.errors import ConfigError, StartError
from adaptor.protocol.wire import deadline

_log = logging.getLogger("adaptor")
# The time a connection waits for the files: their file system may hang.
READ_S = 1.0
_MISSING = "one of the files"
# The key of the invitation in the rendezvous store, and the kinds of connections.
KEY = "ttp/controller"
UNIX, TLS, PLAIN = "unix", "tls", "plain"
_WORDS = {
    UNIX: "a socket of its own machine (no certificates)",
    TLS: "TLS (certificates)",
    PLAIN: "unencrypted TCP (TTP_TLS=plain)",
}
_FORM = re.compile(r"(unix|tls|plain) ([0-9a-f]{16}) ([01]) (\d{1,5}) ([0-9a-z-]{1,100}) ([\w.@+=,-]{1,255})")
_NOTHING = "-"


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
        if self._reading is None or self._reading.done():
            self._reading = threads.start(self._read, "ttp-tls")
        if self._reading is not None:  # else no more threads for this process
            with contextlib.suppress(asyncio.TimeoutError):
                async with deadline(READ_S):
                    await asyncio.shield(asyncio.wrap_future(self._reading))
        return self.contexts

    def _read(self) -> None:
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
    return tuple((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns) for state in file_states)


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


def kind_of(config: Config) -> str:
    """Return the kind of connection between agents of a job with these settings."""
    if config.tls_cert:
        return TLS
    return PLAIN if config.tls == PLAIN else UNIX


class Invitation(NamedTuple):
    """The invitation of one generation of workers.

    Attributes:
        restart: whether workers of the job ran before
        port: of the controller, at the address of node 0; 0 for an abstract socket
        name: of the abstract socket; plain: a random number known only to agents of the job
        job: the name of the job's folder below TTP_LOG_PATH
    """

    kind: str
    generation: str
    restart: bool
    port: int = 0
    name: str = _NOTHING
    job: str = _NOTHING

    @classmethod
    def draw(cls, kind: str, restart: bool, job: str) -> Invitation:
        """Make an invitation without port or socket, which follow later.

        Args:
            kind: of the connection.
            restart: whether workers ran before.
        """
        name = secrets.token_hex(32) if kind == PLAIN else _NOTHING
        return cls(kind, secrets.token_hex(8), restart, name=name, job=job)

    @property
    def secret(self) -> bytes:
        """Return the secret that both sides of a connection prove."""
        token = self.name if self.kind == PLAIN else ""
        return f"{self.generation} {self.restart:d} {token} {self.job}".encode()

    def address(self, host: str) -> tuple[str, int]:
        """Return address and port to connect to; `host`: the address of node 0."""
        return (self.name, 0) if self.kind == UNIX else (host, self.port)

    def encode(self) -> bytes:
        """Return the text for the rendezvous store."""
        fields = (self.kind, self.generation, f"{self.restart:d}", str(self.port), self.name, self.job)
        return " ".join(fields).encode()

    @classmethod
    def decode(cls, encoded: bytes, kind: str) -> Invitation:
        """Return the invitation in the store.

        Args:
            encoded: the text.
            kind: the kind that this node's settings ask for.

        Raises:
            StartError: the invitation is of another kind, or was written by another program.
        """
        form_match = _FORM.fullmatch(encoded.decode("utf-8", "replace"))
        if form_match is None:
            raise StartError(
                "what the rendezvous store says of the controller was not written by ttprun of this version:"
                " another program writes to that store, or node 0 has another version of ttp-adaptor"
            )
        if form_match[1] != kind:
            raise StartError(
                f"node 0 waits for agents by {_WORDS[form_match[1]]}, and this node is set to {_WORDS[kind]}:"
                " TTP_TLS, TTP_TLS_CERT and --rdzv-endpoint or --master-addr must mean the same on every node"
            )
        sent_kind, generation, restart, port, name, job = form_match.groups()
        return cls(sent_kind, generation, restart == "1", int(port), name, job)

"""The entry of node 0 in torch's rendezvous store, by which other agents find its controller.

Every client of the store can read and replace the entry. So the entry counts only as far as the connection
proves it: an agent connects in the way of its own settings, never in a weaker way, and both sides then prove
the same `secret`, which covers generation, restart and job.

unix   on one machine, an abstract socket; the kernel gives each side the user of the other
tls    between machines with certificates, which both sides have to show
plain  between machines in a trusted network: the secret itself is in the store
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from adaptor.config import Config
from adaptor.errors import StartError

KEY = "ttp/controller"
UNIX, TLS, PLAIN = "unix", "tls", "plain"
_FORM = re.compile(r"(unix|tls|plain) ([0-9a-f]{16}) ([01]) (\d{1,5}) ([0-9a-z-]{1,100}) ([\w.@+=,-]{1,255})")
_NOTHING = "-"


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
        return cls(
            form_match[1],
            form_match[2],
            form_match[3] == "1",
            int(form_match[4]),
            form_match[5],
            form_match[6],
        )


_WORDS = {
    UNIX: "a socket of its own machine (no certificates)",
    TLS: "TLS (certificates)",
    PLAIN: "unencrypted TCP (TTP_TLS=plain)",
}

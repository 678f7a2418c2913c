"""The engine `mindio`: what ttprun does for an installed mindio_ttp. Imports nothing of a worker."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Mapping

from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.mindio.client import sdk
from adaptor.protocol.environment import AGENT, SCRATCH

# What mindio_ttp takes for its actions, and waits for workers at their end.
_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
_LIMITS_S = (30, 1800)


class MindioEngine:
    """An `adaptor.engines.Engine`. mindio_ttp makes torch's own agent wait for workers that save."""

    has_own_agent = False
    runtime = "adaptor.mindio.client.runtime:MindioRuntime"

    def require(self, settings: Config) -> None:
        """Refuse what needs the adaptor's own controller. Raises ConfigError."""
        if settings.provide_mindio:
            raise ConfigError(
                "TTP_ENGINE is 'mindio', but TTP_PROVIDE_MINDIO is True: one of them is for an installed"
                " mindio_ttp, the other for none; leave one out"
            )
        if settings.tls_cert:
            raise ConfigError(
                f"TTP_ENGINE is 'mindio', but TTP_TLS_CERT is {settings.tls_cert!r}: connections of"
                " mindio_ttp are not encrypted; inside a trusted network leave out the certificates, and set"
                " TTP_TLS=plain"
            )

    def prepare(self, settings: Config) -> Mapping[str, str]:
        """Import mindio_ttp, which changes torch's agent. Raises ConfigError if it is missing or too old."""
        sdk.load()
        scratch = tempfile.TemporaryDirectory(prefix="ttp-")
        atexit.register(scratch.cleanup)
        low, high = _LIMITS_S
        limit = os.environ.get(_LIMIT, str(int(min(max(settings.timeout_s, low), high))))
        return {_LIMIT: limit, AGENT: "", SCRATCH: scratch.name}  # there is no agent of ours

    def exit_code(self, code: int) -> int | None:
        """See `Engine`; 1 where mindio_ttp has ended the workers after a save."""
        if code == sdk.REFUSED:
            return None
        return 1 if code == sdk.ENDED else code

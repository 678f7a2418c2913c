"""The engine `mindio`: the work of ttprun for an installed mindio_ttp. Imports nothing of a worker."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Mapping

from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.mindio import MindioSettings
from adaptor.mindio.client import ENDED, REFUSED, load
from adaptor.protocol.environment import AGENT, SCRATCH

# mindio_ttp's time limit for its actions, and for the end of workers.
_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
_LIMITS_S = (30, 1800)


class MindioEngine:
    """An `adaptor.engines.Engine`. mindio_ttp makes torch's own agent wait for workers that save."""

    has_own_agent = False
    runtime = "adaptor.mindio.client.runtime:MindioRuntime"

    def require(self, settings: Config) -> None:
        """Refuse settings of the adaptor's own controller. Raises ConfigError."""
        if settings.of(MindioSettings).provide_mindio:
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
        load()
        scratch = tempfile.TemporaryDirectory(prefix="ttp-")
        atexit.register(scratch.cleanup)
        low, high = _LIMITS_S
        limit = os.environ.get(_LIMIT, str(int(min(max(settings.timeout_s, low), high))))
        return {_LIMIT: limit, AGENT: "", SCRATCH: scratch.name}  # there is no agent of ours

    def exit_code(self, code: int) -> int | None:
        """Return the code as in `Engine`; 1 if mindio_ttp has ended the workers after a save."""
        if code == REFUSED:
            return None
        return 1 if code == ENDED else code

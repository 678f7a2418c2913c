"""Lets an installed `mindio_ttp` (the SDK) replace the controller and the processor: TTP_ENGINE=mindio.

`load` loads the SDK and checks its functions. `MindioEngine` prepares a job in ttprun. `runtime` reports
each step to the SDK, has the handlers for the SDK, describes which rank holds which shard, and joins these
parts in a worker. The promises that do not hold with the SDK: docs/mindio.md.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.mindio import NAME, MindioSettings
from adaptor.protocol.environment import AGENT, SCRATCH

FRAMEWORK = f"{NAME}.framework_ttp"
# The exit codes of a process that the SDK has ended, and of a process that has refused the job. ttprun's own
# code for a refusal is the SDK's code, so the two need different codes here.
ENDED = 2
REFUSED = 102
# mindio_ttp's time limit for its actions, and for the end of workers.
_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
_LIMITS_S = (30, 1800)
NEEDED = (
    "tft_init_controller",
    "tft_start_controller",
    "tft_destroy_controller",
    "tft_init_processor",
    "tft_start_processor",
    "tft_destroy_processor",
    "tft_set_optimizer_replica",
    "tft_start_updating_os",
    "tft_start_copy_os",
    "tft_end_updating_os",
    "tft_register_save_ckpt_handler",
    "tft_register_rename_handler",
    "tft_report_error",
    "ReportState",
)


def load() -> Any:
    """Return the SDK's module. Its import changes how torch's agent waits for workers.

    Raises:
        ConfigError: the SDK is not installed, cannot be imported, or is too old.
    """
    module_spec = importlib.util.find_spec(NAME)
    if module_spec is None:
        raise ConfigError(
            f"TTP_ENGINE is 'mindio', but {NAME} is not installed: install it, or leave TTP_ENGINE out"
        )
    try:
        module = importlib.import_module(FRAMEWORK)
    except (ImportError, OSError) as error:
        raise ConfigError(f"TTP_ENGINE is 'mindio', but {FRAMEWORK} cannot be imported: {error}") from None
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"TTP_ENGINE is 'mindio', but {FRAMEWORK} ({module.__file__}) has no {', '.join(missing)}: "
            "it is too old; install a newer one, or leave TTP_ENGINE out"
        )
    return module


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

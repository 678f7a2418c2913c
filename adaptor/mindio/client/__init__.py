"""Lets an installed `mindio_ttp` (the SDK) replace the controller and the processor: TTP_ENGINE=mindio.

`load` loads the SDK and checks its functions. `engine` prepares a job in ttprun. `runtime` reports each step
to the SDK, has the handlers for the SDK, describes which rank holds which shard, and joins these parts in a
worker. The promises that do not hold with the SDK: docs/mindio.md.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from adaptor.errors import ConfigError
from adaptor.mindio import NAME

FRAMEWORK = f"{NAME}.framework_ttp"
# The exit codes of a process that the SDK has ended, and of a process that has refused the job. ttprun's own
# code for a refusal is the SDK's code, so the two need different codes here.
ENDED = 2
REFUSED = 102
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

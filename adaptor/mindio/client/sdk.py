"""The installed SDK: found, and asked for each function that is called here."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from adaptor.errors import ConfigError
from adaptor.mindio import NAME

FRAMEWORK = f"{NAME}.framework_ttp"
# The codes with which the SDK ends a process, and with which one ends here that has refused the job: ttprun
# tells them apart, for its own code for what is refused is that of the SDK.
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
    """The SDK's module. It changes how torch's agent waits for workers, in the process that imports it.

    Raises:
        ConfigError: it is not installed, cannot be imported, or is too old.
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

"""The interface of MindIO TTP on this engine, for scripts that were adapted to MindIO TTP by hand.

A script imports the package `provided/mindio_ttp`, which holds names only. `interface` has the functions in
both forms, `job` translates their calls for the engine, `trainee` dumps by the script's handlers. The
functions and their limits: docs/mindio.md.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.hooks import WorkerHooks
from adaptor.setting_values import TRUTH, Setting

NAME = "mindio_ttp"
_FOLDER = str(Path(__file__).with_name("provided"))


def provide() -> None:
    """Let `import mindio_ttp` import the package here; repeated calls have no effect.

    Raises:
        ConfigError: another mindio_ttp is installed, which would save in place of this engine.
    """
    if _FOLDER in sys.path:
        return
    installed = importlib.util.find_spec(NAME)
    if installed is not None:
        raise ConfigError(
            f"TTP_PROVIDE_MINDIO is True, but {NAME} is installed ({installed.origin or 'a folder'}): "
            "uninstall it, or leave TTP_PROVIDE_MINDIO out and use the ttprun that came with it"
        )
    sys.path.append(_FOLDER)  # last: never before an installed one


def withdraw() -> None:
    """Undo `provide`; imported names stay."""
    if _FOLDER not in sys.path:
        return
    sys.path.remove(_FOLDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


@dataclass(frozen=True)
class MindioSettings:
    """The setting of the interface of MindIO TTP (`Config.of`)."""

    provide_mindio: bool


def _require(settings: Config) -> None:
    """Refuse settings that need patches of the framework. Raises ConfigError."""
    if not settings.of(MindioSettings).provide_mindio:
        return
    values: dict[str, object] = {"HOST_COPY": settings.host_copy, "VERIFY_EVERY": settings.verify_every != 0}
    values |= {name.upper(): settings.parts.get(name) for name in ("profile", "dump")}
    for name, value in values.items():
        if value:
            raise ConfigError(
                f"TTP_{name} is set, and TTP_PROVIDE_MINDIO is True: a script that was adapted to MindIO TTP"
                " by hand has no recordings, copies in host memory or comparisons; leave out one of them"
            )


SETTINGS = (
    Setting(
        "provide_mindio",
        "TTP_PROVIDE_MINDIO",
        "False",
        *TRUTH,
        "True: for a script that was adapted to MindIO TTP by hand; importing mindio_ttp, which is not "
        "installed, finds the adaptor's, and no framework is patched",
        same_on_all_nodes=True,
        group="Devices and interfaces",
        require=_require,
    ),
)


class MindioWorkerHooks(WorkerHooks):
    """`import mindio_ttp` finds the adaptor's package."""

    interface = "mindio"

    @property
    def is_wanted(self) -> bool:
        return self.settings.of(MindioSettings).provide_mindio

    def provide(self) -> None:
        provide()

    def withdraw(self) -> None:
        withdraw()

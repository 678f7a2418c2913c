"""Engines: what notices a fault and chooses what is saved (TTP_ENGINE).

An entry point of `ttp_adaptor.engines` names a class with the interface of `Engine`. ttprun makes one, and
each worker makes one of its own. Importing this module imports nothing of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from adaptor import plug_ins
from adaptor.config import Config


class Engine(Protocol):
    """An engine, without arguments.

    Attributes:
        has_own_agent: True: the agents and the controller of `ttprun` drive the job. False: torch elastic's
            own agent starts the workers, and they drive themselves.
        runtime: the class of `adaptor.worker.engine.WorkerRuntime` that each worker makes of its settings and
            its environment, as `module:name`; it is imported in workers alone
    """

    has_own_agent: bool
    runtime: str

    def require(self, settings: Config) -> None:
        """Refuse settings that the engine does not honour, by a ConfigError."""

    def prepare(self, settings: Config) -> Mapping[str, str]:
        """Prepare the process of ttprun, and return variables for the environment of the workers.

        It is called where `has_own_agent` is False, before torch elastic starts its agent. Raises ConfigError
        where something is missing.
        """

    def exit_code(self, code: int) -> int | None:
        """Return the exit code of ttprun for that of the worker that failed first.

        Returns:
            None where a worker has told the user why the job is refused.
        """


class Builtin:
    """The adaptor's own controller."""

    has_own_agent = True
    runtime = "adaptor.worker.runtime:Runtime"

    def require(self, settings: Config) -> None:
        """Accept all settings."""

    def prepare(self, settings: Config) -> Mapping[str, str]:
        return {}

    def exit_code(self, code: int) -> int | None:
        return code


def find(name: str) -> Engine:
    """Return the engine `name` (TTP_ENGINE). Raises ConfigError where none of that name is installed."""
    engine_factory = cast(
        "Callable[[], Engine]", plug_ins.choose(plug_ins.ENGINES, name, "TTP_ENGINE", "or left out")
    )
    return engine_factory()

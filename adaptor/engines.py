"""Engines: an engine notices faults and chooses the step to save (TTP_ENGINE).

An entry point of `ttp_adaptor.engines` names a class with the interface of `Engine`. ttprun creates an
engine, and each worker creates its own. An import of this module imports nothing of a worker.
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
            own agent starts the workers, and the workers drive themselves.
        runtime: the class of `adaptor.worker.unprotected.WorkerRuntime` that each worker creates from its
            settings and its environment, as `module:name`; imported in workers only
    """

    has_own_agent: bool
    runtime: str

    def require(self, settings: Config) -> None:
        """Refuse settings without an effect in this engine, by a ConfigError."""

    def prepare(self, settings: Config) -> Mapping[str, str]:
        """Prepare the process of ttprun, and return variables for the environment of the workers.

        Called if `has_own_agent` is False, before torch elastic starts its agent. Raises ConfigError where
        something is missing.
        """

    def exit_code(self, code: int) -> int | None:
        """Return the exit code of ttprun for the exit code of the first failed worker.

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
    """Return the engine `name` (TTP_ENGINE). Raises ConfigError if no such engine is installed."""
    engine_factory = cast(
        "Callable[[], Engine]", plug_ins.choose(plug_ins.ENGINES, name, "TTP_ENGINE", "or left out")
    )
    return engine_factory()

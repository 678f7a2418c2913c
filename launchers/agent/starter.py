"""Starts processes in the way in which torch's agent has started the workers of a generation."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from adaptor.launchers.agent.programs import SPARE, WORKER
from adaptor.launchers.spares.spare_pool import Spare

# What torch elastic makes another one for each rank, also where a node has only one.
_OF_A_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"})


class Starter:
    """Of one generation.

    Args:
        context: torch's, with the processes that it has started.
        local_ranks: of the workers, by their ranks.

    Attributes:
        of_a_rank: the environment variables that are another one's for each rank
        of_all_ranks: those that torch elastic makes for its workers, and that are the same for all of this
            node
    """

    def __init__(self, context: SubprocessContext, local_ranks: Mapping[int, int]) -> None:
        self._context = context
        self._local_ranks = dict(local_ranks)
        self._commands = {rank: _words(handler) for rank, handler in context.subprocess_handlers.items()}
        first, *other_environments = context.envs.values()
        differ = {
            name
            for name in first
            if any(other_environment.get(name) != first[name] for other_environment in other_environments)
        }
        self.of_a_rank = tuple(sorted(differ | _OF_A_RANK))
        self.of_all_ranks = {name: value for name, value in first.items() if name not in self.of_a_rank}

    def start(
        self, rank: int, added: Mapping[str, str], spare: Spare | None, *, or_cold: bool
    ) -> subprocess.Popen[bytes]:
        """Start a process in the place of the one of `rank`, which has ended, and let torch watch that.

        It has the same arguments, environment and streams: what it writes comes behind what is there.

        Args:
            added: to the environment.
            spare: becomes the worker, where that works.
            or_cold: whether a new process is started where it does not.

        Raises:
            OSError: no process can be started.
        """
        local_rank = self._local_ranks[rank]
        handler = self._context.subprocess_handlers[local_rank]
        environment = {**os.environ, **self._context.envs[local_rank], **added}
        if spare is not None:
            try:
                handler.proc = spare.become(environment, handler._stdout, handler._stderr)
            except OSError:  # it has just ended
                if not or_cold:
                    raise
                spare = None
        if spare is None:
            handler.proc = handler._popen(tuple(self._commands[local_rank]), environment)
        return handler.proc

    @property
    def may_spare(self) -> bool:
        """Return whether a process can wait for any rank: not where torch binds each to processors."""
        first, *other_commands = self._commands.values()
        return str(WORKER) in first and all(other_command == first for other_command in other_commands)

    def spare(self) -> Spare:
        """Start one. Raises OSError where that cannot be."""
        command = [
            str(SPARE) if word == str(WORKER) else word for word in next(iter(self._commands.values()))
        ]
        environment = {**os.environ, **next(iter(self._context.envs.values()))}
        return Spare(
            command, {name: value for name, value in environment.items() if name not in self.of_a_rank}
        )


def _words(handler: SubprocessHandler) -> list[str]:
    """Return the command of the worker, as torch has made it, also of one that was a spare process before."""
    command: Any = handler.proc.args
    return [str(WORKER) if str(word) == str(SPARE) else str(word) for word in command]

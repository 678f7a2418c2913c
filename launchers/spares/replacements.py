"""Replaces single workers of a node while the others live; spares are kept for that.

On the agent's control thread, generation after generation: `begin`, `end`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from adaptor.launchers.agent.programs import SPARE, WORKER
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.spares.spare_pool import Spare, Spares
from adaptor.protocol.environment import NEWCOMER
from adaptor.protocol.messages import BoardRecord, Layout, Modules, ModulesProbe, RegroupFailed, Replace
from adaptor.protocol.spare_messages import Import

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


# What torch elastic makes another one for each node.
OF_A_NODE = frozenset({"GROUP_RANK"})


class _NoSpareError(Exception):
    """No process may be started, and none waits."""


class Replacements:
    """The processes of one agent that were not there when its workers were started.

    Args:
        spares: so many processes wait to be workers.
    """

    def __init__(self, workers: Workers, spares: int) -> None:
        self._workers = workers
        self._spares_alone = False
        self._not_online: set[int] = set()  # ranks that cannot be recovered online, or have not decided yet
        self._spares = Spares(spares)
        self._starter: Starter | None = None
        self._newcomers: set[int] = set()  # ranks whose processes have not come to train yet

    def begin(self, starter: Starter, *, spares_alone: bool = False, newcomers: Collection[int] = ()) -> None:
        """The workers of this node have been started.

        Args:
            spares_alone: no restart is left, so only a process that waits may take a place.
            newcomers: those of them that join others that train: this is a spare node.
        """
        self._starter = starter
        self._newcomers = set(newcomers)
        self._spares_alone, self._not_online = spares_alone, set()

    def hear_layout(self, layout: Layout) -> None:
        """Note whether a rank can be recovered online; the newest layout of a rank counts."""
        if layout.online:
            self._not_online.add(layout.rank)
        else:
            self._not_online.discard(layout.rank)

    async def end(self) -> None:
        """The generation is over."""
        self._starter = None
        await self._spares.end()

    async def replace(self, order: Replace, is_wanted: Callable[[], bool]) -> RegroupFailed | None:
        """Start a process in the place of the one of a rank; it speaks for itself from then on.

        Args:
            is_wanted: whether it still is, when the process of before has ended.

        Returns:
            What the controller must hear where none can be started.
        """
        starter = self._starter
        if starter is None:  # a spare node, whose first workers are being started
            reason = "the workers of its node have not been started yet"
            return RegroupFailed(order.rank, order.incident, order.attempt, reason)
        if self._spares_alone and not self._spares.are_ready:
            # Now, not when the process of before has ended: nobody waits for what cannot be.
            return self._without_a_spare(order)
        self._newcomers.add(order.rank)

        def start() -> subprocess.Popen[bytes] | None:
            if not is_wanted():
                return None
            spare = None if order.cold and not self._spares_alone else self._spares.take()
            if spare is None and self._spares_alone:
                raise _NoSpareError
            added = {NEWCOMER: str(order.incident)}
            return starter.start(order.rank, added, spare, or_cold=not self._spares_alone)

        try:
            await self._workers.replace(order.rank, start)
        except OSError as error:  # no process, no descriptor, no memory
            reason = f"no process can be started in its place ({error.strerror})"
            return RegroupFailed(order.rank, order.incident, order.attempt, reason)
        except _NoSpareError:
            return self._without_a_spare(order)
        return None

    @staticmethod
    def _without_a_spare(order: Replace) -> RegroupFailed:
        reason = "no restart is left (--max-restarts), and no spare process waits on its node"
        return RegroupFailed(order.rank, order.incident, order.attempt, reason)

    def end_incident(self) -> None:
        """End the incident: all ranks train again."""
        self._newcomers = set()
        self._spares.fill()

    def end_newcomers(self) -> None:
        """End those that have not come to train: they have nothing, and may not hear that they are to go."""
        if self._newcomers:
            self._workers.end_the_living(self._newcomers)

    def look(self, boards: Sequence[BoardRecord], origin: int) -> None:
        """Ask a worker for its modules, once it has finished a step after `origin`: its imports are complete.

        A job that cannot be recovered online has no use for spares.
        """
        if self._starter is None or not self._spares.wanted or not self._starter.may_spare:
            return
        if self._not_online:
            return
        for board in boards:
            if board.finished > origin:
                self._workers.order(board.rank, ModulesProbe())
                return

    def hear(self, module_report: Modules) -> Import | None:
        """A worker has told what it has imported; return what processes of spare nodes are to import.

        None: nobody needs to know.
        """
        if self._starter is None or not self._spares.wanted:
            return None
        imports = Import(
            module_report.path,
            module_report.origins,
            module_report.names,
            module_report.variables,
            self._starter.of_a_rank,
        )
        self._spares.begin(self._starter.spare, imports)
        return msgspec.structs.replace(
            imports,
            of_a_rank=tuple({*imports.of_a_rank, *OF_A_NODE}),
            environment={
                name: value for name, value in self._starter.of_all_ranks.items() if name not in OF_A_NODE
            },
            is_alone=True,
        )

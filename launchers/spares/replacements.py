"""Replaces single workers of a node while the others live, with spares or new processes.

Everything runs on the agent's control thread, generation after generation: `begin`, `end`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from adaptor.launchers.agent.processes import SPARE, WORKER
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.spares.spare_pool import Spare, Spares, command_of_spare
from adaptor.protocol.environment import NEWCOMER
from adaptor.protocol.messages import (
    BoardRecord,
    Layout,
    Modules,
    ModulesProbe,
    RegroupFailed,
    Replace,
    Starting,
)
from adaptor.protocol.spare_messages import Import

# Variables that torch elastic sets differently for each rank, also on a node with one rank.
_OF_A_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"})


class Starter:
    """Starts processes in the way in which torch's agent has started the workers of a generation.

    Args:
        context: torch's, with the started processes.
        local_ranks: of the workers, by rank.

    Attributes:
        of_a_rank: the names of environment variables that differ between ranks
        of_all_ranks: the variables of torch elastic with one value for all workers of the node
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
        """Start a process in the place of the ended process of `rank`, and let torch watch the new
        process.

        Arguments, environment and streams are those of the old process: output is appended.

        Args:
            added: added to the environment.
            spare: becomes the worker, if possible.
            or_cold: whether a new process is started if the spare fails.

        Raises:
            OSError: no process can be started.
        """
        local_rank = self._local_ranks[rank]
        handler = self._context.subprocess_handlers[local_rank]
        environment = {**os.environ, **self._context.envs[local_rank], **added}
        if spare is not None:
            try:
                handler.proc = spare.become(environment, handler._stdout, handler._stderr)
            except OSError:  # the spare has just ended
                if not or_cold:
                    raise
                spare = None
        if spare is None:
            handler.proc = handler._popen(tuple(self._commands[local_rank]), environment)
        return handler.proc

    @property
    def may_spare(self) -> bool:
        """Return whether a spare can become any rank: not if torch binds each rank to processors."""
        first, *other_commands = self._commands.values()
        return str(WORKER) in first and all(other_command == first for other_command in other_commands)

    def spare(self) -> Spare:
        """Start a spare. Raises OSError on failure."""
        command = command_of_spare(next(iter(self._commands.values())))
        environment = {**os.environ, **next(iter(self._context.envs.values()))}
        return Spare(
            command, {name: value for name, value in environment.items() if name not in self.of_a_rank}
        )


def _words(handler: SubprocessHandler) -> list[str]:
    """Return the command of the worker as torch has made it, also of a former spare."""
    command: Any = handler.proc.args
    return [str(WORKER) if str(word) == str(SPARE) else str(word) for word in command]


# Variables that torch elastic sets differently for each node.
OF_A_NODE = frozenset({"GROUP_RANK"})


# CPU time of the main thread of a new process, in ticks of the kernel (10 ms), that counts as progress: more
# than a main thread uses that waits, and looks again and again whether the wait is over.
_PROGRESS_TICKS = 5


class _NoSpareError(Exception):
    """No process may be started, and no spare waits."""


class Replacements:
    """The processes of one agent that were started after its workers.

    Args:
        spares: the number of spares.

    Attributes:
        spares: the processes that wait
    """

    def __init__(self, workers: Workers, spares: int) -> None:
        self._workers = workers
        self._spares_alone = False
        self._not_online: set[int] = set()  # ranks without online recovery, or undecided
        self.spares = Spares(spares)
        self._starter: Starter | None = None
        # The ranks whose new processes do not train yet, with the last reported CPU time of each.
        self._newcomers: dict[int, int] = {}

    def begin(self, starter: Starter, *, spares_alone: bool = False, newcomers: Collection[int] = ()) -> None:
        """Begin a generation after the start of its workers.

        Args:
            starter: starts more processes.
            spares_alone: no restart remains, so only a spare may take a place.
            newcomers: the workers that join training workers, on a spare node.
        """
        self._starter = starter
        self._newcomers = dict.fromkeys(newcomers, 0)
        self._spares_alone, self._not_online = spares_alone, set()
        if self.spares.imports is not None:  # the workers are forks of a spare
            self.spares.begin(starter.spare, self.spares.imports)

    def hear_layout(self, layout: Layout) -> None:
        """Note whether a rank can be recovered online; the newest layout of a rank counts."""
        if layout.online:
            self._not_online.add(layout.rank)
        else:
            self._not_online.discard(layout.rank)

    async def end(self, *, is_last: bool) -> None:
        """End the generation.

        Args:
            is_last: there is no next generation.
        """
        self._starter = None
        if is_last:
            await self.spares.end()
        else:
            self.spares.end_generation()

    async def replace(self, order: Replace, is_wanted: Callable[[], bool]) -> RegroupFailed | None:
        """Start a process in the place of a rank's process; the new process reports by itself from then
        on.

        Args:
            is_wanted: whether a process is still wanted, after the old process has ended.

        Returns:
            The report to the controller if no process can be started.
        """
        starter = self._starter
        if starter is None:  # a spare node whose first workers are being started
            reason = "the workers of its node have not been started yet"
            return RegroupFailed(order.rank, order.incident, order.attempt, reason)
        if self._spares_alone and not self.spares.are_ready:
            # Refuse before the old process has ended: nobody should wait.
            return self._without_a_spare(order)

        def start() -> subprocess.Popen[bytes] | None:
            if not is_wanted():
                return None
            self._newcomers[order.rank] = 0  # not before: the CPU time would be that of the old process
            spare = None if order.cold and not self._spares_alone else self.spares.take()
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
        self._newcomers = {}
        self.spares.fill()

    def starting(self) -> list[Starting]:
        """Return the reports of new processes that have used CPU time since their last report."""
        reports = []
        for rank, ticks_before in self._newcomers.items():
            ticks = self._workers.ticks_of(rank)
            if ticks >= ticks_before + _PROGRESS_TICKS:
                self._newcomers[rank] = ticks
                reports.append(Starting(rank, ticks))
        return reports

    def end_newcomers(self) -> None:
        """End new processes that do not train yet: they have no state, and may not hear orders to exit."""
        if self._newcomers:
            self._workers.end_the_living(self._newcomers)

    def look(self, boards: Sequence[BoardRecord], origin: int) -> None:
        """Ask a worker for its modules after it has finished a step after `origin`: then its imports are
        complete.

        A job needs no spares if it is not recovered online and cannot be started again.
        """
        if self._starter is None or not self.spares.wanted or not self._starter.may_spare:
            return
        if self._not_online and self._spares_alone:
            return
        for board in boards:
            if board.finished > origin:
                self._workers.order(board.rank, ModulesProbe())
                return

    def hear(self, module_report: Modules) -> Import | None:
        """Note the modules of a worker; return the imports for processes of spare nodes, None if nobody
        needs them.
        """
        if self._starter is None or not self.spares.wanted:
            return None
        imports = Import(
            module_report.path,
            module_report.origins,
            module_report.names,
            module_report.variables,
            self._starter.of_a_rank,
        )
        self.spares.begin(self._starter.spare, imports)
        return msgspec.structs.replace(
            imports,
            of_a_rank=tuple({*imports.of_a_rank, *OF_A_NODE}),
            environment={
                name: value for name, value in self._starter.of_all_ranks.items() if name not in OF_A_NODE
            },
            is_alone=True,
        )

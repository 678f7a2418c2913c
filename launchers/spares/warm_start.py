"""The processes that a spare node keeps, so that its workers start as fast as a spare process does.

They are started on the main thread, which lives as long as `ttprun`: the kernel ends them with the thread
that has started them. They import what a worker of node 0 has imported (`spare_pool.Spare`), as the gate of
node 0 tells it, and become the workers of this node when it takes a place while others train. None is
needed: where one has ended, a new process is started in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

import msgspec

from adaptor import output
from adaptor.launchers.agent.programs import SPARE, WORKER
from adaptor.launchers.spares.spare_pool import Spare, partial_imports
from adaptor.protocol.environment import AGENT
from adaptor.protocol.spare_messages import Import, Ready


class WarmProcesses:
    """The processes of one spare node.

    Args:
        command: starts a worker.
        count: so many workers this node will have; 0: it keeps none, and starts cold processes.
    """

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = list(command)
        self._spares: list[Spare] = []
        with contextlib.suppress(OSError):  # no process, no descriptor, no memory: cold ones may start later
            for _ in range(count):
                command_words = [str(SPARE) if word == str(WORKER) else word for word in self._command]
                self._spares.append(Spare(command_words, {**os.environ, AGENT: ""}))  # which is not there yet
        self._told = ""

    async def have_import(self, imports: Import) -> None:
        """Let all spares import `imports` at the same time, and wait for them. Later calls change nothing."""
        untold = [spare for spare in self._spares if not spare.told]
        await asyncio.gather(*(self._have_import(spare, imports) for spare in untold))

    async def _have_import(self, spare: Spare, imports: Import) -> None:
        ready = Ready()
        with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):  # it has ended
            ready = await spare.imports(imports)
        if ready.unfit and not self._told:
            self._told = ready.unfit
            without = (
                "this spare node has no spare processes: if it takes a place, its workers start from the"
                f" beginning, which takes longer: {ready.unfit}"
            )
            output.tell(f"[ttp] {partial_imports(ready) if spare.ready else without}")

    @contextlib.contextmanager
    def become_workers(self) -> Iterator[None]:
        """Let torch's agent take one for each worker that it starts meanwhile; without one it starts anew."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        cold = SubprocessHandler._popen

        def start(
            handler: SubprocessHandler, command_words: tuple[str, ...], environment: dict[str, str]
        ) -> subprocess.Popen[bytes]:
            spare = self._take() if [str(word) for word in command_words] == self._command else None
            if spare is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    return spare.become(environment, handler._stdout, handler._stderr)
            process: subprocess.Popen[bytes] = cold(handler, command_words, environment)
            return process

        SubprocessHandler._popen = start  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            SubprocessHandler._popen = cold  # type: ignore[method-assign]
            self.end()

    def _take(self) -> Spare | None:
        """Return one that has imported everything; None where there is none."""
        for spare in self._spares:
            if spare.ready:
                self._spares.remove(spare)
                return spare
        return None

    def end(self) -> None:
        """End those that are left."""
        spares, self._spares = self._spares, []
        for spare in spares:
            spare.kill()


def of_spare_node(parsed: argparse.Namespace, *, is_wanted: bool) -> WarmProcesses:
    """Start the processes of this spare node, on the main thread.

    Args:
        parsed: torchrun's arguments.
        is_wanted: whether there are to be any (TTP_SPARES, TTP_ONLINE).
    """
    from torch.distributed import run
    from torch.distributed.elastic.utils import macros

    # It sets OMP_NUM_THREADS as for workers; and it makes a folder for logs, where it is given none.
    parsed_copy = argparse.Namespace(**{**vars(parsed), "log_dir": os.devnull})
    config, entrypoint, arguments = run.config_from_args(parsed_copy)
    command = [str(entrypoint), *map(str, arguments)]
    # Where torch gives each rank other arguments, or processors of its own, none can be any rank.
    is_same = str(WORKER) in command and not any(macros.local_rank in word for word in command)
    is_bound = getattr(config, "numa_options", None) is not None
    count = config.nproc_per_node if is_wanted and is_same and not is_bound else 0
    return WarmProcesses(command, count)

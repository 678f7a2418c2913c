"""The control thread of an agent: hears its workers, sees them die, and speaks with the controller.

One event loop in one thread per `ttprun`. A generation is the time from one start of all workers to the next;
`begin`, `meet` and `watch` open it, `end` closes it. All it makes in a file system is a folder for what
multiprocessing makes in the workers, which end in no orderly way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptor.checkpoint import publish
from adaptor.config import Config
from adaptor.control import stacks
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    ControllerToAgent,
    Died,
    Dismissed,
    Exit,
    Find,
    FromAgent,
    Leave,
    Prepare,
    Progress,
    Publish,
    Raised,
    Still,
    Told,
    Verdict,
)
from adaptor.control.runtime import AGENT, BOARD, BOARD_RANKS, GENERATION, RESUME, SCRATCH
from adaptor.control.stillness import Stillness
from adaptor.errors import CheckpointError
from adaptor.launchers import tls
from adaptor.launchers.chronicle import Chronicle
from adaptor.launchers.filing import Filing
from adaptor.launchers.gate import LOOPBACK
from adaptor.launchers.hub import Hub
from adaptor.launchers.log import Log
from adaptor.launchers.way import Way
from adaptor.launchers.workers import Workers

# The boards are read this often, for progress (TTP_OT is at least 10 s) and for workers that stand still.
PROGRESS_S = 0.5
# A worker that was told to exit and has not done so by then hangs in the kernel or holds the interpreter
# lock.
EXIT_GRACE_S = 3.0
# Other nodes end their workers in the same time; this much longer is waited for word of it.
FAREWELL_S = EXIT_GRACE_S + 2.0


class Node:
    """The agent's side of the control plane."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tls = tls.load(config)
        self._loop = asyncio.new_event_loop()
        self._workers = Workers(self._loop, lambda message: self._up(message))
        self._scratch = tempfile.TemporaryDirectory(prefix="ttp-", ignore_cleanup_errors=True)
        self._chronicle = Chronicle(config.log_path)
        self._log = Log(config)
        self._node = 0
        self._begun = 0  # generations
        self._generation = ""
        self._way: Way | None = None
        self._filing = Filing()
        self._up: Callable[[FromAgent], None] = lambda message: None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.verdict: Verdict | None = None
        self._dismissed = False
        self.settled = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ttp-agent", daemon=True)
        self._thread.start()
        self._await(self._workers.serve())

    # the agent's main thread

    def begin(
        self, ranks: Sequence[int], node: int, nodes: int, world_size: int, store: Any, host: str
    ) -> None:
        """Before workers start: their boards, the controller or the way to it, what goes into their
        environment.

        Args:
            store: the rendezvous store, which all agents share; its keys are of this generation alone.
            host: the address of node rank 0.
        """
        if self._tls is None and self._config.tls != "plain":
            host = LOOPBACK  # ttprun has seen to it that all nodes are on this machine
        self._node = node
        self._begun += 1
        boards = self._workers.begin(ranks)
        os.environ[AGENT] = self._workers.address
        os.environ[BOARD] = boards.path
        os.environ[BOARD_RANKS] = boards.slots
        os.environ[SCRATCH] = self._scratch.name
        self.verdict = None
        self._dismissed = False
        self.settled.clear()
        self._chronicle.begin()
        way = Way(
            *(node, nodes, world_size, self._config, self._tls, self._chronicle),
            *(self._obey, lambda: self._judge("the controller's node is lost")),
        )
        self._way = way
        self._up = way.say
        if node == 0:
            generation, resume, secret = secrets.token_hex(8), int(self._begun > 1), secrets.token_bytes(32)
            port = self._await(way.host(host, secret))
            store.set("ttp/controller", f"{generation} {resume} {port} {secret.hex()}")
            self._await(self._say(AgentHello(node, tuple(ranks))))
        else:
            generation, resume, port, secret = store.get("ttp/controller").decode().split()
            self._await(way.join(host, int(port), bytes.fromhex(secret), tuple(ranks)))
        self._generation = os.environ[GENERATION] = generation
        os.environ[RESUME] = str(resume)

    def meet(self) -> None:
        """Wait for the nodes that would have the controller if it were lost."""
        assert self._way is not None
        self._await(self._way.meet())

    def watch(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """The workers have been started; `processes` by rank."""
        self._await(self._watch(processes))

    @property
    def running(self) -> bool:
        """Whether workers have been started and are alive."""
        return self._workers.running

    @property
    def save(self) -> str:
        """The folder of the checkpoints; '' where only another node knows it, or none yet."""
        return self._hub.controller.roster.save if self._hub is not None else ""

    @property
    def over(self) -> bool:
        """Whether every worker of the job has come to its end; until then one may fail, and all start again.

        Who has the controller asks it, not who lives: there may be no verdict yet on those that have died.
        """
        return self._dismissed or (self._hub is not None and self._hub.dismissed)

    def leave(self, signal: str, grace_s: float) -> None:
        """Somebody wants this agent to end, by `signal`: save first; a verdict says that it was in time."""
        if self.running:
            self._await(self._say(Leave(self._node, signal)))
            self.settled.wait(grace_s)

    def dismiss(self, *, at_once: bool = False) -> None:
        """The workers are about to be ended from here: their deaths are nobody's failures.

        at_once  they are ended now, whatever they are doing
        """
        self._await(self._hold_tongue())
        if at_once:
            self._loop.call_soon_threadsafe(self._workers.end_the_living)

    def end(self) -> None:
        """Every worker of the generation is dead."""
        self._await(self._end())

    def close(self) -> None:
        """Stop the control thread."""
        self._await(self._end())
        self._await(self._workers.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._log.close()
        self._scratch.cleanup()

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # the control thread

    def _judge(self, what: str) -> None:
        """The verdict where no controller gives one."""
        if self.verdict is None:
            line = f"{what}; nothing more can be saved from node {self._node}"
            self._obey(Verdict(0, "lost", -1, line, -1, 1, ""))

    def _judge_alone(self, message: FromAgent) -> None:
        """Hears what the controller would have heard, after it has left."""
        match message:
            case Died(rank=rank, status=status) if status != 0:
                self._judge(f"rank {rank} ended with status {status} after node 0 had finished")
            case Leave(signal=name):
                self._judge(f"ttprun was told to end by {name} after node 0 had finished")
            case Told(rank=rank, signal=name):
                self._judge(f"rank {rank} was told to end by {name} after node 0 had finished")
            case Raised(rank=rank, error=error):
                self._judge(f"rank {rank} raised {error} after node 0 had finished")

    async def _hold_tongue(self) -> None:
        self._rest(self._let_go)

    def _rest(self, up: Callable[[FromAgent], None]) -> None:
        """Nothing more is said to the controller, and if it is lost nobody minds."""
        self._up = up
        if self._way is not None:
            self._way.rest()

    def _let_go(self, message: FromAgent) -> None:
        """A worker that is to end waits to be a holder; nobody will ask for its state."""
        if isinstance(message, Raised | Told):
            self._obey(Addressed(message.rank, Exit(0)))

    async def _say(self, message: FromAgent) -> None:
        self._up(message)

    async def _watch(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        folder = stacks.folder(self._config.log_path, self._generation)
        self._workers.watch(processes, folder, Path(self._scratch.name))
        self._spawn(self._watch_boards())

    def _job_is_over(self) -> bool:
        hub = self._hub
        return not self._workers.alive and (hub is None or hub.controller.roster.everyone_is_dead)

    @property
    def _hub(self) -> Hub | None:
        """Where this agent has the controller."""
        return self._way.hub if self._way is not None else None

    def _obey(self, order: ControllerToAgent) -> None:
        match order:
            case Addressed(rank=rank, message=message):
                self._workers.order(rank, message)
            case Prepare() | Publish() | Find():
                self._spawn(self._answer(self._filing.do(order, self._generation)))
            case Dismissed():
                self._dismissed = True
                self._rest(self._judge_alone)
            case Verdict():
                self.verdict = order
                self._spawn(self._see_them_off())

    async def _answer(self, work: Coroutine[Any, Any, FromAgent]) -> None:
        self._up(await work)

    async def _see_them_off(self) -> None:
        """Wait for the workers to go; end those that do not."""
        await self._workers.ask_for_stacks()
        await self._until(lambda: not self._workers.alive, EXIT_GRACE_S)
        await self._workers.keep_stacks()
        self._workers.end_the_living()
        await self._until(self._job_is_over, FAREWELL_S)
        await self._settle()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = self._loop.time() + seconds
        while not done() and self._loop.time() < deadline:
            await asyncio.sleep(0.01)

    async def _settle(self) -> None:
        # After a time-out a thread may still be at work there, and nothing may be removed under it.
        try:
            hub = self._hub
            if not self._filing.busy and hub is not None and self.verdict is not None and self.verdict.save:
                await self._filing.clean(Path(self.verdict.save), hub.term, self._generation)
        except CheckpointError as error:
            print(f"[ttp] {error}", file=sys.stderr)
        finally:
            self.settled.set()  # whatever happened: torch's thread waits for it

    async def _watch_boards(self) -> None:
        last = 0
        stillness, still = Stillness(self._node, self._config.hang_s), False
        while self._workers.boards is not None:
            await asyncio.sleep(PROGRESS_S)
            boards = self._workers.read()
            said = stillness.look(boards, self._loop.time(), traced=self._workers.traced)
            if isinstance(said, Still) and not still and await self._workers.take_their_time():
                said = stillness.look(boards, self._loop.time(), traced=True)
            if said is not None:
                still = isinstance(said, Still)
                self._up(said)
            total = sum(board.progress for board in boards) + self._filing.moved
            if total != last:
                last = total
                self._up(Progress(self._node, total))

    async def _end(self) -> None:
        self._up = lambda message: None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._workers.end()
        way, self._way = self._way, None
        if way is not None:
            # Other nodes may still be at work in the folder; the next job's first rank cleans it, too.
            if way.hub is not None and way.alone and way.hub.controller.roster.save and not self._filing.busy:
                with contextlib.suppress(CheckpointError):
                    publish.clean(Path(way.hub.controller.roster.save))
            await way.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

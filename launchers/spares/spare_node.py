"""A node beyond the nodes of a job, which waits to take the place of a lost node.

The node has the flag `--ttp-spare`, or comes to a job of c10d that trains on all of its nodes. The spare node
finds the gate of node 0 (`spare_gate.py`) in the rendezvous store, and waits at the gate. Its
warm processes import what a worker of node 0 has imported, and become its workers when it takes a place
during training.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import select
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from adaptor import engines, output
from adaptor.config import Config
from adaptor.errors import ConfigError, StartError
from adaptor.launchers.agent.processes import WORKER
from adaptor.launchers.cli import flags
from adaptor.launchers.control import credentials
from adaptor.launchers.control.agent_connections import CONNECT_TIMEOUT_S, LOOPBACK, connect, try_connect
from adaptor.launchers.control.credentials import Invitation, Tls
from adaptor.launchers.spares.spare_pool import (
    Spare,
    command_of_spare,
    partial_imports,
    start_workers_by,
    workers_are_forks,
)
from adaptor.protocol import wire
from adaptor.protocol.environment import AGENT
from adaptor.protocol.spare_messages import (
    Gate,
    Import,
    MemberHello,
    NextGates,
    Ready,
    SpareAsked,
    SpareHello,
    SpareImports,
    SpareReady,
    SpareRefused,
    SpareReleased,
    TakePlace,
    ToSpareNode,
    to_spare_node,
)
from adaptor.protocol.wire import deadline

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


class WarmProcesses:
    """The processes of one spare node, with which its workers start as fast as a spare process.

    The main thread starts the processes: the kernel ends them with the thread that has started them. A new
    process replaces a process that has ended.

    Args:
        command: starts a worker.
        count: the number of workers of the node; 0: only cold processes.
    """

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._spares: list[Spare] = []
        with contextlib.suppress(OSError):  # no process, no descriptor, no memory: cold ones may start later
            for _ in range(count):  # there is no agent yet
                self._spares.append(Spare(command_of_spare(command), {**os.environ, AGENT: ""}))
        self._told = ""

    async def have_import(self, imports: Import) -> None:
        """Let all spares import `imports` at the same time, and wait. Later calls change nothing."""
        untold = [spare for spare in self._spares if not spare.told]
        await asyncio.gather(*(self._have_import(spare, imports) for spare in untold))

    async def _have_import(self, spare: Spare, imports: Import) -> None:
        ready = Ready()
        with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):  # the spare has ended
            ready = await spare.imports(imports)
        if ready.unfit and not self._told:
            self._told = ready.unfit
            without = (
                "this spare node has no spare processes: if it takes a place, its workers start from the"
                f" beginning, which takes longer: {ready.unfit}"
            )
            output.tell(f"[ttp] {partial_imports(ready) if spare.ready else without}")

    @contextlib.contextmanager
    def become_workers(self, *, joins: bool) -> Iterator[None]:
        """Let torch's agent use the spares for the workers that it starts meanwhile, or new processes without
        a spare.

        Args:
            joins: the workers join training workers, so each is a spare itself. Otherwise all workers of the
                job start, and those of this node are forks of one spare.
        """

        def start(
            handler: SubprocessHandler, command: Sequence[object], environment: dict[str, str]
        ) -> subprocess.Popen[bytes] | None:
            spare = next((spare for spare in self._spares if spare.ready and spare.is_of(command)), None)
            if spare is not None:
                self._spares.remove(spare)
                with contextlib.suppress(OSError):  # the spare has just ended
                    return spare.become(environment, handler._stdout, handler._stderr)
            return None

        forking = next((spare for spare in self._spares if spare.may_fork), None)
        try:
            with start_workers_by(start) if joins else workers_are_forks(forking):
                yield
        finally:
            self.end()

    def end(self) -> None:
        """End the remaining spares."""
        spares, self._spares = self._spares, []
        for spare in spares:
            spare.kill()


def of_spare_node(parsed: argparse.Namespace, settings: Config) -> WarmProcesses:
    """Start the processes of the spare node, on the main thread.

    Where workers may join training workers (TTP_ONLINE), each worker needs a process; otherwise all workers
    are forks of a single process.
    """
    from torch.distributed import run
    from torch.distributed.elastic.utils import macros

    # `config_from_args` sets OMP_NUM_THREADS as for workers, and makes a log folder unless one is given.
    parsed_copy = argparse.Namespace(**{**vars(parsed), "log_dir": os.devnull})
    config, entrypoint, arguments = run.config_from_args(parsed_copy)
    command = [str(entrypoint), *map(str, arguments)]
    # If ranks have different arguments or processors, a spare cannot become any rank.
    is_same = str(WORKER) in command and not any(macros.local_rank in word for word in command)
    is_bound = getattr(config, "numa_options", None) is not None
    count = min(settings.spares, 1) * (config.nproc_per_node if settings.online_s else 1)
    return WarmProcesses(command, count if is_same and not is_bound else 0)


FLAG = flags.SPARE
# The key of the gate in the rendezvous store, and the prefix of all keys.
PREFIX = "ttp/spare-nodes"
GATE = "gate"
# The first and the longest pause between two attempts to connect to the gate; the pause doubles, and is
# drawn at random: thousands of nodes may fail at the same time.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# The time for a node to take over from a silent node 0, which it may notice some seconds later than the spare
# (`wire`), and from the nodes that stood by before it (`failover`).
TURN_S = 12.0
# Seconds between two checks of the connection to the gate, while a spare node with a place has not come to
# the controller. Other nodes wait some seconds for spare nodes (`spare_gate.MOVES_S`).
CHECK_S = 0.5


class Taken(NamedTuple):
    """The place that the node has taken.

    Invariant: until its agent has connected to the controller, the node has the place as long as the
    connection to the gate lasts. At its end both sides forget the place, and the node is a spare node again.

    Attributes:
        place: the place
        connection: to the gate, silent from now on. Its end tells node 0 that the process has ended, also
            before the agent has connected to the controller. `Member` keeps the connection from then on.
        warm: the processes for its first workers
        gate: to which the connection leads
        gates: where spare nodes wait once the gate is lost
    """

    place: TakePlace
    connection: socket.socket
    warm: WarmProcesses
    gate: Gate
    gates: tuple[Gate, ...] = ()

    def require_gate(self, within_s: float = 0.0) -> float:
        """Check the connection to the gate, before the agent of this node has connected to the controller.

        Args:
            within_s: the seconds within which the connection may still end.

        Returns:
            The seconds until the next check.

        Raises:
            GateLostError: the connection has ended.
        """
        from adaptor.launchers.rendezvous.waiting import GateLostError

        if self.connection.fileno() >= 0:  # otherwise `Member` has connected again
            events = select.poll()
            events.register(self.connection, select.POLLIN)
            while events.poll(within_s * 1000):
                if _has_ended(self.connection):
                    raise GateLostError(
                        f"the node at {self.gate.address} is lost, which has given this node the place of"
                        f" node {self.place.node}: this node waits as a spare node again"
                    )
        return CHECK_S

    @property
    def address(self) -> str:
        """Return the address of this node for other nodes."""
        is_here = self.connection.family == socket.AF_UNIX
        return LOOPBACK if is_here else str(self.connection.getsockname()[0])


def require(parsed: argparse.Namespace, flags_given: Iterable[str], settings: Config) -> None:
    """Refuse `--ttp-spare` where a spare node could not take a place.

    Args:
        flags_given: the names of the given flags.

    Raises:
        ConfigError: a spare node could not take a place.
    """
    if not settings.enabled:
        raise ConfigError(f"{FLAG}: ENABLE_TTP is False, and only the adaptor has spare nodes")
    if not engines.find(settings.engine).has_own_agent:
        raise ConfigError(f"{FLAG}: with TTP_ENGINE={settings.engine} there are no spare nodes")
    if parsed.standalone or parsed.rdzv_backend != "static" or parsed.nnodes.strip() in ("1", "1:1"):
        raise ConfigError(
            f"{FLAG}: give the job's own --nnodes (2 or more), --master-addr and --master-port; with"
            " --rdzv-backend c10d any ttprun that is started later waits as a spare node, without this flag"
        )
    fewest, _, most_nodes = parsed.nnodes.partition(":")
    if most_nodes and fewest.strip() != most_nodes.strip():
        raise ConfigError(
            f"{FLAG}: --nnodes is {parsed.nnodes}, and spare nodes are for a fixed number: with"
            " --rdzv-backend c10d a node that is started later is taken in, without this flag"
        )
    if "node_rank" in flags_given:
        raise ConfigError(f"{FLAG} and --node-rank: a spare node has no place; leave one of them out")


def about_this_node(parsed: argparse.Namespace, facts: Mapping[str, str]) -> SpareHello:
    """Return the facts that a spare and the nodes of its job must share, before ttprun changes `parsed`.

    Args:
        facts: of the node, shared by all nodes of a job.
    """
    from torch.distributed import run

    arguments = tuple(parsed.training_script_args)
    further_facts = {
        "--nnodes": str(parsed.nnodes).strip(),
        "--nproc-per-node": str(run.determine_local_world_size(parsed.nproc_per_node)),
        "the script": Path(parsed.training_script).name,
        "--save": flags.script_option(arguments, "--save") or "",
    }
    return SpareHello({**facts, **further_facts}, arguments, socket.gethostname(), os.getpid())


class GatesLostError(StartError):
    """The gate of the spare node is lost, and no other gate takes its place."""


def wait(
    parsed: argparse.Namespace,
    settings: Config,
    own_hello: SpareHello,
    look: Callable[[], None],
    gate: Gate | None = None,
    lost: Taken | None = None,
) -> Taken | SpareReleased:
    """Wait for a place, or until the job ends.

    The returned connection has to stay open for the life of the process.

    Args:
        own_hello: the facts that node 0 compares.
        look: as in `Registry`.
        gate: where to wait; None: the store of the flags names the gate.
        lost: a place that this node has lost with its gate; None: it had none.

    Raises:
        MovedError: the job has gone on elsewhere, or (with `gate`) this node meets the others.
        StoreLostError: (with `gate`) node 0 is lost.
        ConfigError: node 0 refuses the spare.
        StartError: node 0 is lost, or cannot be reached.
        Interrupted: a signal came first.
    """
    from torch.distributed.elastic.rendezvous import utils

    from adaptor.launchers.rendezvous.waiting import MEETS, MovedError, StoreLostError, wait_for

    warm = lost.warm if lost is not None else of_spare_node(parsed, settings)
    gates = (lost.gate, *lost.gates) if lost is not None else ()

    def wait_at(gate: Gate) -> Taken | SpareReleased:
        return wait_for(
            lambda: asyncio.run(wait_at_gate(gate, settings, own_hello, warm, gates)),
            lambda: "a place in the job, as a spare node",
            quiet=True,
        )

    if gate is not None:
        try:
            taken = wait_at(gate)
        except StartError as error:
            warm.end()
            raise (StoreLostError if isinstance(error, GatesLostError) else MovedError)(str(error)) from None
        if isinstance(taken, SpareReleased) and taken.meets:
            warm.end()
            raise MovedError(MEETS)
        return taken
    if lost is not None:
        return wait_at(lost.gate)
    host, port = utils.parse_rendezvous_endpoint(flags.rendezvous_of(parsed), -1)
    gate_place = awaited = f"node 0 at {host}:{port}, as a spare node"

    def note(text: str) -> None:
        nonlocal awaited
        awaited = f"{gate_place} ({text})" if text else gate_place

    try:
        gate = wait_for(lambda: _find_gate(host, port, str(parsed.rdzv_id), note), lambda: awaited, look=look)
    except MovedError:
        warm.end()
        raise
    return wait_at(gate)


def _find_gate(host: str, port: int, run_id: str, note: Callable[[str], None]) -> Gate:
    """Return the gate; node 0 may start at any time after the spare."""
    from torch.distributed import PrefixStore, TCPStore

    from adaptor.launchers.rendezvous import rendezvous_store

    while True:
        rendezvous_store.wait_until_it_answers(host, port, float("inf"), note)
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, multi_tenant=True)
            keys = PrefixStore(f"{run_id}/{PREFIX}", store)
            while not keys.check([GATE]):
                time.sleep(rendezvous_store.TRY_S)
            return msgspec.json.decode(bytes(keys.get(GATE)), type=Gate)
        except RuntimeError:  # node 0 has ended before it opened its gate; it may start again
            time.sleep(rendezvous_store.TRY_S)


async def stay_at_gate(
    gate_invitation: Invitation, host: str, tls: Tls | None, me: MemberHello
) -> socket.socket | None:
    """Connect a node of the job to the gate; return the connection, which ends with the process.

    Args:
        me: the message to node 0.

    Returns:
        None if the gate cannot be reached; the job trains nevertheless.
    """
    reached = await try_connect(*gate_invitation.address(host), gate_invitation.secret, tls)
    if reached is None:
        return None
    reader, writer = reached
    try:
        writer.write(wire.frame(me))
        async with deadline(CONNECT_TIMEOUT_S):
            await wire.read(reader, to_spare_node)  # accepted
        connection: socket.socket = writer.get_extra_info("socket").dup()
    except (EOFError, OSError, msgspec.DecodeError, asyncio.TimeoutError):
        return None
    finally:
        writer.transport.abort()  # the connection ends with its last descriptor
    return connection


class Member:
    """A node of the job at the gate, for the life of its process; connects again after a lost connection.

    All methods but `close` run in an event loop; after the loop has broken off, the connection stays.

    Args:
        come: makes a connection, as `stay_at_gate`.
        connection: of a spare node that has taken a place; None: not connected yet.
    """

    def __init__(
        self, come: Callable[[], Awaitable[socket.socket | None]], connection: socket.socket | None = None
    ) -> None:
        self._come = come
        self._connection = connection
        self._coming: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Connect to the gate; after a failure, try again while the job trains.

        The connection of a spare node that has taken a place is replaced: on the new connection the node says
        where its own gate is.
        """
        connection, first = await self._come(), self._connection
        if connection is not None and first is not None:
            first.close()
        self._watch(connection or first)

    async def end(self) -> None:
        """Stop connecting."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait([self._coming])
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection)

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()

    def _watch(self, connection: socket.socket | None) -> None:
        self._connection = connection
        loop = asyncio.get_running_loop()
        if connection is not None:
            loop.add_reader(connection, self._look, connection)
        else:
            self._coming = loop.create_task(self._come_again())

    def _look(self, connection: socket.socket) -> None:
        """Connect again if the connection has ended."""
        if _has_ended(connection):
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()
            self._watch(None)

    async def _come_again(self) -> None:
        pause = FIRST_PAUSE_S
        while (connection := await self._come()) is None:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._watch(connection)


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other side has ended a silent connection; other data is a message of TLS itself."""
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def wait_at_gate(
    gate: Gate,
    settings: Config,
    own_hello: SpareHello,
    warm: WarmProcesses,
    gates: tuple[Gate, ...] = (),
) -> Taken | SpareReleased:
    """Wait at `gate` while `warm` imports; for the rest see `wait`.

    After the loss of node 0 the spare waits at the gate of the node that has taken the controller over.

    Args:
        gates: where to wait if `gate` is lost already; (): it is not.
    """
    context = credentials.load(settings)
    early: list[ToSpareNode] = []  # the first message of a next gate, read before
    if gates:
        gate, reader, writer, message = await _come_to_next_gate(gate, gates, settings, context, own_hello)
        early.append(message)
    else:
        invitation = Invitation.decode(gate.invitation.encode(), credentials.kind_of(settings))
        reader, writer = await connect(*invitation.address(gate.address), invitation.secret, context)
        writer.write(wire.frame(own_hello))
    imports: list[asyncio.Task[None]] = []
    # The known `gates` stay known at the next gate, to which other nodes may not have come yet.
    while True:
        try:
            while True:
                match early.pop() if early else await wire.read(reader, to_spare_node, wire.SLOW_S):
                    case SpareRefused(reason=reason):
                        raise ConfigError(f"{FLAG}: node 0 refuses this spare node: {reason}")
                    case SpareImports(what=what):
                        imports.append(asyncio.ensure_future(warm.have_import(what)))
                    case NextGates(gates=newest):
                        gates = (*newest, *(gate for gate in gates if gate not in newest))
                    case SpareAsked():
                        writer.write(wire.frame(SpareReady()))
                    case TakePlace() as place:
                        output.tell(f"[ttp] this spare node takes the place of node {place.node}")
                        # Past the streams, which end with the event loop: no goodbye of TLS.
                        taken = Taken(place, writer.get_extra_info("socket").dup(), warm, gate, gates)
                        writer.transport.abort()
                        return taken
                    case SpareReleased() as released:
                        return released
                    case _:  # accepted
                        output.tell(
                            f"[ttp] this node is a spare: it waits at {gate.address} for a node to be lost"
                        )
        except (EOFError, OSError, msgspec.DecodeError):
            pass
        finally:
            writer.close()
        gate, reader, writer, message = await _come_to_next_gate(gate, gates, settings, context, own_hello)
        early.append(message)


# A gate, the connection to it, and its first message.
_AtGate = tuple[Gate, asyncio.StreamReader, asyncio.StreamWriter, ToSpareNode]


async def _come_to_next_gate(
    lost: Gate, gates: Sequence[Gate], settings: Config, context: Tls | None, own_hello: SpareHello
) -> _AtGate:
    """Go to the gate, among `gates`, that serves spares: all are tried at once.

    Raises:
        GatesLostError: no gate serves spares: their nodes are lost, too, or have no controller.
    """
    attempts = [asyncio.ensure_future(_try_gate(gate, settings, context, own_hello)) for gate in gates]
    next_gate: _AtGate | None = None
    try:
        for finished in asyncio.as_completed(attempts):
            if (next_gate := await finished) is not None:
                break
    finally:
        for attempt in attempts:
            attempt.cancel()
        for reached in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(reached, tuple) and reached is not next_gate:
                _, _, writer, _ = reached
                writer.close()
    if next_gate is None:
        raise GatesLostError(
            f"node 0 at {lost.address} is gone, and no other node has taken the job over: this spare"
            " node ends"
        )
    return next_gate


async def _try_gate(
    gate: Gate, settings: Config, context: Tls | None, own_hello: SpareHello
) -> _AtGate | None:
    gate_invitation = Invitation.decode(gate.invitation.encode(), credentials.kind_of(settings))
    reached = await try_connect(*gate_invitation.address(gate.address), gate_invitation.secret, context)
    if reached is None:
        return None
    reader, writer = reached
    try:
        writer.write(wire.frame(own_hello))
        async with deadline(TURN_S):
            return gate, reader, writer, await wire.read(reader, to_spare_node)
    except (EOFError, OSError, msgspec.DecodeError, asyncio.TimeoutError):
        writer.close()
    except BaseException:
        writer.close()
        raise
    return None

"""The agent of a node as torch elastic's agent sees it, on the main thread.

A generation is the time from one start of all workers to the next; `begin`, `meet` and `watch` open a
generation, `end` closes it. The only file system object of an agent is a scratch folder, for multiprocessing
files of workers that may be killed. `AgentControl` makes the decisions, on the control thread.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed import Store

from adaptor import hooks, output
from adaptor.config import Config
from adaptor.controller.failover import stands_by
from adaptor.controller.verdict import Recurrence
from adaptor.errors import StartError
from adaptor.hooks import AgentHooks
from adaptor.launchers.agent import control_thread
from adaptor.launchers.agent.agent_control import AgentControl
from adaptor.launchers.agent.control_thread import ControlThreadError
from adaptor.launchers.agent.host_copies import CopyFiles, CopyKeeper
from adaptor.launchers.agent.worker_processes import DrillListener
from adaptor.launchers.control import credentials
from adaptor.launchers.control.controller_client import ControllerClient
from adaptor.launchers.control.credentials import Invitation
from adaptor.launchers.records.log import Log
from adaptor.launchers.rendezvous.waiting import ask, wait_for
from adaptor.launchers.spares import spare_node
from adaptor.launchers.spares.places import Places
from adaptor.launchers.spares.replacements import Starter
from adaptor.launchers.spares.spare_gate import (
    MOVES_S,
    NO_STARTS,
    SpareGate,
    StartCounts,
    await_owners,
    fill_for_restart,
)
from adaptor.launchers.spares.spare_node import Taken
from adaptor.protocol.environment import (
    AGENT,
    BOARD,
    BOARD_RANKS,
    COPY_FILES,
    GENERATION,
    IS_RESTART,
    LAST_INCIDENT,
    NEWCOMER,
    NODES,
    NODES_BEFORE,
    ONLY_COPIES,
    SCRATCH,
)
from adaptor.protocol.messages import AgentHello, AgentTerminationRequested, Endpoint, NodesWaiting
from adaptor.protocol.records import DrillAnswer, DrillRequest, name_of
from adaptor.protocol.spare_messages import Gate, MemberHello, SpareHello

# The key of a node's keeper of host copies in the rendezvous store.
_KEEPER = "ttp/copies/{}"


class Node:
    """The agent of a node.

    Args:
        job: the job id given by the user; '' without one.
        nodes: MIN:MAX, where the number of nodes may change between two starts; '' for a fixed number.
        open_store: as in `ControllerClient`.
        parts: the hooks of optional parts.

    Attributes:
        control: the work of the agent on its control thread.
        only_writes_copies: the next workers write the copies in host memory, and do not train.
    """

    def __init__(
        self,
        config: Config,
        job: str = "",
        max_restarts: int = 0,
        nodes: str = "",
        open_store: Callable[[str], Endpoint | None] = lambda address: None,
        parts: Sequence[AgentHooks] = (),
    ) -> None:
        self._config = config
        self._open_store = open_store
        self._nodes = nodes
        self._nodes_before = 0
        self._tls = credentials.load(config)
        self._scratch = tempfile.TemporaryDirectory(prefix="ttp-", ignore_cleanup_errors=True)
        self._log = Log(config)
        self._recurrence = Recurrence(config.no_progress)
        self._copies = CopyFiles()
        self._at_gate: spare_node.Member | None = None
        self._is_told_to_end = False
        self.only_writes_copies = False
        self.control = AgentControl(config, job, max_restarts, Path(self._scratch.name), self._copies, parts)
        self.control.thread.start()
        self.control.thread.wait_for(self.control.workers.serve())
        self._drills = DrillListener(self._drill)
        if config.allow_drill:
            self.control.thread.wait_for(self._drills.listen())

    def begin(
        self,
        ranks: Sequence[int],
        node: int,
        nodes: int,
        world_size: int,
        store: Store,
        host: str,
        *,
        may_restart: bool = True,
        has_met_before: bool = False,
        counts: StartCounts = NO_STARTS,
        taken: Taken | None = None,
        own_store: Endpoint | None = None,
    ) -> None:
        """Prepare a generation before its workers start.

        Make the boards, run the controller or connect to the controller, and set the workers' environment.

        Args:
            store: the rendezvous store of all agents, with keys of this generation alone.
            host: the address of node rank 0.
            may_restart: whether a restart remains; without one only a spare replaces a rank.
            has_met_before: whether the job had workers on other nodes before this node joined.
            counts: the starts so far, including this start.
            taken: the place of a spare node whose workers join training workers.
            own_store: the rendezvous store of a spare node in the place of node 0.
        """
        control, place = self.control, taken.place if taken is not None else None
        self._store = store
        os.environ[LAST_INCIDENT] = _for_environment(control.verdict.line) if control.verdict else ""
        control.begin(ranks, node, nodes, may_restart=may_restart, counts=counts, joins=place is not None)
        self._set_environment(ranks)
        os.environ.pop(NEWCOMER, None)  # of a place that was lost
        if place is not None:
            os.environ[NEWCOMER] = str(place.incident)
        if self._nodes:
            os.environ[NODES], os.environ[NODES_BEFORE] = self._nodes, str(self._nodes_before)
            self._nodes_before = nodes
        client = ControllerClient(
            node=node,
            nodes=nodes,
            world_size=world_size,
            config=self._config,
            tls=self._tls,
            report=control.records.report,
            online_s=self._config.online_s,
            obey=control.obey,
            on_controller_unreachable=lambda: control.judge("the controller's node is lost"),
            recurrence=self._recurrence,
            open_store=self._take_over,
            term=place.term if place is not None else 0,
        )
        control.connect(client)
        wait = control.thread.wait_for
        if taken is not None:
            own_invitation = self._join_training(client, taken, tuple(ranks), own_store)
        elif node == 0:
            for hook in control.hooks:
                hook.has_controller(control.records.files.folder, took_over=False)
            own_invitation = wait(
                client.host(
                    host,
                    restart=has_met_before or control.generations_begun > 1,
                    job=control.records.files.job,
                )
            )
            if nodes > 1:
                store.set(credentials.KEY, own_invitation.encode().decode())
            wait(control.say(AgentHello(node, tuple(ranks), host=socket.gethostname(), pid=os.getpid())))
        else:
            awaited_place = f"the controller, on node 0 of {nodes} at {host}"
            invitation_bytes: bytes = ask(store, lambda: store.get(credentials.KEY), lambda: awaited_place)
            join = client.join(host, invitation_bytes, tuple(ranks))
            own_invitation = wait_for(lambda: wait(join), lambda: awaited_place)
        if node or place is not None:  # after a take-over this node writes to the same folder
            control.records.files.job = name_of(own_invitation.job)
        if self._config.host_copy != 0 and nodes > 1:
            self._keep_copies(client, node, nodes)
        control.generation = os.environ[GENERATION] = own_invitation.generation
        os.environ[IS_RESTART] = str(int(own_invitation.restart))

    def _join_training(
        self, client: ControllerClient, taken: Taken, ranks: tuple[int, ...], own_store: Endpoint | None
    ) -> Invitation:
        """Connect a spare node to the controller of the training workers.

        Raises:
            GateLostError: the gate of the controller is lost.
            StartError: the controller does not answer, or was lost before it knew this node.
        """
        place, controller = taken.place, taken.place.controller
        assert controller is not None
        encoded = controller.invitation.encode()
        # Before `join`: the controller may send an order first.
        self.control.generation = Invitation.decode(encoded, credentials.kind_of(self._config)).generation
        join = client.join(controller.address, encoded, ranks, place.owner, own_store)
        wait = self.control.thread.wait_for
        awaited_place = f"the controller, at {controller.address}"
        invitation = wait_for(lambda: wait(join), lambda: awaited_place, look=taken.require_gate)
        self.meet()
        if self.control.verdict is not None and client.succession.verdict is None:
            raise StartError(f"{awaited_place}, was lost before it knew this node")
        return invitation

    def _keep_copies(self, client: ControllerClient, node: int, nodes: int) -> None:
        """Keep host copies of the previous node, and give those of this node to the next node."""
        keeper = self.control.keeper = CopyKeeper(node, self._copies, self._config, self._tls)
        self._own_keeper = keeper.listen(client.secret, client.address)
        self._store.set(_KEEPER.format(node), self._own_keeper)
        next_node = (node + 1) % nodes

        def find() -> str:
            return self._store.get(_KEEPER.format(next_node)).decode("utf-8", "replace")

        keeper.give(find)

    def move(self, store: Store) -> None:
        """Use another rendezvous store in this generation: a spare node has the place of node 0.

        Args:
            store: with keys of this generation alone.
        """
        self._store = store
        if self.control.keeper is not None:
            store.set(_KEEPER.format(self.control.node), self._own_keeper)

    def _set_environment(self, ranks: Sequence[int]) -> None:
        """Make the boards of `ranks`, and put all paths into the workers' environment."""
        boards = self.control.workers.begin(ranks)
        os.environ[AGENT] = self.control.workers.address
        os.environ[BOARD] = boards.path
        os.environ[BOARD_RANKS] = boards.slots
        os.environ[SCRATCH] = self._scratch.name
        os.environ[ONLY_COPIES] = str(int(self.only_writes_copies))
        os.environ[COPY_FILES] = self._copies.begin(ranks if self._config.host_copy != 0 else ())
        with contextlib.suppress(OSError):  # a cleaner may have removed the folder; workers can do without
            Path(self._scratch.name).mkdir(mode=0o700, exist_ok=True)
        os.environ.update(self.control.lease.environment())

    def _take_over(self, address: str) -> Endpoint | None:
        """Prepare to run the controller in the place of node 0; called on the control thread.

        Args:
            address: of this node.

        Returns:
            The new rendezvous store; None if no store was lost, or none can be opened.
        """
        store, client = self._open_store(address), self.control.client
        if self.control.gate is not None and client is not None:
            self.control.gate.begin_turn(store if 0 in client.succession.lost_homes else None)
        return store

    def open_gate(self, common: SpareHello, host: str) -> Gate:
        """Open the gate for spare nodes, unless it is open.

        Args:
            common: the facts that spare nodes must share with this node.
            host: the address of this node.
        """
        if self.control.gate is None:
            kind, lose_absent = credentials.kind_of(self._config), self.control.lose_absent
            gate = self.control.gate = SpareGate(kind, self._config.port, self._tls, common, lose_absent)
            self._gate = self.control.thread.wait_for(gate.open(host))
        gate, client = self.control.gate, self.control.client

        def turn() -> None:
            if client is not None and client.controller_host is not None:
                gate.begin_turn()
            else:
                gate.end_turn()

        self.control.thread.loop.call_soon_threadsafe(turn)
        return Gate(host, self._gate.encode().decode())

    def come_to_gate(
        self, places: Places, common: SpareHello, host: str, ranks: tuple[int, ...], taken: Taken | None
    ) -> None:
        """Open a gate at the controller and on nodes that stand by; connect the others to the controller's.

        Args:
            places: tell other nodes of the gate of the node with the controller.
            common: as in `open_gate`.
            host: the address of node 0.
            ranks: of this node.
            taken: as in `stay_at_gate`.
        """
        node, own_gate, client = self.control.node, None, self.control.client
        assert client is not None
        if taken is not None and (save := common.facts["--save"]):
            self.control.expect_saves(save)
        if client.controller_host is not None:
            address = client.address if node else host
            places.announce(self.open_gate(common, address), client.succession.term)
            return
        if stands_by(node):
            own_gate = self.open_gate(common, client.address)
        gate = taken.gate if taken is not None else places.gate(client.succession.term)
        if gate is not None:
            self.stay_at_gate(gate, node, ranks, taken, own_gate)

    def release_spares(self, places: Places, lost: Sequence[int]) -> None:
        """Have as many spare nodes meet the others as places are empty; each node gets a new number.

        Args:
            places: of the generation that ends.
            lost: the nodes named by the verdict.
        """
        gate, host = self.control.gate, self.control.controller_host
        if gate is None:
            return
        empty_count = 0
        if host is not None:
            members = host.controller.membership
            self.control.thread.wait_for(await_owners(members, host.until))
            empty_count = len(set(lost) - members.expected.keys())
        if empty_count:
            places.close_gate()
        self.control.thread.loop.call_soon_threadsafe(gate.release, empty_count)

    def leave_gate(self) -> None:
        """Leave the gate of a job that takes further nodes in by a restart; spare nodes meet the others."""
        gate, self.control.gate = self.control.gate, None
        if gate is not None:
            self.control.thread.wait_for(gate.close(meets=True))
        at_gate, self._at_gate = self._at_gate, None
        if at_gate is not None:
            self.control.thread.wait_for(at_gate.end())
            at_gate.close()

    def stay_at_gate(
        self,
        gate: Gate,
        node: int,
        ranks: tuple[int, ...],
        taken: Taken | None = None,
        own_gate: Gate | None = None,
    ) -> None:
        """Keep a connection to the controller's gate while this process lives: without it the node is lost.

        Args:
            taken: the place that this spare node has taken, with its connection; None for other nodes.
            own_gate: the gate of this node; None: it has none.
        """
        if self._at_gate is not None:  # of a lost node 0
            self.control.thread.wait_for(self._at_gate.end())
            self._at_gate.close()
        gate_invitation = Invitation.decode(gate.invitation.encode(), credentials.kind_of(self._config))
        owner = taken.place.owner if taken is not None else ""
        me = MemberHello(node, ranks, socket.gethostname(), os.getpid(), owner, own_gate)
        self._at_gate = spare_node.Member(
            lambda: spare_node.stay_at_gate(gate_invitation, gate.address, self._tls, me),
            taken.connection if taken is not None else None,
        )
        self.control.thread.wait_for(self._at_gate.begin())

    def fill(
        self,
        lost: Sequence[int],
        counts: StartCounts,
        store: Endpoint | None = None,
        refuses: Callable[[], Awaitable[str]] | None = None,
    ) -> dict[int, str]:
        """Give the places of lost nodes to spare nodes for a restart, as `fill_for_restart`.

        Args:
            store: the new rendezvous store; None: the store stays.
            refuses: as in `SpareGate.fill`.
        """
        host = self.control.controller_host
        assert self.control.gate is not None
        self.control.gate.store = store or self.control.gate.store
        assert host is not None
        members = host.controller.membership
        work = fill_for_restart(self.control.gate, members, lost, counts, host.until, refuses)
        return self.control.thread.wait_for(work)

    def has_spares(self, count: int) -> bool:
        """Wait for `count` spare nodes, which have lost node 0; return whether they wait here."""
        gate = self.control.gate
        if gate is None:
            return False
        self.control.thread.wait_for(gate.await_spares(count, MOVES_S))
        return gate.waiting >= count

    def meet(self) -> None:
        """Wait for the addresses of the standby nodes."""
        assert self.control.client is not None
        self.control.thread.wait_for(self.control.client.meet())

    def watch(self, processes: Mapping[int, subprocess.Popen[bytes]], starter: Starter) -> None:
        """Watch the started workers.

        Args:
            processes: by rank.
            starter: starts replacements.
        """
        os.environ.pop(NEWCOMER, None)  # the newcomers have been started
        self.control.thread.wait_for(self.control.watch(processes, starter))

    @property
    def is_needed(self) -> bool:
        """Return whether workers of the node are alive, or an incident needs the agent.

        An agent may run the controller, or publish files of other nodes' workers.
        """
        return self.control.workers.running or self.control.incident_is_open

    @property
    def save_folder(self) -> str:
        """Return the save folder; '' if unknown, or known only to another node."""
        host = self.control.controller_host
        return host.controller.membership.save_folder if host is not None else ""

    @property
    def over(self) -> bool:
        """Return True if every worker of the job has ended; a failure before may restart all workers.

        The controller decides, not the processes: a dead worker may still get a verdict.
        """
        host = self.control.controller_host
        return self.control.dismissed or (host is not None and host.dismissed)

    def fits(self, nodes: int) -> bool | None:
        """Return whether the job could train on the number of nodes; None before training begins.

        Asked on node 0, which runs the controller.
        """
        host = self.control.controller_host
        if host is None or not (self.control.news.training_began or host.controller.membership.unprotected):
            return None
        return host.controller.membership.fits(nodes)

    def ask_for_nodes(self, count: int) -> None:
        """Ask for a save, after which a verdict restarts all workers with the nodes that wait."""
        with contextlib.suppress(ControlThreadError):
            self.control.thread.wait_for(self.control.say(NodesWaiting(self.control.node, count)))

    def leave(self, signal: str, grace_s: float) -> None:
        """Have the job saved because this agent was told to end; a verdict confirms the save.

        Args:
            signal: the name of the signal.
            grace_s: seconds to wait for the verdict.
        """
        until = time.monotonic() + grace_s
        self._is_told_to_end = True
        hooks.each(self.control.hooks, lambda hook: hook.leave(grace_s))
        if self.is_needed:
            with contextlib.suppress(ControlThreadError):
                request = AgentTerminationRequested(self.control.node, signal)
                self.control.thread.wait_for(self.control.say(request), grace_s)
            self.control.lease.mark_leaving()
            self.control.reaped.wait(max(0.0, until - time.monotonic()))

    def _drill(self, request: DrillRequest) -> DrillAnswer:
        """End a rank on purpose (`ttp drill`), or refuse; on the control thread."""
        control, rank = self.control, -1 if request.rank is None else request.rank
        host = control.controller_host
        if host is None or request.job != control.records.files.job:
            return DrillAnswer(rank, "this ttprun does not run the controller of the job any more")
        members = host.controller.membership
        if request.rank is None and members.alive:
            rank = random.choice(list(members.alive))
        refusal = control.why_not_drill(members) or host.drill(rank, control.workers.newest_step())
        if not refusal:
            output.tell(f"[ttp] drill: rank {rank} is ended on purpose (ttp drill)")
        return DrillAnswer(rank, refusal)

    def record_next_action(self, action: str) -> None:
        """Add the action after the verdict to the report of the last incident."""
        report = self.control.records.report
        with contextlib.suppress(RuntimeError):  # the control thread has ended
            self.control.thread.loop.call_soon_threadsafe(report.record_next_action, action)

    def dismiss(self, *, at_once: bool = False) -> None:
        """Stop reporting: the agent is about to end its workers, and their deaths are no failures.

        A control thread that hangs is not waited for, so that the process can end.

        Args:
            at_once: kill the workers now.
        """
        with contextlib.suppress(ControlThreadError):
            self.control.thread.wait_for(self.control.stop_reporting(), self._patience_s)
        if at_once:
            self.control.workers.end_the_living()

    @property
    def _patience_s(self) -> float:
        """Return the seconds after which a silent control thread counts as hanging."""
        return control_thread.HANGS_AT_END_S if self._is_told_to_end else control_thread.HANGS_S

    def end(self, *, is_last: bool = True) -> None:
        """Close the generation: every worker is dead.

        Args:
            is_last: there is no next generation, for which a spare may wait.
        """
        if self.control.verdict is not None:  # what is removed must not be what others have begun to write
            self.control.settled.wait()
        with contextlib.suppress(ControlThreadError):
            self.control.thread.wait_for(self.control.end(is_last=is_last))
        keeper, self.control.keeper = self.control.keeper, None
        if keeper is not None:
            keeper.close()

    def close(self) -> bool:
        """Stop the control thread; return whether the thread had ended by itself, or hangs.

        A hanging thread is left behind, so the process must exit without waiting for its threads.
        """
        thread = self.control.thread
        has_broken_off, hangs = thread.has_broken_off, thread.hangs(self._patience_s)
        if not hangs:
            self.end()
            with contextlib.suppress(ControlThreadError):
                if self.control.gate is not None:
                    verdict = self.control.verdict
                    failed = verdict is not None and verdict.exit_code != 0
                    thread.wait_for(self.control.gate.close(failed=failed))
                if self._at_gate is not None:
                    thread.wait_for(self._at_gate.end())
                thread.wait_for(self._drills.close())
                thread.wait_for(self.control.workers.close())
            thread.stop()
        if self._at_gate is not None:
            self._at_gate.close()
        self.control.close()
        self._log.close()
        self._copies.close()
        self._scratch.cleanup()
        return has_broken_off or hangs


def _for_environment(line: str) -> str:
    """Return `line` as a valid environment variable: without NUL, in the encoding of the locale."""
    coding = sys.getfilesystemencoding()
    return line.replace("\0", " ").encode(coding, "backslashreplace").decode(coding)

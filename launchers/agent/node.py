"""The agent of a node as torch elastic's agent sees it, on the main thread.

A generation is the time from one start of all workers to the next; `begin`, `meet` and `watch` open it, `end`
closes it. In a file system it makes only a scratch folder, for the files of multiprocessing in workers that
may be killed. What is decided on this node is decided on the control thread (`AgentControl`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from adaptor import output, text
from adaptor.config import Config
from adaptor.controller.verdict import Recurrence
from adaptor.errors import AdaptorError, ConfigError
from adaptor.launchers.agent import control_thread
from adaptor.launchers.agent.agent_control import AgentControl
from adaptor.launchers.agent.control_thread import ControlThreadError
from adaptor.launchers.agent.copy_files import CopyFiles
from adaptor.launchers.agent.copy_keeper import CopyKeeper
from adaptor.launchers.agent.start_counts import NO_STARTS, StartCounts
from adaptor.launchers.control import invitation, tls
from adaptor.launchers.control.controller_client import ControllerClient
from adaptor.launchers.control.invitation import Invitation
from adaptor.launchers.records.log import Log
from adaptor.launchers.rendezvous.waiting import wait_for
from adaptor.launchers.spares import spare_node
from adaptor.launchers.spares.replacements import WorkerStarter
from adaptor.launchers.spares.slot_filling import fill_for_restart
from adaptor.launchers.spares.spare_gate import SpareGate
from adaptor.launchers.spares.spare_node import Taken
from adaptor.operations.job_folder import name_of
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
from adaptor.protocol.messages import (
    AgentHello,
    AgentTerminationRequested,
    NodesWaiting,
    Recovered,
    Verdict,
)
from adaptor.protocol.spare_node_messages import MemberHello, SpareHello, TakePlace

# Where the keeper of host copies of a node is found in the rendezvous store.
_KEEPER = "ttp/copies/{}"


class RendezvousStore(Protocol):
    """The store over which the agents of a generation have met, of torch elastic."""

    def get(self, key: str) -> bytes: ...

    def set(self, key: str, value: bytes) -> None:
        """Let other nodes find `value` under `key`."""


class Node:
    """The agent of a node.

    Args:
        config: the settings.
        job: the id that the user gave to the job; '' where there is none.
        max_restarts: how many restarts the job may make.
        nodes: MIN:MAX, where the number of nodes may change between two starts; '' where it is fixed.

    Attributes:
        control: what its control thread does.
        only_writes_copies: the next workers write the copies in host memory, and do not train.
    """

    def __init__(self, config: Config, job: str = "", max_restarts: int = 0, nodes: str = "") -> None:
        self._config = config
        self._nodes = nodes
        self._nodes_before = 0
        self._tls = tls.load(config)
        self._scratch = tempfile.TemporaryDirectory(prefix="ttp-", ignore_cleanup_errors=True)
        self._log = Log(config)
        self._recurrence = Recurrence(config.no_progress)
        self._copies = CopyFiles()
        self._at_gate: spare_node.Member | None = None
        self._is_told_to_end = False
        self.only_writes_copies = False
        self.control = AgentControl(config, job, max_restarts, Path(self._scratch.name), self._copies)
        self.control.thread.start()
        self.control.thread.wait_for(self.control.workers.serve())

    def begin(
        self,
        ranks: Sequence[int],
        node: int,
        nodes: int,
        world_size: int,
        store: RendezvousStore,
        host: str,
        *,
        may_restart: bool = True,
        has_met_before: bool = False,
        counts: StartCounts = NO_STARTS,
        place: TakePlace | None = None,
    ) -> None:
        """Prepare a generation before its workers start.

        Make their boards, run the controller or connect to it, and set their environment.

        Args:
            ranks: of this node.
            node: the rank of this node.
            nodes, world_size: the numbers of nodes and ranks of the job.
            store: the rendezvous store, which all agents share, with keys of this generation alone.
            host: the address of node rank 0.
            may_restart: whether all may be started again after this; if not, only a spare replaces a rank.
            has_met_before: whether the job had workers on other nodes before this one came.
            counts: of the starts so far, with this one.
            place: of a spare node whose workers join others that train.
        """
        control = self.control
        os.environ[LAST_INCIDENT] = _for_environment(control.verdict.line) if control.verdict else ""
        control.begin(ranks, node, nodes, may_restart=may_restart, counts=counts, joins=place is not None)
        self._set_environment(ranks)
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
        )
        control.connect(client)
        wait = control.thread.wait_for
        if node == 0:
            self._serve()
            own_invitation: Invitation = wait(
                client.host(
                    host,
                    restart=has_met_before or control.generations_begun > 1,
                    job=control.records.files.job,
                )
            )
            if nodes > 1:
                store.set(invitation.KEY, own_invitation.encode())
            wait(control.say(AgentHello(node, tuple(ranks), host=socket.gethostname(), pid=os.getpid())))
        else:
            awaited_place = f"the controller, on node 0 of {nodes} at {host}"
            invitation_bytes: bytes = wait_for(lambda: store.get(invitation.KEY), lambda: awaited_place)
            # Before an order can come, which to a spare node may be the first thing that the controller says.
            control.generation = Invitation.decode(
                invitation_bytes, invitation.kind_of(self._config)
            ).generation
            join = client.join(host, invitation_bytes, tuple(ranks), place.owner if place is not None else "")
            own_invitation = wait_for(lambda: wait(join), lambda: awaited_place)
            control.records.files.job = name_of(
                own_invitation.job
            )  # after a take-over this node writes to the same folder
        if self._config.host_copy and nodes > 1:
            self._keep_copies(client, node, nodes, store)
        control.generation = os.environ[GENERATION] = own_invitation.generation
        os.environ[IS_RESTART] = str(int(own_invitation.restart))

    def _keep_copies(self, client: ControllerClient, node: int, nodes: int, store: RendezvousStore) -> None:
        """Keep host copies of the node before, and give those of this node to the next one."""
        keeper = self.control.keeper = CopyKeeper(node, self._copies, self._config, self._tls)
        store.set(_KEEPER.format(node), keeper.listen(client.secret, client.address).encode())
        next_node = (node + 1) % nodes

        def find() -> str:
            return store.get(_KEEPER.format(next_node)).decode("utf-8", "replace")

        keeper.give(wait_for(find, lambda: f"node {next_node}, which keeps copies of this one"), find)

    def _set_environment(self, ranks: Sequence[int]) -> None:
        """Make the boards of `ranks`, and tell their workers where all is."""
        boards = self.control.workers.begin(ranks)
        os.environ[AGENT] = self.control.workers.address
        os.environ[BOARD] = boards.path
        os.environ[BOARD_RANKS] = boards.slots
        os.environ[SCRATCH] = self._scratch.name
        os.environ[ONLY_COPIES] = str(int(self.only_writes_copies))
        os.environ[COPY_FILES] = self._copies.begin(ranks if self._config.host_copy else ())
        with contextlib.suppress(OSError):  # something may have cleaned up there; workers do without it
            Path(self._scratch.name).mkdir(mode=0o700, exist_ok=True)
        os.environ.update(self.control.lease.environment())

    def _serve(self) -> None:
        """Serve the files of the job from here; before workers were started what is wrong ends ttprun."""
        try:
            self.control.records.server.start()
        except (AdaptorError, OSError, RuntimeError) as error:
            if self.control.generations_begun == 1:
                raise ConfigError(f"TTP_SERVE is {text.say(error)}") from None
            output.tell(f"[ttp] this node does not serve the job: TTP_SERVE is {text.say(error)}")

    def open_gate(self, common: SpareHello, host: str) -> bytes:
        """Let spare nodes wait here; return what they find in the rendezvous store.

        Args:
            common: what they must have in common with this node.
            host: the address of this node.
        """
        gate = self.control.gate = SpareGate(
            invitation.kind_of(self._config), self._config.port, self._tls, common, self.control.lose_absent
        )
        return self.control.thread.wait_for(gate.open(host)).encode()

    def stay_at_gate(
        self, gate: bytes, host: str, node: int, ranks: tuple[int, ...], taken: Taken | None = None
    ) -> None:
        """Keep a connection to the gate of node 0 as long as this process lives, by which its end is noticed.

        Args:
            gate: the invitation.
            host: the address of node 0.
            node: this one.
            ranks: of its workers.
            taken: the place that this node has taken as a spare, with its connection.
        """
        gate_invitation = Invitation.decode(gate, invitation.kind_of(self._config))
        owner = taken.place.owner if taken is not None else ""
        me = MemberHello(node, ranks, socket.gethostname(), os.getpid(), owner)
        self._at_gate = spare_node.Member(
            lambda: spare_node.stay_at_gate(gate_invitation, host, self._tls, me),
            taken.connection if taken is not None else None,
        )
        self.control.thread.wait_for(self._at_gate.begin())

    def fill(self, lost: Sequence[int], counts: StartCounts) -> dict[int, str]:
        """Give the places of lost nodes to spare nodes, for a restart; the arguments: `fill_for_restart`."""
        assert self.control.gate is not None
        host = self.control.controller_host
        assert host is not None
        work = fill_for_restart(self.control.gate, host.controller.membership, lost, counts, host.until)
        return self.control.thread.wait_for(work)

    @property
    def given(self) -> queue.SimpleQueue[dict[int, str]]:
        """Return the places that were given to spare nodes while others train, with their owners."""
        return self.control.given

    def meet(self) -> None:
        """Wait for the addresses of the nodes that stand by."""
        assert self.control.client is not None
        self.control.thread.wait_for(self.control.client.meet())

    def watch(self, processes: Mapping[int, subprocess.Popen[bytes]], starter: WorkerStarter) -> None:
        """Watch the workers, which have been started; `processes` by rank; `starter` starts more of them."""
        os.environ.pop(NEWCOMER, None)  # of those that have been started
        self.control.thread.wait_for(self.control.watch(processes, starter))

    @property
    def is_needed(self) -> bool:
        """Return whether workers of this node are alive, or an incident needs its agent.

        That has the controller, or publishes what workers of other nodes write.
        """
        return self.control.workers.running or self.control.incident_is_open

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict on this generation; None: there is none yet."""
        return self.control.verdict

    @property
    def noticed(self) -> float:
        """Return when the fault was noticed, in Unix seconds; 0: none is known."""
        return self.control.news.noticed

    @property
    def training_began(self) -> tuple[int, float] | None:
        """Return at which step training began, and when, on the monotonic clock; None: it has not."""
        return self.control.news.training_began

    @property
    def recovered(self) -> queue.SimpleQueue[tuple[Recovered, str]]:
        """Return the incidents after which training goes on, with the paths of their reports."""
        return self.control.recovered

    @property
    def save(self) -> str:
        """Return the save folder; '' if only another node knows it, or none does yet."""
        host = self.control.controller_host
        return host.controller.membership.save if host is not None else ""

    @property
    def report(self) -> str:
        """Return the path of the last report, or the node that writes it; '' if no controller has."""
        return self.control.report_path

    @property
    def over(self) -> bool:
        """Return True if every worker of the job has ended; until then one may fail, and all start again.

        The controller knows it, not the processes that live: those that died may still get a verdict.
        """
        host = self.control.controller_host
        return self.control.dismissed or (host is not None and host.dismissed)

    def fits(self, nodes: int) -> bool | None:
        """Return whether the job could train on so many nodes; None while it has not begun to train.

        It is asked on node 0, where the controller is.
        """
        host = self.control.controller_host
        if host is None or not (self.control.news.training_began or host.controller.membership.unprotected):
            return None
        return host.controller.membership.fits(nodes)

    def ask_for_nodes(self, count: int) -> None:
        """Have the job saved, so that all start again with the nodes that wait; a verdict says that it is."""
        with contextlib.suppress(ControlThreadError):
            self.control.thread.wait_for(self.control.say(NodesWaiting(self.control.node, count)))

    def leave(self, signal: str, grace_s: float) -> None:
        """Have the job saved, because this agent was told to end; a verdict says that it was in time.

        Args:
            signal: the name of the signal.
            grace_s: seconds to wait for the verdict.
        """
        until = time.monotonic() + grace_s
        self._is_told_to_end = True
        for one in self.control.uploads:
            one.leave(grace_s)
        if self.is_needed:
            with contextlib.suppress(ControlThreadError):
                request = AgentTerminationRequested(self.control.node, signal)
                self.control.thread.wait_for(self.control.say(request), grace_s)
            self.mark_leaving()
            self.control.reaped.wait(max(0.0, until - time.monotonic()))

    def record_next_action(self, action: str) -> None:
        """Add to the report of the last incident what is done after its verdict."""
        with contextlib.suppress(RuntimeError):  # the control thread has ended
            self.control.thread.loop.call_soon_threadsafe(
                self.control.records.report.record_next_action, action
            )

    def mark_leaving(self) -> None:
        """The job ends, and may save until then: one that is started again waits for that."""
        self.control.lease.mark_leaving()

    def dismiss(self, *, at_once: bool = False) -> None:
        """Stop reporting: the workers are about to be ended by this agent, and their deaths are no failures.

        A control thread that hangs is not waited for: it may not keep this process from its end.

        Args:
            at_once: kill them now, whatever they are doing.
        """
        with contextlib.suppress(ControlThreadError):
            self.control.thread.wait_for(self.control.stop_reporting(), self._patience_s)
        if at_once:
            self.control.workers.end_the_living()

    @property
    def _patience_s(self) -> float:
        """Return after how many seconds the control thread is taken for one that hangs."""
        return control_thread.HANGS_AT_END_S if self._is_told_to_end else control_thread.HANGS_S

    def wait_until_reaped(self) -> None:
        """Wait, after a verdict, until every worker has gone, or was ended."""
        self.control.reaped.wait()

    def end(self) -> None:
        """Close the generation: every worker is dead."""
        if self.verdict is not None:  # what is removed then must not be what others have begun to write
            self.control.settled.wait()
        with contextlib.suppress(ControlThreadError):
            self.control.thread.wait_for(self.control.end())
        keeper, self.control.keeper = self.control.keeper, None
        if keeper is not None:
            keeper.close()

    def close(self) -> bool:
        """Stop the control thread; return whether it had failed: it had ended by itself, or hangs.

        One that hangs is left behind, so this process has to be left without waiting for its threads.
        """
        thread = self.control.thread
        has_broken_off, hangs = thread.has_broken_off, thread.hangs(self._patience_s)
        if not hangs:
            self.end()
            with contextlib.suppress(ControlThreadError):
                if self.control.gate is not None:
                    thread.wait_for(self.control.gate.close())
                if self._at_gate is not None:
                    thread.wait_for(self._at_gate.end())
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
    """Return `line` as an environment variable can hold it, whatever is in an error that it quotes.

    That is without NUL, and in the encoding of the locale, which need not be UTF-8.
    """
    coding = sys.getfilesystemencoding()
    return line.replace("\0", " ").encode(coding, "backslashreplace").decode(coding)

"""Collects what the files of a job say, on the node with the controller, and gives it to `JobFiles`.

`JobRecords` is the entry; `JobStatus` makes `status.json`, the current state of the job.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from adaptor import hooks
from adaptor.config import Config
from adaptor.controller.controller import Controller
from adaptor.controller.membership import Membership
from adaptor.controller.plan import groups_of
from adaptor.hooks import AgentHooks
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.job_files import JobFiles, StepTimer, TimeUses
from adaptor.launchers.records.log import tell_error
from adaptor.protocol.messages import BoardRecord, ComputeTime, Layout, Share
from adaptor.protocol.records import Notice, Status, utc


class JobRecords:
    """The records of a job, on one node.

    Records are for people: an error in writing is printed, and ends nothing.

    Args:
        job: the job id given by the user; '' without one.
        newest_copy: returns the newest safe step in host memory; None without one.
        parts: the hooks of optional parts.
    """

    def __init__(
        self,
        config: Config,
        job: str,
        max_restarts: int,
        workers: Workers,
        newest_copy: Callable[[], int | None],
        parts: Sequence[AgentHooks],
    ) -> None:
        self._workers = workers
        self._hooks = parts
        self.files = JobFiles(config.log_path, job)
        self.report = IncidentReport(self.files, self._notify)
        self.status = JobStatus(self.files, self.report, max_restarts, newest_copy)

    def _notify(self, make: Callable[[], Notice]) -> None:
        hooks.each(self._hooks, lambda hook: hook.notify(make))

    def begin(self, generation: int) -> None:
        """Begin the generation of workers with the number `generation`."""
        self.report.begin(generation)
        self.status.uses.begin()

    def look(
        self,
        boards: Sequence[BoardRecord],
        host: ControllerHost,
        node: int,
        generation: int,
        spare_nodes: int,
    ) -> None:
        """Read the boards of the node with the controller; never raise.

        Args:
            boards: of the ranks of the node.
            generation: of workers, from 1 on.
            spare_nodes: the number of waiting spare nodes.
        """
        try:
            if node:
                folder = self.files.folder
                hooks.each(self._hooks, lambda hook: hook.has_controller(folder, took_over=True))
            self._look_at_uses()
            self.status.look(boards, host.controller, node, host.nodes, generation, spare_nodes)
            self.report.record_progress(max((board.finished for board in boards), default=-1))
        except Exception as error:
            tell_error("the status of the job is not written", error)

    def look_at_last_moments(self, host: ControllerHost | None) -> None:
        """Read the last step of the workers and the save after it, before the boards close; never raise.

        Args:
            host: of the controller; None: on another node.
        """
        if host is None:
            return
        try:
            self._look_at_uses()
            newest = self._workers.newest_step()
            self.status.note_last_step(newest)
            self.report.record_progress(newest)
        except Exception as error:
            tell_error("the status of the job does not have the last step", error)

    def _look_at_uses(self) -> None:
        if (reading := self._workers.spent()) is not None:
            self.status.uses.look(reading)

    def close(self) -> None:
        """Write the last status."""
        self.status.end()
        self.report.close()


# A rank is slow from this multiple of the time of its peers.
SLOW = 1.25
# Seconds between two replacements of the file.
STATUS_S = 1.0

State = Literal["starting", "training", "incident", "restarting"]


class JobStatus:
    """Writes the status of a job while the controller is on the node.

    The thread of decisions calls `look` each second, so `look` reads counts only, never each rank.

    Args:
        newest_copy: returns the newest safe step in host memory; None without one.

    Attributes:
        script: the script of the job, once known.
        uses: the uses of time of the first worker of the node (`Board.spend`).
    """

    def __init__(
        self,
        files: JobFiles,
        report: IncidentReport,
        max_restarts: int,
        newest_copy: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._files = files
        self._report = report
        self._max_restarts = max_restarts
        self._newest_copy = newest_copy
        self._copy: tuple[int | None, float] = (None, 0.0)  # the step, and the time of its first sight
        self._host = socket.gethostname()
        self._last: Status | None = None
        self._written = 0.0  # the last write, on the monotonic clock
        self._step = -1
        self._step_time = 0.0
        self._timer = StepTimer()
        self.uses = TimeUses()
        self._save = ""  # the save folder; restarted ranks report the folder when they begin to train
        self.script = ""
        self._holders: tuple[object, int | None] = (None, None)  # the members, and their holders
        # The times that were compared last, and the slow rank with its score.
        self._slow: tuple[Mapping[int, ComputeTime], tuple[int, float] | None] = ({}, None)
        self._trains = 0  # the newest generation whose ranks all train

    def look(
        self,
        boards: Sequence[BoardRecord],
        controller: Controller,
        node: int,
        nodes: int,
        generation: int,
        spare_nodes: int,
    ) -> None:
        """Read the boards of the node; write the status if a second has passed.

        Args:
            boards: of the ranks of the node.
            generation: of workers, from 1 on.
            spare_nodes: the number of waiting spare nodes.
        """
        time_now = time.time()
        step = max((board.finished for board in boards), default=-1)
        if step != self._step and step >= 0:
            self._step, self._step_time = step, time_now
        members, state = controller.membership, _state_of(controller)
        training = len(members.layouts)
        self._timer.look(step, time.monotonic(), counts=state == "training")
        if training == members.world_size and generation > self._trains:
            self._trains = generation
            self._report.record_training(load_s=self.uses.load)
        open_words = self._report.open_words
        last = self._last
        is_known = last is not None and (last.state, last.open_incident) == (state, open_words)
        if is_known and time.monotonic() - self._written < STATUS_S:
            return
        self._written = time.monotonic()
        self._save = members.save_folder or self._save
        why_not = next(iter(members.unprotected.values()), "")
        self._compare_compute_times(members)
        copied = self._newest_copy()
        if copied != self._copy[0]:
            self._copy = (copied, time_now)
        self._last = Status(
            time=utc(time_now),
            job=self._files.job,
            state=state,
            generation=generation,
            node=node,
            host=self._host,
            pid=os.getpid(),
            term=controller.term,
            restarts=generation - 1,
            max_restarts=self._max_restarts,
            nodes=nodes,
            nodes_lost=len(members.lost),
            ranks=members.world_size,
            ranks_training=training,
            ranks_ended=len(members.dead),
            protected=False if why_not else True if training == members.world_size else None,
            why_not=why_not,
            open_incident=open_words,
            save=self._save,
            script=self.script,
            lost_nodes=sorted(members.lost),
            shard_holders=self._count_holders(members, generation) if state == "training" else None,
            step_times=self._timer.times(),
            spare_nodes=spare_nodes,
            host_copy_step=copied,
            host_copy_time=None if copied is None else utc(self._copy[1]),
            failed_saves=self._report.failed_saves,
            failed_save=self._report.failed_save,
            **self._counts(),
        )
        self._files.write_status(self._last)

    def _count_holders(self, members: Membership, generation: int) -> int | None:
        """Return the number of holders of the least-held shard; None if not counted yet.

        With many ranks counting takes long: the writer's thread counts, once per generation and incident.
        """
        key = (generation, self._report.incidents)
        counted, holders = self._holders
        if counted != key:
            self._holders = (key, None)
            shares = {rank: layout.shares for rank, layout in members.layouts.items()}
            self._files.calculate(partial(self._keep_holders, key, shares))
            return None
        return holders

    def _keep_holders(self, key: object, shares: Mapping[int, tuple[Share, ...]]) -> None:
        self._holders = (key, _fewest_holders(shares))

    def _compare_compute_times(self, members: Membership) -> None:
        """Let the writer's thread look for a slow rank, if times have changed."""
        times = self._report.compute_times
        if times is not self._slow[0]:
            self._slow = (times, self._slow[1])
            self._files.calculate(partial(self._find_slow, times, dict(members.layouts)))

    def _find_slow(self, times: Mapping[int, ComputeTime], layouts: Mapping[int, Layout]) -> None:
        parts = {
            rank: next((share.group for share in layout.shares if share.can_write), "")
            for rank, layout in layouts.items()
        }
        self._slow = (times, slow_rank(times, parts))

    def note_last_step(self, step: int) -> None:
        """Note the newest finished step after the end of the workers; -1: unknown."""
        if step > self._step:
            self._step, self._step_time = step, time.time()

    def end(self) -> None:
        """Write the end of ttprun, if the node has written a status."""
        if self._last is not None:
            last = msgspec.structs.replace(
                self._last, time=utc(time.time()), state="ended", open_incident="", **self._counts()
            )
            self._files.write_status(last, always=True)

    def _counts(self) -> dict[str, Any]:
        """Return the fields of the status that also change in the last moments of a job."""
        report = self._report
        fields: dict[str, Any] = {
            "incidents": report.incidents,
            "last_incident": report.last_id,
            "spent": self.uses.totals(),
            "step": self._step if self._step >= 0 else None,
            "step_time": utc(self._step_time) if self._step >= 0 else None,
        }
        if report.drilled is not None:
            step, drill_time, problem = report.drilled
            fields |= {"drill_step": step, "drill_time": utc(drill_time), "drill_problem": problem}
        if (slow := self._slow[1]) is not None:
            fields |= {"slow_rank": slow[0], "slow_score": round(slow[1], 2)}
        return fields


def _state_of(controller: Controller) -> State:
    if controller.verdict is not None:
        return "restarting"
    if controller.incident is not None:
        return "incident"
    members = controller.membership
    return "training" if len(members.layouts) == members.world_size else "starting"


def slow_rank(times: Mapping[int, ComputeTime], parts: Mapping[int, str]) -> tuple[int, float] | None:
    """Return the rank that computes longest in comparison with its peers, with the ratio to the median; None
    if no ratio is `SLOW` or more.

    A rank is slow in the whole step and for each token: more tokens explain a longer step, and a few tokens
    take longer each.

    Args:
        times: of computation, by rank.
        parts: the part of the model of each rank; ranks with the same part are peers.
    """
    peers: dict[str, list[int]] = {}
    for rank in sorted(times.keys() & parts.keys()):
        peers.setdefault(parts[rank], []).append(rank)
    scores: dict[int, float] = {}
    for ranks in peers.values():
        of_step, of_token = (
            statistics.median_low(each) for each in zip(*(times[rank] for rank in ranks), strict=True)
        )
        for rank in ranks:
            scores[rank] = times[rank].of_step / of_step
            if of_token and (seconds := times[rank].of_token):
                scores[rank] = min(scores[rank], seconds / of_token)
    slowest = max(scores, key=scores.__getitem__, default=None)
    return (slowest, scores[slowest]) if slowest is not None and scores[slowest] >= SLOW else None


def _fewest_holders(shares: Mapping[int, tuple[Share, ...]]) -> int | None:
    """Return the number of ranks that hold the least-held shard; None without shards."""
    groups = groups_of(shares).values()
    return min((len(ranks) for group in groups for ranks in group.owners.values()), default=None)
